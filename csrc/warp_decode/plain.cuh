// The plain form: one warp an output value, eight warps a block, nothing shared but what the caches hold.
#pragma once

#include <cuda_runtime.h>

#include "csrc/warp_decode/format.cuh"
#include "csrc/warp_decode/memory.cuh"
#include "csrc/warp_decode/warp.cuh"

namespace north_jax::warp_decode {

// Sixteen bytes of a row on their way, with the scales that go with them; zeros outside of the row.
template <Format format>
struct Fetched {
    uint4 raw;
    uint32_t word;

    __device__ __forceinline__ void fetch(const std::byte* row, const uint32_t* words, int chunk, bool inside,
                                          uint64_t policy) {
        using C = Code<format>;
        raw = inside ? load_weights(row + 16 * int64_t{chunk}, policy) : make_uint4(0, 0, 0, 0);
        if constexpr (C::kWords) word = inside ? load_word(words + chunk * C::kChunk / kScaleColumns) : 0;
    }

    // What one unit of these weights adds to the sum of a chunk.
    __device__ __forceinline__ float dot(int unit, const float (&x)[kUnit]) const {
        float values[kUnit], sum = 0;
        Code<format>::unpack(raw, unit, values);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) sum += values[i] * x[i];
        return sum;
    }

    __device__ __forceinline__ float scaled(float sum, int chunk) const {
        if constexpr (Code<format>::kWords) return sum * Code<format>::scale(word, chunk);
        return sum;
    }
};

// One warp an intermediate neuron, token and routed expert. Blocks of the same neurons of all pairs are neighbours, so
// that tokens which chose the same expert find its rows in the L2.
template <Format format>
__global__ void __launch_bounds__(kThreads, 3) gate_up_plain(const __grid_constant__ GateUp op) {
    using C = Code<format>;
    constexpr int kAhead = 4;  // chunks of each row on their way at once
    allow_next_kernel();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int pairs = op.pairs(), pair = static_cast<int>(blockIdx.x) % pairs;
    const int neuron = static_cast<int>(blockIdx.x) / pairs * kWarps + static_cast<int>(threadIdx.x) / 32;
    uint16_t* out = op.hidden + int64_t{pair} * op.width() + neuron;
    const int chosen = __ldg(op.experts + pair);
    if (chosen < 0 || chosen >= op.weights.experts) {
        if (lane == 0) *out = 0;
        return;
    }
    const Expert<format> expert(op.weights, chosen);
    const int up_row = op.width() + neuron;
    const std::byte *gate_values = expert.row(neuron), *up_values = expert.row(up_row);
    const uint32_t *gate_words = expert.words(neuron), *up_words = expert.words(up_row);
    const float gate_scale = expert.row_scale(neuron), up_scale = expert.row_scale(up_row);
    const uint16_t* x = op.x + int64_t{pair / op.top_k} * op.weights.columns;
    const uint64_t policy = evict_first();
    const int chunks = op.weights.columns / C::kChunk;

    float gate = 0, up = 0;
    for (int first = lane; first < chunks; first += 32 * kAhead) {
        Fetched<format> gates[kAhead], ups[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int chunk = first + 32 * j;
            gates[j].fetch(gate_values, gate_words, chunk, chunk < chunks, policy);
            ups[j].fetch(up_values, up_words, chunk, chunk < chunks, policy);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int chunk = first + 32 * j;
            if (chunk >= chunks) break;
            float gate_sum = 0, up_sum = 0;
#pragma unroll
            for (int unit = 0; unit < C::kUnits; ++unit) {
                float values[kUnit];
                unpack_bfloat16(load_activations(x + chunk * C::kChunk + unit * kUnit), values);
                gate_sum += gates[j].dot(unit, values);
                up_sum += ups[j].dot(unit, values);
            }
            gate += gates[j].scaled(gate_sum, chunk);
            up += ups[j].scaled(up_sum, chunk);
        }
    }
    gate = warp_sum(gate) * gate_scale;
    up = warp_sum(up) * up_scale;
    if (lane == 0) *out = to_bfloat16(silu(gate) * up);
}

// A place in the rows of all of a token's experts, one after another.
struct Place {
    int slot;   // of the token's experts
    int chunk;  // of that expert's row

    __device__ __forceinline__ void advance(int chunks) {
        chunk += 32;
        while (chunk >= chunks) {
            chunk -= chunks;
            ++slot;
        }
    }
};

// One warp an output value of a token: the rows of all its experts are one long sum, whose terms carry the router's
// weights.
template <Format format>
__global__ void __launch_bounds__(kThreads, 2) down_plain(const __grid_constant__ Down op) {
    using C = Code<format>;
    constexpr int kAhead = 12;
    allow_next_kernel();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int token = static_cast<int>(blockIdx.x) % op.tokens;
    const int row = static_cast<int>(blockIdx.x) / op.tokens * kWarps + static_cast<int>(threadIdx.x) / 32;
    const int chunks = op.weights.columns / C::kChunk;
    const uint64_t policy = evict_first();

    int chosen = -1;  // lane j: the token's expert number j, and the factor of what it adds
    float factor = 0;
    if (lane < op.top_k) {
        chosen = __ldg(op.experts + token * op.top_k + lane);
        factor = __ldg(op.router + token * op.top_k + lane);
        if (chosen >= op.weights.experts) chosen = -1;
        if (chosen >= 0) factor *= Expert<format>(op.weights, chosen).row_scale(row);
    }

    float sum = 0;
    Place fetched{lane / chunks, lane % chunks}, used = fetched;
    const uint16_t* hidden = op.hidden + int64_t{token} * op.top_k * op.width();
    for (int base = 0; base < op.top_k * chunks; base += 32 * kAhead) {
        Fetched<format> rows[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int id = __shfl_sync(~0u, chosen, fetched.slot);
            const bool inside = fetched.slot < op.top_k && id >= 0;
            const Expert<format> expert(op.weights, inside ? id : 0);
            rows[j].fetch(expert.row(row), expert.words(row), fetched.chunk, inside, policy);
            fetched.advance(chunks);
        }
        wait_for_previous_kernel();  // the weights are on their way; what they are multiplied with may not be ready
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int id = __shfl_sync(~0u, chosen, used.slot);
            const float weight = __shfl_sync(~0u, factor, used.slot);
            if (used.slot < op.top_k && id >= 0) {
                const uint16_t* x = hidden + used.slot * op.width() + used.chunk * C::kChunk;
                float chunk_sum = 0;
#pragma unroll
                for (int unit = 0; unit < C::kUnits; ++unit) {
                    float values[kUnit];
                    unpack_bfloat16(load_activations(x + unit * kUnit), values);
                    chunk_sum += rows[j].dot(unit, values);
                }
                sum += weight * rows[j].scaled(chunk_sum, used.chunk);
            }
            used.advance(chunks);
        }
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    const int64_t place = int64_t{token} * op.weights.rows + row;
    if (op.float32_out) {
        static_cast<float*>(op.out)[place] = sum;
    } else {
        static_cast<uint16_t*>(op.out)[place] = to_bfloat16(sum);
    }
}

}  // namespace north_jax::warp_decode
