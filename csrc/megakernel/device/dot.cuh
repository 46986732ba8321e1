// Products of two weight rows with up to N input rows, by one warp: float32 sums over a fixed split of the columns.
#pragma once

#include "csrc/megakernel/device/context.cuh"

namespace north_jax::megakernel {

// Sixteen bytes of a row as floats.
template <class T>
struct Chunk {
    static constexpr int kSize = 16 / sizeof(T);
    float value[kSize];

    __device__ static uint4 load_weight(const T* p) {  // read once: not worth a line of the L1
        uint4 raw;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                     : "l"(p));
        return raw;
    }
    __device__ static uint4 load_input(const T* p) { return *reinterpret_cast<const uint4*>(p); }
    __device__ explicit Chunk(uint4 raw) {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (sizeof(T) == 4) {
                value[i] = __uint_as_float(words[i]);
            } else {
                value[2 * i] = __uint_as_float(words[i] << 16);
                value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
            }
        }
    }
};

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// The two rows' sums with each input: lane n keeps those with x[n], after the warp has added its parts.
struct PairSums {
    float first;
    float second;
};

// w0 · x[n] and w1 · x[n] over `columns` columns. Not inlined: every operation shares this code.
template <int N, class T>
__device__ __noinline__ PairSums dot_pair(const T* w0, const T* w1, const T* const* inputs, int columns, int lane) {
    constexpr int kChunk = Chunk<T>::kSize, kAhead = N > 2 ? 2 : 4;
    const T* x[N];
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = inputs[n];
    float sums[2][N] = {};
    if (columns % kChunk != 0) {  // rows are not aligned
        for (int i = lane; i < columns; i += 32) {
            const float a = to_float(w0[i]), b = to_float(w1[i]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                sums[0][n] += a * to_float(x[n][i]);
                sums[1][n] += b * to_float(x[n][i]);
            }
        }
        columns = 0;
    }
    for (int begin = lane * kChunk; begin < columns; begin += kAhead * 32 * kChunk) {
        uint4 raw[kAhead][2];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = begin + j * 32 * kChunk;
            if (i < columns) {
                raw[j][0] = Chunk<T>::load_weight(w0 + i);
                raw[j][1] = Chunk<T>::load_weight(w1 + i);
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = begin + j * 32 * kChunk;
            if (i >= columns) break;
            const Chunk<T> a(raw[j][0]), b(raw[j][1]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const Chunk<T> y(Chunk<T>::load_input(x[n] + i));
#pragma unroll
                for (int e = 0; e < kChunk; ++e) {
                    sums[0][n] += a.value[e] * y.value[e];
                    sums[1][n] += b.value[e] * y.value[e];
                }
            }
        }
    }
    PairSums mine{};
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const PairSums all{warp_sum(sums[0][n]), warp_sum(sums[1][n])};
        if (lane == n) mine = all;
    }
    return mine;
}

// dot_pair with the least of 1, 2, 4 and 8 inputs that is at least `count`; input(n) gives input n < count <= 8.
template <class T, class Input>
__device__ PairSums dot_pairs(const T* w0, const T* w1, Input input, int count, int columns, int lane) {
    const T* x[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = input(n < count ? n : 0);
    if (count == 1) return dot_pair<1>(w0, w1, x, columns, lane);
    if (count == 2) return dot_pair<2>(w0, w1, x, columns, lane);
    if (count <= 4) return dot_pair<4>(w0, w1, x, columns, lane);
    return dot_pair<8>(w0, w1, x, columns, lane);
}

}  // namespace north_jax::megakernel
