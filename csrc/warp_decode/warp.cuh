// What warps do together, and how many of them are a block.
#pragma once

#include <cuda_runtime.h>

namespace north_jax::warp_decode {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

}  // namespace north_jax::warp_decode
