// In place of csrc/megakernel/device/tensor.cuh, which says which lane holds what.
#pragma once

#include <cuda_bf16.h>

namespace north_jax::megakernel {

struct FragmentA {
    uint32_t word[4];
};
struct FragmentB {
    uint32_t word[2];
};

inline uint32_t load_shared(uint32_t address) {
    fibers::require(address % 4 == 0, "a word that is not aligned");
    return *reinterpret_cast<const uint32_t*>(fibers::memory_at(address));
}
inline uint4 load_shared_words(uint32_t address) {
    fibers::require(address % 16 == 0, "sixteen bytes that are not aligned");
    return *reinterpret_cast<const uint4*>(fibers::memory_at(address));
}
inline void store_shared(uint32_t address, const uint4& v) {
    fibers::require(address % 16 == 0, "sixteen bytes that are not aligned");
    std::memcpy(fibers::memory_at(address), &v, 16);
}
inline void clear_shared(uint32_t address) {
    fibers::require(address % 16 == 0, "sixteen bytes that are not aligned");
    *reinterpret_cast<uint4*>(fibers::memory_at(address)) = {0, 0, 0, 0};
}
inline FragmentA load_matrices(uint32_t address) {
    fibers::require(address % 16 == 0, "a row of a matrix that is not aligned");
    return fibers::exchange("ldmatrix", address, [](auto of) {
        FragmentA a;
        const int g = fibers::lane() / 4, t = fibers::lane() % 4;
        for (int i = 0; i < 4; ++i) a.word[i] = load_shared(of(8 * i + g) + 4 * t);
        return a;
    });
}
inline FragmentA load_matrices_transposed(uint32_t address) {
    fibers::require(address % 16 == 0, "a row of a matrix that is not aligned");
    return fibers::exchange("ldmatrix.trans", address, [](auto of) {
        FragmentA a;
        const int g = fibers::lane() / 4, t = fibers::lane() % 4;
        const auto half = [&](int row) { return load_shared(of(row) + g / 2 * 4) >> g % 2 * 16 & 0xffff; };
        for (int i = 0; i < 4; ++i) a.word[i] = half(8 * i + 2 * t) | half(8 * i + 2 * t + 1) << 16;
        return a;
    });
}

inline uint32_t pack(float low, float high) {
    return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
}
inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

inline void multiply_add(float (&sum)[4], const FragmentA& a, const FragmentB& b) {
    struct Words {
        FragmentA a;
        FragmentB b;
    };
    fibers::exchange("mma", Words{a, b}, [&](auto of) {
        const int g = fibers::lane() / 4, t = fibers::lane() % 4;
        for (int pair = 0; pair < 4; ++pair) {  // columns of A, rows of B: 2 pair, and 8 more
            const Words rows = of(4 * g + pair), left = of(4 * (2 * t) + pair), right = of(4 * (2 * t + 1) + pair);
            for (int half = 0; half < 2; ++half) {
                const uint32_t upper = rows.a.word[2 * half], lower = rows.a.word[2 * half + 1];
                const uint32_t first = left.b.word[half], second = right.b.word[half];
                sum[0] += low_half(upper) * low_half(first) + high_half(upper) * high_half(first);
                sum[1] += low_half(upper) * low_half(second) + high_half(upper) * high_half(second);
                sum[2] += low_half(lower) * low_half(first) + high_half(lower) * high_half(first);
                sum[3] += low_half(lower) * low_half(second) + high_half(lower) * high_half(second);
            }
        }
        return 0;
    });
}

}  // namespace north_jax::megakernel
