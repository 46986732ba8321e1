// Runs kernels on operands from a file: IN OUT. With the sizes of a mixture, both products: it writes the hidden
// vectors and the output. With four sizes (tiles, columns, rows, experts), the grouped product.
#include <cstdio>
#include <functional>

#include "arrays.h"
#include "cuda_runtime.h"
//
#include "csrc/warp_decode/grouped.cuh"
#include "csrc/warp_decode/plain.cuh"
#include "csrc/warp_decode/shared.cuh"

using namespace north_jax::warp_decode;

namespace {

enum Size { TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH, FORMAT, FORM, FLOAT32_OUT, BLOCKS, SEED, SIZES };

void launch(int blocks, int bytes, const std::function<void()>& kernel) {
    fibers::run(blocks, kThreads, bytes, kernel);
    if (!emulation::all_landed()) {
        std::fprintf(stderr, "a kernel ended while copies were on their way\n");
        std::exit(5);
    }
}

template <Format format>
void run(const GateUp& gate_up, const Down& down, bool shared, int blocks) {
    emulation::previous_kernel_ends = [] { fibers::fail("gate_up waits for a kernel before it"); };
    if (shared) {
        launch(blocks, gate_up_bytes<format>(gate_up), [&] { gate_up_shared<format>(gate_up); });
    } else {
        launch(gate_up.pairs() * gate_up.width() / kWarps, 0, [&] { gate_up_plain<format>(gate_up); });
    }
    // Before the down kernel has waited, nothing of this is there.
    std::vector<uint16_t> hidden(gate_up.hidden, gate_up.hidden + gate_up.pairs() * gate_up.width());
    std::fill_n(gate_up.hidden, hidden.size(), 0xffff);
    emulation::previous_kernel_ends = [&] { std::copy(hidden.begin(), hidden.end(), gate_up.hidden); };
    if (shared) {
        launch(blocks, down_bytes<format>(down), [&] { down_shared<format>(down); });
    } else {
        launch(down.tokens * down.weights.rows / kWarps, 0, [&] { down_plain<format>(down); });
    }
}

void run_grouped(std::ifstream& in, std::ofstream& result, const std::vector<int64_t>& sizes) {
    const auto tiles = static_cast<int32_t>(sizes[0]), columns = static_cast<int32_t>(sizes[1]);
    const auto rows = static_cast<int32_t>(sizes[2]), experts = static_cast<int32_t>(sizes[3]);
    const auto x = read<uint16_t>(in);
    const auto tile_experts = read<int32_t>(in);
    const auto values = read<std::byte>(in);
    std::vector<uint16_t> out(tiles * kTileTokens * rows, 0xffff);
    const Weights weights{values.data(), nullptr, Format::kBfloat16, experts, rows, columns, 1};
    const GroupedMatmul op{x.data(), tile_experts.data(), weights, out.data(), tiles};
    launch(3, grouped_bytes(), [&] { grouped_matmul(op); });
    write(result, out.data(), out.size());
}

}  // namespace

int main(int, char** arguments) {
    std::ifstream in(arguments[1], std::ios::binary);
    std::ofstream result(arguments[2], std::ios::binary);
    const auto sizes = read<int64_t>(in);
    if (sizes.size() == 4) {
        run_grouped(in, result, sizes);
        return 0;
    }
    if (sizes.size() != SIZES) return 2;
    const auto size = [&](Size name) { return static_cast<int32_t>(sizes[name]); };
    fibers::seed = sizes[SEED];
    const auto x = read<uint16_t>(in);
    const auto experts = read<int32_t>(in);
    const auto router = read<float>(in);
    const auto gate_up_values = read<std::byte>(in), gate_up_scales = read<std::byte>(in);
    const auto down_values = read<std::byte>(in), down_scales = read<std::byte>(in);
    const auto format = static_cast<Format>(size(FORMAT));

    std::vector<uint16_t> hidden(size(TOKENS) * size(TOP_K) * size(WIDTH), 0xffff);
    std::vector<std::byte> out(size(TOKENS) * size(HIDDEN) * (size(FLOAT32_OUT) ? 4 : 2), std::byte{0xff});
    const Weights up{gate_up_values.data(), gate_up_scales.data(), format, size(EXPERTS),
                     2 * size(WIDTH),       size(HIDDEN),          2};
    const Weights back{down_values.data(), down_scales.data(), format, size(EXPERTS), size(HIDDEN), size(WIDTH), 1};
    const GateUp gate_up{x.data(), experts.data(), up, hidden.data(), size(TOKENS), size(TOP_K)};
    const Down down{hidden.data(), experts.data(), router.data(), back,
                    out.data(),    size(TOKENS),   size(TOP_K),   size(FLOAT32_OUT) != 0};
    const bool shared = static_cast<Form>(size(FORM)) == Form::kShared;
    switch (format) {
        case Format::kBfloat16:
            run<Format::kBfloat16>(gate_up, down, shared, size(BLOCKS));
            break;
        case Format::kFp8Channel:
            run<Format::kFp8Channel>(gate_up, down, shared, size(BLOCKS));
            break;
        case Format::kFp8Block:
            run<Format::kFp8Block>(gate_up, down, shared, size(BLOCKS));
            break;
        case Format::kMxfp8:
            run<Format::kMxfp8>(gate_up, down, shared, size(BLOCKS));
            break;
    }
    write(result, hidden.data(), hidden.size());
    write(result, out.data(), out.size());
    return 0;
}
