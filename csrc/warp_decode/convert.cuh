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

__device__ __forceinline__ uint16_t to_bfloat16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

}  // namespace north_jax::warp_decode
