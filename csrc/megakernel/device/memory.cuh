// Thin wrappers of the PTX instructions that order memory between SMs and with the host.
#pragma once

#include <cstdint>

namespace north_jax::megakernel {

__device__ inline uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ inline uint32_t load_relaxed(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

// Reads past the L1, which may hold what was there before. Zeros where nothing `exists`: without a branch, which would
// keep the loads after it from going out before this one's values are there.
__device__ __forceinline__ float4 load_fresh(const float* p, bool exists = true) {
    float4 v{0, 0, 0, 0};
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
        : "l"(p), "r"(static_cast<uint32_t>(exists))
        : "memory");
    return v;
}

// Sixteen bytes, as load_fresh.
__device__ __forceinline__ uint4 load_fresh_words(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_fresh_two(const float* p) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

__device__ inline void store_release(uint32_t* p, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ inline void add_release(uint32_t* p, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Without order: who sees the sum may not see yet what this thread has written before.
__device__ inline void add_relaxed(uint32_t* p, uint32_t value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// For other SMs: to the L2 at once.
__device__ inline void store_relaxed(uint32_t* p, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ inline void store_relaxed(uint4* p, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// The host's side of mapped memory.
__device__ inline uint32_t load_acquire_system(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ inline uint64_t load_acquire_system(const uint64_t* p) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}

__device__ inline void store_release_system(uint32_t* p, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ inline void store_release_system(uint64_t* p, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

__device__ inline uint64_t nanoseconds() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

}  // namespace north_jax::megakernel
