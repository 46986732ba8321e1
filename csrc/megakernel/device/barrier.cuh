// Thin wrappers of the PTX instructions around mbarriers and bulk copies: what warps of a block wait for in shared
// memory.
#pragma once

#include <cstdint>

namespace north_jax::megakernel {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Orders this thread's writes to shared memory, initialised barriers among them, before the copies that others then
// start.
__device__ __forceinline__ void fence_shared_for_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and adds bytes of bulk copies that the phase then waits for too.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity is complete; the hardware may wait for it for a while.
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#ifdef NORTH_JAX_SLOW_POLLS  // for compute-sanitizer, which looks at every one
    if (done == 0) __nanosleep(2000);
#endif
    return done != 0;
}

// Copies `bytes`, a multiple of 16, from global to shared memory; they count at `barrier` as they land.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// How the L2 treats lines that are read once: they go before all others. What the SMs exchange, and their instructions,
// then stay.
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void bulk_copy_once(uint32_t to, const void* from, int bytes, uint64_t* barrier,
                                               uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Orders what this thread has seen of global memory before its bulk copies to come.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace north_jax::megakernel
