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

// The sums over a warp of n values: lane l gets that of value l * n / 32. Each is added in warp_sum's order, so a sum
// does not depend on n.
template <int n, int offset = 16>
__device__ __forceinline__ float warp_sums(const float (&values)[n], int lane) {
    static_assert((n & (n - 1)) == 0 && n <= 2 * offset, "a power of two, at most one value a lane");
    if constexpr (n == 1) {
        float sum = values[0];
#pragma unroll
        for (int o = offset; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        return sum;
    } else {
        const bool upper = (lane & offset) != 0;
        float kept[n / 2];
#pragma unroll
        for (int i = 0; i < n / 2; ++i) {
            const float given = upper ? values[i] : values[i + n / 2];
            kept[i] = (upper ? values[i + n / 2] : values[i]) + __shfl_xor_sync(~0u, given, offset);
        }
        if constexpr (offset == 1) {
            return kept[0];
        } else {
            return warp_sums<n / 2, offset / 2>(kept, lane);
        }
    }
}

}  // namespace north_jax::warp_decode
