// In place of csrc/megakernel/device/barrier.cuh: addresses of shared memory are offsets into the block's.
#pragma once

#include "cuda_runtime.h"

namespace north_jax::megakernel {

inline uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - fibers::current->warp->block->memory);
}
inline void barrier_init(uint64_t* barrier, int arrivals) {
    fibers::Block& block = *fibers::current->warp->block;
    const bool planted =
        !fibers::planted.empty() && fibers::name_of_place(block, barrier).rfind(fibers::planted, 0) == 0;
    block.barriers[barrier] = {arrivals, arrivals, 0, 0, {}, planted};
}
inline void fence_shared_for_bulk_copies() {
    if (fibers::observer != nullptr && fibers::planted != "fence") fibers::observer->fence();
}
inline void barrier_arrive(uint64_t* barrier) { fibers::arrive(barrier, 0); }
inline void barrier_arrive_expect(uint64_t* barrier, int bytes) { fibers::arrive(barrier, bytes); }
inline bool barrier_test(uint64_t* barrier, uint32_t parity) { return fibers::test(barrier, parity); }
inline void bulk_copy(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
    fibers::begin_copy(fibers::memory_at(to), from, bytes, barrier);
}
inline uint64_t evict_first_policy() { return 0; }
inline void bulk_copy_once(uint32_t to, const void* from, int bytes, uint64_t* barrier, uint64_t) {
    bulk_copy(to, from, bytes, barrier);
}
inline void fence_bulk_copies() {}

}  // namespace north_jax::megakernel
