// The type of weights, which sampling does not touch.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16) { std::abort(); }
inline __nv_bfloat16 __float2bfloat16_rn(float) { std::abort(); }
