// The shared form: tokens that chose the same expert share its weights' way from memory.
#pragma once

#include <cuda_runtime.h>

#include "csrc/warp_decode/block.cuh"
#include "csrc/warp_decode/stream.cuh"

namespace north_jax::warp_decode {

inline constexpr int kTileRows = kWarps;  // rows of the down projection that a block computes at once

// The shared memory of a block: a ring for each warp, the segments, and in `down` the products of the tile's rows.
template <Format format>
HOST_DEVICE constexpr int ring_bytes() {
    return kWarps * static_cast<int>(sizeof(Ring<format>));
}

HOST_DEVICE inline int product_stride(int pairs) { return pairs | 1; }  // odd: rows lie in different banks

template <Format format>
HOST_DEVICE int gate_up_bytes(const GateUp& op) {
    return ring_bytes<format>() + Segments::bytes(op.pairs(), op.weights.experts);
}

template <Format format>
HOST_DEVICE int down_bytes(const Down& op) {
    return ring_bytes<format>() + Segments::bytes(op.pairs(), op.weights.experts) +
           kTileRows * product_stride(op.pairs()) * static_cast<int>(sizeof(float));
}

// Two neurons of an expert: gate and up rows.
struct GateUpJobs {
    int width;

    __device__ Job operator()(int number) const {
        const int halves = width / 2, neuron = number % halves * 2;
        return {number / halves, neuron, width + neuron};
    }
};

// Four of the eight rows of a tile, with one expert.
struct DownJobs {
    int tile;

    __device__ Job operator()(int number) const {
        const int row = tile * kTileRows + number % 2 * kRows;
        return {number / 2, row, row + 2};
    }
};

// All warps of the grid take pairs of neurons in turn, expert by expert.
template <Format format>
__global__ void __launch_bounds__(kThreads, 2) gate_up_shared(const __grid_constant__ GateUp op) {
    allow_next_kernel();
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int width = op.width(), block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    auto* rings = reinterpret_cast<Ring<format>*>(block_memory());
    const Segments segments(block_memory() + ring_bytes<format>(), op.pairs(), op.weights.experts);
    find_segments(op.experts, op.pairs(), op.weights.experts, segments);

    const GateUpJobs jobs{width};
    const Share share{block * kWarps + warp, blocks * kWarps, *segments.count * (width / 2)};
    Stream<format, GateUpJobs> stream(op.weights, segments, jobs, share, rings + warp, lane);
    for (int p = block; p < op.pairs(); p += blocks) {  // no expert: zeros
        if (segments.of[p] != Segments::kNone) continue;
        for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) op.hidden[int64_t{p} * width + i] = 0;
    }
    for (int number = share.first; number < share.count; number += share.stride) {
        const Job job = jobs(number);
        const Expert<format> expert(op.weights, segments.expert[job.segment]);
        for (int begin = segments.begin[job.segment]; begin < segments.begin[job.segment + 1]; begin += kGroup) {
            const int n = min(segments.begin[job.segment + 1] - begin, kGroup);
            const uint16_t* pairs = segments.pair + begin;
            with_count(n, [&](auto count) {
                constexpr int N = decltype(count)::value;
                const int value = lane * 2 * N / 32, m = value / 2, r = value % 2;  // what this lane gets the sum of
                const float gate_scale = expert.row_scale(job.first + r);
                const float up_scale = expert.row_scale(job.second + r);
                float sums[kRows][N] = {};
                const auto place = [&](int i) { return pairs[min(i, n - 1)] / op.top_k * op.weights.columns; };
                multiply<N>(stream, op.x, place, lane, sums);
                float gates[2 * N], ups[2 * N];
#pragma unroll
                for (int i = 0; i < 2 * N; ++i) {
                    gates[i] = sums[i % 2][i / 2];
                    ups[i] = sums[2 + i % 2][i / 2];
                }
                const float gate = warp_sums(gates, lane) * gate_scale;
                const float up = warp_sums(ups, lane) * up_scale;
                if (lane % (16 / N) == 0 && m < n) {
                    op.hidden[int64_t{pairs[m]} * width + job.first + r] = to_bfloat16(silu(gate) * up);
                }
            });
        }
    }
}

// A block computes tiles of eight rows: its warps take the experts in turn, and put the product of a row and a pair's
// intermediate vector in its place in shared memory. Then they add those of each token, in the order of its experts.
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

    for (int tile = static_cast<int>(blockIdx.x); tile < op.weights.rows / kTileRows;
         tile += static_cast<int>(gridDim.x)) {
        const DownJobs jobs{tile};
        const Share share{warp, kWarps, *segments.count * (kTileRows / kRows)};
        Stream<format, DownJobs> stream(op.weights, segments, jobs, share, rings + warp, lane);
        for (int i = thread; i < kTileRows * stride; i += kThreads) products[i] = 0;
        __syncthreads();
        wait_for_previous_kernel();  // the first weights are on their way
        for (int number = share.first; number < share.count; number += share.stride) {
            const Job job = jobs(number);
            const Expert<format> expert(op.weights, segments.expert[job.segment]);
            float* to = products + number % 2 * kRows * stride;
            for (int begin = segments.begin[job.segment]; begin < segments.begin[job.segment + 1]; begin += kGroup) {
                const int n = min(segments.begin[job.segment + 1] - begin, kGroup);
                const uint16_t* chosen = segments.pair + begin;
                with_count(n, [&](auto count) {
                    constexpr int N = decltype(count)::value;
                    const int value = lane * kRows * N / 32, m = value / kRows, r = value % kRows;
                    const float scale = expert.row_scale(job.first + r);  // the job's rows are four neighbours
                    float sums[kRows][N] = {};
                    const auto place = [&](int i) { return chosen[min(i, n - 1)] * op.width(); };
                    multiply<N>(stream, op.hidden, place, lane, sums);
                    float all[kRows * N];
#pragma unroll
                    for (int i = 0; i < kRows * N; ++i) all[i] = sums[i % kRows][i / kRows];
                    const float product = warp_sums(all, lane) * scale;
                    if (lane % (8 / N) == 0 && m < n) to[r * stride + chosen[m]] = product;
                });
            }
        }
        __syncthreads();
        for (int i = thread; i < kTileRows * op.tokens; i += kThreads) {
            const int row = i % kTileRows, token = i / kTileRows;
            float sum = 0;
            for (int j = 0; j < op.top_k; ++j) {
                const int p = token * op.top_k + j;
                if (segments.of[p] != Segments::kNone) sum += __ldg(op.router + p) * products[row * stride + p];
            }
            const int64_t place = int64_t{token} * op.weights.rows + tile * kTileRows + row;
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
