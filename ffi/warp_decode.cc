// north_jax.moe_gate_up, north_jax.moe_down and north_jax.warp_decode, which is one after the other; and
// north_jax.grouped_matmul, the product of the path that they are compared with.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "csrc/warp_decode/operands.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

#ifdef NORTH_JAX_CUDA_ARCHITECTURES
#include "csrc/warp_decode/launch.h"
#endif

namespace north_jax {
namespace {

namespace ffi = ::xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;
using warp_decode::Down;
using warp_decode::Form;
using warp_decode::Format;
using warp_decode::GateUp;
using warp_decode::GroupedMatmul;
using warp_decode::Weights;

// The sizes that both products share, as far as the first operands tell.
struct Sizes {
    int64_t tokens, top_k, experts, hidden, width;
};

Form form_of(OperandCheck& check, int64_t form) {
    check.require(form == 0 || form == 1, "form is " + std::to_string(form) + ", expected 0 (plain) or 1 (shared)");
    return form == 0 ? Form::kPlain : Form::kShared;
}

void require_sizes(OperandCheck& check, const Sizes& sizes) {
    using namespace warp_decode;
    const auto within = [&](const char* name, int64_t size, int64_t most) {
        check.require(1 <= size && size <= most,
                      std::string(name) + " is " + std::to_string(size) + ", expected 1 to " + std::to_string(most));
    };
    const auto step = [&](const char* name, int64_t size) {
        check.require(size > 0 && size % kSizeStep == 0 && size <= 1 << 20,
                      std::string(name) + " is " + std::to_string(size) + ", expected a multiple of 32 up to 2^20");
    };
    within("the number of tokens", sizes.tokens, kMaxTokens);
    within("top-k", sizes.top_k, kMaxTopK);
    within("the number of experts", sizes.experts, 1 << 16);
    step("the hidden size", sizes.hidden);
    step("the intermediate size", sizes.width);
}

// values [experts, rows, columns] and its scales, whose type and rank say the format.
Weights weights_of(OperandCheck& check, const std::string& name, AnyBuffer values, AnyBuffer scales, Shape shape,
                   int32_t parts) {
    const std::string scales_name = name + " scales";
    Weights weights{static_cast<const std::byte*>(values.untyped_data()),
                    static_cast<const std::byte*>(scales.untyped_data()),
                    Format::kBfloat16,
                    static_cast<int32_t>(shape[0]),
                    static_cast<int32_t>(shape[1]),
                    static_cast<int32_t>(shape[2]),
                    parts};
    if (values.element_type() == DataType::BF16) {
        check.require(name.c_str(), values, DataType::BF16, shape);
        check.require(scales_name.c_str(), scales, DataType::F32, {0});
        return weights;
    }
    check.require(name.c_str(), values, DataType::F8E4M3FN, shape);
    if (scales.element_type() == DataType::F8E8M0FNU) {
        weights.format = Format::kMxfp8;
        const int64_t bytes = 4 * int64_t{scale_words(weights)};
        check.require(scales_name.c_str(), scales, DataType::F8E8M0FNU, {shape[0], shape[1], bytes});
    } else if (shape_of(scales).size() == 2) {
        weights.format = Format::kFp8Channel;
        check.require(scales_name.c_str(), scales, DataType::F32, {shape[0], shape[1]});
    } else {
        weights.format = Format::kFp8Block;
        check.require(scales_name.c_str(), scales, DataType::F32,
                      {shape[0], scale_rows(weights), scale_words(weights)});
    }
    return weights;
}

ffi::ErrorOr<GateUp> gate_up_operands(const char* operation, AnyBuffer x, AnyBuffer experts, AnyBuffer gate_up,
                                      AnyBuffer scales, AnyBuffer hidden) {
    OperandCheck check(operation);
    const Shape tokens = shape_of(x), chosen = shape_of(experts), weights = shape_of(gate_up);
    check.require(tokens.size() == 2, "x", x, "BF16 [T, D]");
    check.require(chosen.size() == 2, "experts", experts, "S32 [T, k]");
    check.require(weights.size() == 3 && weights[1] % 2 == 0, "gate_up", gate_up, "[E, 2I, D]");
    if (check.failed()) return check.error();
    const Sizes sizes{tokens[0], chosen[1], weights[0], tokens[1], weights[1] / 2};
    require_sizes(check, sizes);
    if (check.failed()) return check.error();
    check.require("x", x, DataType::BF16, {sizes.tokens, sizes.hidden});
    check.require("experts", experts, DataType::S32, {sizes.tokens, sizes.top_k});
    check.require("hidden", hidden, DataType::BF16, {sizes.tokens, sizes.top_k, sizes.width});
    GateUp op;
    op.x = static_cast<const uint16_t*>(x.untyped_data());
    op.experts = static_cast<const int32_t*>(experts.untyped_data());
    op.weights = weights_of(check, "gate_up", gate_up, scales, {sizes.experts, 2 * sizes.width, sizes.hidden}, 2);
    op.hidden = static_cast<uint16_t*>(hidden.untyped_data());
    op.tokens = static_cast<int32_t>(sizes.tokens);
    op.top_k = static_cast<int32_t>(sizes.top_k);
    if (check.failed()) return check.error();
    return op;
}

ffi::ErrorOr<Down> down_operands(const char* operation, AnyBuffer hidden, AnyBuffer experts, AnyBuffer router,
                                 AnyBuffer down, AnyBuffer scales, AnyBuffer out) {
    OperandCheck check(operation);
    const Shape inputs = shape_of(hidden), weights = shape_of(down);
    check.require(inputs.size() == 3, "hidden", hidden, "BF16 [T, k, I]");
    check.require(weights.size() == 3, "down", down, "[E, D, I]");
    if (check.failed()) return check.error();
    const Sizes sizes{inputs[0], inputs[1], weights[0], weights[1], inputs[2]};
    require_sizes(check, sizes);
    if (check.failed()) return check.error();
    check.require("hidden", hidden, DataType::BF16, {sizes.tokens, sizes.top_k, sizes.width});
    check.require("experts", experts, DataType::S32, {sizes.tokens, sizes.top_k});
    check.require("weights", router, DataType::F32, {sizes.tokens, sizes.top_k});
    const bool float32_out = out.element_type() == DataType::F32;
    check.require("out", out, float32_out ? DataType::F32 : DataType::BF16, {sizes.tokens, sizes.hidden});
    Down op;
    op.hidden = static_cast<const uint16_t*>(hidden.untyped_data());
    op.experts = static_cast<const int32_t*>(experts.untyped_data());
    op.router = static_cast<const float*>(router.untyped_data());
    op.weights = weights_of(check, "down", down, scales, {sizes.experts, sizes.hidden, sizes.width}, 1);
    op.out = out.untyped_data();
    op.tokens = static_cast<int32_t>(sizes.tokens);
    op.top_k = static_cast<int32_t>(sizes.top_k);
    op.float32_out = float32_out;
    if (check.failed()) return check.error();
    return op;
}

std::atomic<int64_t> calls{0};

// Where the operations run.
class Place {
   public:
    virtual ~Place() = default;
    virtual ffi::Error gate_up(const GateUp& op, Form form) = 0;
    // follows: `gate_up` has just been called, for the hidden vectors of this one.
    virtual ffi::Error down(const Down& op, Form form, bool follows) = 0;
    virtual ffi::Error grouped_matmul(const GroupedMatmul& op) = 0;
};

ffi::Error run_gate_up(Place& place, AnyBuffer x, AnyBuffer experts, AnyBuffer gate_up, AnyBuffer scales,
                       ffi::Result<AnyBuffer> hidden, int64_t form) {
    ++calls;
    OperandCheck check("moe_gate_up");
    const Form chosen = form_of(check, form);
    if (check.failed()) return check.error();
    const auto op = gate_up_operands("moe_gate_up", x, experts, gate_up, scales, *hidden);
    return op.has_error() ? op.error() : place.gate_up(*op, chosen);
}

ffi::Error run_down(Place& place, AnyBuffer hidden, AnyBuffer experts, AnyBuffer router, AnyBuffer down,
                    AnyBuffer scales, ffi::Result<AnyBuffer> out, int64_t form) {
    ++calls;
    OperandCheck check("moe_down");
    const Form chosen = form_of(check, form);
    if (check.failed()) return check.error();
    const auto op = down_operands("moe_down", hidden, experts, router, down, scales, *out);
    return op.has_error() ? op.error() : place.down(*op, chosen, false);
}

ffi::Error run_both(Place& place, AnyBuffer x, AnyBuffer experts, AnyBuffer router, AnyBuffer gate_up,
                    AnyBuffer gate_up_scales, AnyBuffer down, AnyBuffer down_scales, ffi::Result<AnyBuffer> out,
                    ffi::Result<AnyBuffer> hidden, int64_t form) {
    ++calls;
    OperandCheck check("warp_decode");
    const Form chosen = form_of(check, form);
    if (check.failed()) return check.error();
    const auto first = gate_up_operands("warp_decode", x, experts, gate_up, gate_up_scales, *hidden);
    if (first.has_error()) return first.error();
    const auto second = down_operands("warp_decode", *hidden, experts, router, down, down_scales, *out);
    if (second.has_error()) return second.error();
    const Weights &up = first->weights, &back = second->weights;
    check.require(up.experts == back.experts && up.columns == back.rows, "down", down,
                  describe(down.element_type(), {up.experts, up.columns, first->width()}));
    if (check.failed()) return check.error();
    const ffi::Error error = place.gate_up(*first, chosen);
    return error.failure() ? error : place.down(*second, chosen, true);
}

ffi::Error run_grouped_matmul(Place& place, AnyBuffer x, AnyBuffer tile_experts, AnyBuffer weights,
                              ffi::Result<AnyBuffer> out) {
    ++calls;
    OperandCheck check("grouped_matmul");
    const Shape tiles = shape_of(tile_experts), shape = shape_of(weights);
    check.require(tiles.size() == 1 && 0 < tiles[0] && tiles[0] <= 1 << 16, "tile_experts", tile_experts,
                  "S32 [tiles]");
    check.require(shape.size() == 3 && shape[1] % warp_decode::kSizeStep == 0 && shape[2] % warp_decode::kSizeStep == 0,
                  "weights", weights, "BF16 [E, N, K] with N and K multiples of 32");
    if (check.failed()) return check.error();
    const int64_t rows = tiles[0] * warp_decode::kTileTokens;
    check.require("tile_experts", tile_experts, DataType::S32, tiles);
    check.require("x", x, DataType::BF16, {rows, shape[2]});
    check.require("weights", weights, DataType::BF16, shape);
    check.require("out", *out, DataType::BF16, {rows, shape[1]});
    if (check.failed()) return check.error();
    GroupedMatmul op;
    op.x = static_cast<const uint16_t*>(x.untyped_data());
    op.tile_experts = static_cast<const int32_t*>(tile_experts.untyped_data());
    op.weights = {static_cast<const std::byte*>(weights.untyped_data()),
                  nullptr,
                  Format::kBfloat16,
                  static_cast<int32_t>(shape[0]),
                  static_cast<int32_t>(shape[1]),
                  static_cast<int32_t>(shape[2]),
                  1};
    op.out = static_cast<uint16_t*>(out->untyped_data());
    op.tiles = static_cast<int32_t>(tiles[0]);
    return place.grouped_matmul(op);
}

// The operands of each, after the context that its platform has.
auto gate_up_binding(auto context) {
    return std::move(context)
        .template Arg<AnyBuffer>()  // x
        .template Arg<AnyBuffer>()  // experts
        .template Arg<AnyBuffer>()  // gate_up
        .template Arg<AnyBuffer>()  // gate_up scales
        .template Ret<AnyBuffer>()  // hidden
        .template Attr<int64_t>("form");
}

auto down_binding(auto context) {
    return std::move(context)
        .template Arg<AnyBuffer>()  // hidden
        .template Arg<AnyBuffer>()  // experts
        .template Arg<AnyBuffer>()  // weights
        .template Arg<AnyBuffer>()  // down
        .template Arg<AnyBuffer>()  // down scales
        .template Ret<AnyBuffer>()  // out
        .template Attr<int64_t>("form");
}

auto both_binding(auto context) {
    return std::move(context)
        .template Arg<AnyBuffer>()  // x
        .template Arg<AnyBuffer>()  // experts
        .template Arg<AnyBuffer>()  // weights
        .template Arg<AnyBuffer>()  // gate_up
        .template Arg<AnyBuffer>()  // gate_up scales
        .template Arg<AnyBuffer>()  // down
        .template Arg<AnyBuffer>()  // down scales
        .template Ret<AnyBuffer>()  // out
        .template Ret<AnyBuffer>()  // hidden
        .template Attr<int64_t>("form");
}

auto grouped_matmul_binding(auto context) {
    return std::move(context)
        .template Arg<AnyBuffer>()   // x
        .template Arg<AnyBuffer>()   // tile_experts
        .template Arg<AnyBuffer>()   // weights
        .template Ret<AnyBuffer>();  // out
}

class Cpu final : public Place {
   public:
    ffi::Error gate_up(const GateUp& op, Form) override {
        warp_decode::gate_up_cpu(op);
        return ffi::Error::Success();
    }
    ffi::Error down(const Down& op, Form, bool) override {
        warp_decode::down_cpu(op);
        return ffi::Error::Success();
    }
    ffi::Error grouped_matmul(const GroupedMatmul& op) override {
        warp_decode::grouped_matmul_cpu(op);
        return ffi::Error::Success();
    }
};

template <class... Operands>
auto on_cpu(ffi::Error (*run)(Place&, Operands...)) {
    return [run](Operands... operands) {
        Cpu place;
        return run(place, operands...);
    };
}

}  // namespace

int64_t warp_decode_calls() { return calls; }

XLA_FFI_Error* MoeGateUpCpu(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cpu(run_gate_up), gate_up_binding(ffi::Ffi::Bind()));
    return handler(frame);
}

XLA_FFI_Error* MoeDownCpu(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cpu(run_down), down_binding(ffi::Ffi::Bind()));
    return handler(frame);
}

XLA_FFI_Error* WarpDecodeCpu(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cpu(run_both), both_binding(ffi::Ffi::Bind()));
    return handler(frame);
}

XLA_FFI_Error* GroupedMatmulCpu(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cpu(run_grouped_matmul), grouped_matmul_binding(ffi::Ffi::Bind()));
    return handler(frame);
}

#ifdef NORTH_JAX_CUDA_ARCHITECTURES

namespace {

class Cuda final : public Place {
   public:
    explicit Cuda(cudaStream_t stream) : stream_(stream) {}

    ffi::Error gate_up(const GateUp& op, Form form) override {
        return error_of("moe_gate_up", warp_decode::launch_gate_up(op, form, stream_));
    }
    ffi::Error down(const Down& op, Form form, bool follows) override {
        return error_of("moe_down", warp_decode::launch_down(op, form, follows, stream_));
    }
    ffi::Error grouped_matmul(const GroupedMatmul& op) override {
        return error_of("grouped_matmul", warp_decode::launch_grouped_matmul(op, stream_));
    }

   private:
    static ffi::Error error_of(const char* operation, cudaError_t status) {
        if (status == cudaSuccess) return ffi::Error::Success();
        return ffi::Error::Internal(std::string(operation) + ": " + cudaGetErrorString(status));
    }

    const cudaStream_t stream_;
};

template <class... Operands>
auto on_cuda(ffi::Error (*run)(Place&, Operands...)) {
    return [run](cudaStream_t stream, Operands... operands) {
        Cuda place(stream);
        return run(place, operands...);
    };
}

auto with_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

// A call launches kernels on the stream and does nothing else, so XLA may record it in a CUDA graph.
constexpr auto kTraits = {ffi::Traits::kCmdBufferCompatible};

}  // namespace

XLA_FFI_Error* MoeGateUpCuda(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cuda(run_gate_up), gate_up_binding(with_stream()), kTraits);
    return handler(frame);
}

XLA_FFI_Error* MoeDownCuda(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cuda(run_down), down_binding(with_stream()), kTraits);
    return handler(frame);
}

XLA_FFI_Error* WarpDecodeCuda(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cuda(run_both), both_binding(with_stream()), kTraits);
    return handler(frame);
}

XLA_FFI_Error* GroupedMatmulCuda(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, on_cuda(run_grouped_matmul), grouped_matmul_binding(with_stream()), kTraits);
    return handler(frame);
}

#endif

}  // namespace north_jax
