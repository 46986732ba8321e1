// Thin wrappers of the tensor-core instructions: m16n8k16 products of bfloat16 with float32 sums.
//
// Lane l of a warp is (g, t) = (l / 4, l % 4). It holds of A [16, 16] the pairs of columns 2t of rows g and g + 8, and
// of columns 2t + 8 of the same rows; of B [16, 8] the pairs of rows 2t and 2t + 8 of column g; of the sums [16, 8] the
// columns 2t and 2t + 1 of row g, then of row g + 8.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace north_jax::megakernel {

struct FragmentA {
    uint32_t word[4];
};
struct FragmentB {
    uint32_t word[2];
};

// Four 8 × 8 matrices: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ FragmentA load_matrices(uint32_t address) {
    FragmentA a;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.word[0]), "=r"(a.word[1]), "=r"(a.word[2]), "=r"(a.word[3])
                 : "r"(address));
    return a;
}

// The same, each matrix transposed.
__device__ __forceinline__ FragmentA load_matrices_transposed(uint32_t address) {
    FragmentA a;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.word[0]), "=r"(a.word[1]), "=r"(a.word[2]), "=r"(a.word[3])
                 : "r"(address));
    return a;
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const FragmentA& a, const FragmentB& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]));
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ uint4 load_shared_words(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Sixteen bytes of zeros.
__device__ __forceinline__ void clear_shared(uint32_t address) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// Two floats as a pair of bfloat16, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

}  // namespace north_jax::megakernel
