// A grouped matrix product over padded tiles of tokens, as the expert-centric path has it: every tile of sixteen rows
// of x belongs to one expert. It is what warp decode is compared with.
#pragma once

#include <cuda_runtime.h>

#include "csrc/warp_decode/shared.cuh"

namespace north_jax::warp_decode {

static_assert(kGroup == kTileTokens);

// Sixteen output columns of a tile; tiles without an expert come last.
struct GroupedJobs {
    const int32_t* experts;
    int columns;  // of the output, in sixteens

    __device__ int tile(int number) const { return number / columns; }
    __device__ int row(int number) const { return number % columns * kRows; }
    __device__ Job operator()(int number) const {
        return {__ldg(experts + tile(number)), row(number), row(number) + kRows / 2};
    }
};

HOST_DEVICE inline int grouped_bytes() { return ring_bytes<Format::kBfloat16>() + static_cast<int>(sizeof(Partials)); }

__global__ void __launch_bounds__(kThreads, 2) grouped_matmul(const __grid_constant__ GroupedMatmul op) {
    constexpr Format kFormat = Format::kBfloat16;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    auto* rings = reinterpret_cast<Ring<kFormat>*>(block_memory());
    auto& partials = *reinterpret_cast<Partials*>(block_memory() + ring_bytes<kFormat>());
    int used = 0;
    for (int i = lane; i - lane < op.tiles; i += 32) {
        used += __popc(__ballot_sync(~0u, i < op.tiles && __ldg(op.tile_experts + i) >= 0));
    }
    const GroupedJobs jobs{op.tile_experts, op.weights.rows / kRows};
    const Share share{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), used * jobs.columns, warp, kWarps};
    Stream<kFormat, GroupedJobs> stream(op.weights, jobs, share, rings + warp, lane);
    int turn = 0;
    for (int number = share.first; number < share.count; number += share.stride) {
        const int first_token = jobs.tile(number) * kTileTokens, row = jobs.row(number);
        const auto place = [&](int tile) {
            return (first_token + tile * kColumnTokens + lane / 4) * op.weights.columns;
        };
        Sums sums[kMostTiles] = {};
        multiply<kMostTiles>(stream, op.x, place, lane, sums);
#pragma unroll
        for (int j = 0; j < kMostTiles; ++j) {
            partials[turn][j][warp][lane] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
        }
        __syncthreads();
        // One value a thread: a token's sixteen columns are neighbours.
        const int r = thread % kRows, token = thread / kRows;
        const int from = r % (kRows / 2) * 4 + token % kColumnTokens / 2;
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) {
            const float4 four = partials[turn][token / kColumnTokens][w][from];
            const float upper = token % 2 == 0 ? four.x : four.y, lower = token % 2 == 0 ? four.z : four.w;
            sum += r < kRows / 2 ? upper : lower;
        }
        op.out[int64_t{first_token + token} * op.weights.rows + row + r] = to_bfloat16(sum);
        turn ^= 1;
    }
}

}  // namespace north_jax::warp_decode
