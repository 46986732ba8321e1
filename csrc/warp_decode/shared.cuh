// The shared form: tokens that chose the same expert share its weights' way from memory.
#pragma once

#include <cuda_runtime.h>

#include "csrc/warp_decode/block.cuh"
#include "csrc/warp_decode/segments.cuh"
#include "csrc/warp_decode/stream.cuh"

namespace north_jax::warp_decode {

inline constexpr int kNeurons = kRows / 2;  // of a job of gate_up: eight gate rows and their up rows
inline constexpr int kMostTiles = kGroup / kColumnTokens;

// The warps' sums of a job; two jobs in turn.
using Partials = float4[2][kMostTiles][kWarps][32];

template <Format format>
HOST_DEVICE constexpr int ring_bytes() {
    return kWarps * static_cast<int>(sizeof(Ring<format>));
}

HOST_DEVICE inline int product_stride(int pairs) { return pairs | 1; }  // odd: rows lie in different banks

// The shared memory of a block.
template <Format format>
HOST_DEVICE int gate_up_bytes(const GateUp& op) {
    return ring_bytes<format>() + static_cast<int>(sizeof(Partials)) + Segments::bytes(op.pairs(), op.weights.experts);
}

template <Format format>
HOST_DEVICE int down_bytes(const Down& op) {
    return ring_bytes<format>() + Segments::bytes(op.pairs(), op.weights.experts) +
           kRows * product_stride(op.pairs()) * static_cast<int>(sizeof(float));
}

// Eight neurons of a segment's expert.
struct GateUpJobs {
    const Segments& segments;
    int width;

    __device__ int segment(int number) const { return number / (width / kNeurons); }
    __device__ int neuron(int number) const { return number % (width / kNeurons) * kNeurons; }
    __device__ Job operator()(int number) const {
        return {segments.expert[segment(number)], neuron(number), width + neuron(number)};
    }
};

// The sixteen rows of a tile, of a segment's expert.
struct DownJobs {
    const Segments& segments;
    int tile;

    __device__ Job operator()(int segment) const {
        return {segments.expert[segment], tile * kRows, tile * kRows + kRows / 2};
    }
};

// Calls body(constant) with the tiles of eight that n pairs take.
template <int n>
struct Tiles {
    static constexpr int value = n;
};
template <class Body>
__device__ __forceinline__ void with_tiles(int n, Body body) {
    static_assert(kMostTiles == 2);
    if (n <= kColumnTokens) {
        body(Tiles<1>());
    } else {
        body(Tiles<2>());
    }
}

// A job of gate_up, after its sums are in `partials`: the value of one neuron and pair a thread.
template <Format format>
__device__ __forceinline__ void finish_neurons(const GateUp& op, const Segments& segments, const Job& job, int begin,
                                               int n, const float4 (&partials)[kMostTiles][kWarps][32]) {
    const Expert<format> expert(op.weights, job.expert);
    for (int i = static_cast<int>(threadIdx.x); i < n * kNeurons; i += kThreads) {
        const int row = i % kNeurons, column = i / kNeurons, tile = column / kColumnTokens;
        const int lane = row * 4 + column % kColumnTokens / 2;
        float gate = 0, up = 0;
        for (int warp = 0; warp < kWarps; ++warp) {
            const float4 sums = partials[tile][warp][lane];
            gate += column % 2 == 0 ? sums.x : sums.y;
            up += column % 2 == 0 ? sums.z : sums.w;
        }
        gate *= expert.row_scale(job.first + row);
        up *= expert.row_scale(job.second + row);
        const int64_t pair = segments.pair[begin + column];
        op.hidden[pair * op.width() + job.first + row] = to_bfloat16(silu(gate) * up);
    }
}

// Blocks take eight neurons of an expert in turn; a block's warps divide the columns among them, and what they have
// summed is added in their order.
template <Format format>
__global__ void __launch_bounds__(kThreads, 2) gate_up_shared(const __grid_constant__ GateUp op) {
    allow_next_kernel();
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    auto* rings = reinterpret_cast<Ring<format>*>(block_memory());
    auto& partials = *reinterpret_cast<Partials*>(block_memory() + ring_bytes<format>());
    const Segments segments(block_memory() + ring_bytes<format>() + sizeof(Partials), op.pairs(), op.weights.experts);
    find_segments(op.experts, op.pairs(), op.weights.experts, segments);

    const GateUpJobs jobs{segments, op.width()};
    const Share share{block, blocks, *segments.count * (op.width() / kNeurons), warp, kWarps};
    Stream<format, GateUpJobs> stream(op.weights, jobs, share, rings + warp, lane);
    for (int p = block; p < op.pairs(); p += blocks) {  // no expert: zeros
        if (segments.of[p] != Segments::kNone) continue;
        for (int i = thread; i < op.width(); i += kThreads) op.hidden[int64_t{p} * op.width() + i] = 0;
    }
    int turn = 0;
    for (int number = share.first; number < share.count; number += share.stride) {
        const int segment = jobs.segment(number), begin = segments.begin[segment], n = segments.pairs_of(segment);
        with_tiles(n, [&](auto tiles) {
            constexpr int kTiles = decltype(tiles)::value;
            const auto place = [&](int tile) {  // beyond the last token: that one again
                const int pair = segments.pair[begin + min(tile * kColumnTokens + lane / 4, n - 1)];
                return pair / op.top_k * op.weights.columns;
            };
            Sums sums[kTiles] = {};
            multiply<kTiles>(stream, op.x, place, lane, sums);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                partials[turn][j][warp][lane] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
            }
        });
        __syncthreads();  // the other half is written only after all have come back here
        finish_neurons<format>(op, segments, jobs(number), begin, n, partials[turn]);
        turn ^= 1;
    }
}

// A block computes tiles of sixteen rows: its warps take the segments in turn, and put the product of a row and a
// pair's intermediate vector in its place in shared memory. Then they add those of each token, in the order of its
// experts.
template <Format format>
__global__ void __launch_bounds__(kThreads, 2) down_shared(const __grid_constant__ Down op) {
    allow_next_kernel();
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int pairs = op.pairs(), stride = product_stride(pairs);
    auto* rings = reinterpret_cast<Ring<format>*>(block_memory());
    unsigned char* rest = block_memory() + ring_bytes<format>();
    const Segments segments(rest, pairs, op.weights.experts);
    float* products = reinterpret_cast<float*>(rest + Segments::bytes(pairs, op.weights.experts));
    find_segments(op.experts, pairs, op.weights.experts, segments);

    for (int tile = static_cast<int>(blockIdx.x); tile < op.weights.rows / kRows; tile += static_cast<int>(gridDim.x)) {
        const DownJobs jobs{segments, tile};
        const Share share{warp, kWarps, *segments.count, 0, 1};
        Stream<format, DownJobs> stream(op.weights, jobs, share, rings + warp, lane);
        wait_for_previous_kernel();  // the first weights are on their way
        for (int segment = share.first; segment < share.count; segment += share.stride) {
            const Job job = jobs(segment);
            const Expert<format> expert(op.weights, job.expert);
            const int begin = segments.begin[segment], n = segments.pairs_of(segment);
            const float upper_scale = expert.row_scale(job.first + lane / 4);
            const float lower_scale = expert.row_scale(job.second + lane / 4);
            with_tiles(n, [&](auto tiles) {
                constexpr int kTiles = decltype(tiles)::value;
                const auto place = [&](int tile) {
                    return segments.pair[begin + min(tile * kColumnTokens + lane / 4, n - 1)] * op.width();
                };
                Sums sums[kTiles] = {};
                multiply<kTiles>(stream, op.hidden, place, lane, sums);
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int column = j * kColumnTokens + lane % 4 * 2 + i;
                        if (column >= n) continue;
                        float* to = products + segments.pair[begin + column];
                        to[lane / 4 * stride] = sums[j][i] * upper_scale;
                        to[(lane / 4 + kRows / 2) * stride] = sums[j][2 + i] * lower_scale;
                    }
                }
            });
        }
        __syncthreads();
        for (int i = thread; i < kRows * op.tokens; i += kThreads) {
            const int row = i % kRows, token = i / kRows;
            float sum = 0;
            for (int j = 0; j < op.top_k; ++j) {
                const int p = token * op.top_k + j;
                if (segments.of[p] != Segments::kNone) sum += __ldg(op.router + p) * products[row * stride + p];
            }
            const int64_t place = int64_t{token} * op.weights.rows + tile * kRows + row;
            if (op.float32_out) {
                static_cast<float*>(op.out)[place] = sum;
            } else {
                static_cast<uint16_t*>(op.out)[place] = to_bfloat16(sum);
            }
        }
        __syncthreads();
    }
}

}  // namespace north_jax::warp_decode
