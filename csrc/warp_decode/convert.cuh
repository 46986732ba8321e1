// Numbers of few bits as float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace north_jax::warp_decode {

// Two e4m3 numbers, the low byte first: exact, as every one of them is a float16 too.
__device__ __forceinline__ float2 from_e4m3x2(uint16_t bits) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// The same as a pair of bfloat16, which is exact too.
__device__ __forceinline__ uint32_t bfloat16_pair(uint16_t bits) {
    const float2 two = from_e4m3x2(bits);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(two.x, two.y);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// A pair of bfloat16 times 2^(scale - 127), NaN for 255. bfloat16 has the exponents of e8m0, so it is exact but for
// results below 2^-133.
__device__ __forceinline__ uint32_t times_e8m0(uint32_t pair, uint32_t scale) {
    const uint32_t one = scale == 0 ? 0x0040u : scale == 255 ? 0x7fc0u : scale << 7;
    const uint32_t two = one << 16 | one;
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&two));
    return *reinterpret_cast<const uint32_t*>(&product);
}

__device__ __forceinline__ uint16_t to_bfloat16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

}  // namespace north_jax::warp_decode
