// Thin wrappers of the PTX instructions that move weights and order the two kernels.
#pragma once

#include <cstdint>

namespace north_jax::warp_decode {

// How the L2 treats weights: they go before all else. Activations, the intermediate vector and code then stay.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Sixteen bytes of weights: read once by an SM, so not worth a line of its L1.
__device__ __forceinline__ uint4 load_weights(const void* p, uint64_t policy) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}

__device__ __forceinline__ uint32_t load_word(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Sixteen bytes of activations, which the L1 holds for the warps that come after. Not the non-coherent path: the
// intermediate vector may have been written since this kernel began.
__device__ __forceinline__ uint4 load_activations(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// Starts a copy of 16 bytes to shared memory, or of as many zeros; it belongs to the thread's next group.
__device__ __forceinline__ void copy_weights(void* to, const void* from, bool inside, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(inside ? 16 : 0), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_word(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}

// Closes the group of the copies that this thread has started since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` of this thread's groups are still on their way.
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// The next kernel may start to fill the SMs that this one leaves.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until what the kernel before has written can be seen. Returns at once where this one did not start early.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace north_jax::warp_decode
