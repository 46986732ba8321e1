// In place of csrc/warp_decode/convert.cuh.
#pragma once

#include "cuda_bf16.h"

namespace north_jax::warp_decode {

inline float from_e4m3(unsigned bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float size = exponent == 0 ? ldexpf(mantissa, -9) : ldexpf(8 + mantissa, exponent - 10);
    return bits & 0x80 ? -size : size;
}
inline float2 from_e4m3x2(uint16_t bits) { return {from_e4m3(bits & 0xff), from_e4m3(bits >> 8)}; }
inline uint32_t bfloat16_pair(uint16_t bits) {
    return __float_as_uint(from_e4m3(bits & 0xff)) >> 16 | (__float_as_uint(from_e4m3(bits >> 8)) & 0xffff0000u);
}
inline uint32_t times_e8m0(uint32_t pair, uint32_t scale) {
    const float factor = scale == 255 ? NAN : ldexpf(1, static_cast<int>(scale) - 127);
    const float low = __uint_as_float(pair << 16) * factor, high = __uint_as_float(pair & 0xffff0000u) * factor;
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}
inline uint16_t to_bfloat16(float x) { return __float2bfloat16_rn(x).bits; }

}  // namespace north_jax::warp_decode
