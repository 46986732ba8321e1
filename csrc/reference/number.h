// The two types of weights as numbers, and inner products in float32 that compilers turn into vector instructions.
#pragma once

#include <bit>
#include <cstdint>

namespace north_jax::megakernel {

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// Rounds to nearest, ties to even.
template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // rounding would carry some NaNs to infinity
    return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

// The order of the additions depends on n alone.
template <typename T>
float dot(const T* a, const float* b, int64_t n) {
    constexpr int kLanes = 16;
    float sum[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) sum[lane] += to_float(a[i + lane]) * b[i + lane];
    }
    for (int lane = 0; lane < kLanes && i < n; ++i, ++lane) sum[lane] += to_float(a[i]) * b[i];
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
    }
    return sum[0];
}

}  // namespace north_jax::megakernel
