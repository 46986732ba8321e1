// A team: warps of a block that run tasks together, apart from the block's other team.
#pragma once

#include <cstdint>

namespace north_jax::megakernel {

struct Team {
    int thread;   // of this team
    int threads;  // a multiple of 32
    int barrier;  // named barrier of this team

    __device__ int warp() const { return thread / 32; }
    __device__ int warps() const { return threads / 32; }
    __device__ int lane() const { return thread % 32; }
    __device__ bool leader() const { return thread == 0; }

    __device__ void sync() const {
        __syncwarp();
        asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
    }

    // Whether `value` holds for every thread; a barrier as well.
    __device__ bool all(bool value) const {
        uint32_t result;
        __syncwarp();
        asm volatile(
            "{\n.reg .pred p, q;\n"
            "setp.ne.u32 p, %1, 0;\n"
            "barrier.red.aligned.and.pred q, %2, %3, p;\n"
            "selp.u32 %0, 1, 0, q;\n}"
            : "=r"(result)
            : "r"(static_cast<uint32_t>(value)), "r"(barrier), "r"(threads)
            : "memory");
        return result != 0;
    }
};

}  // namespace north_jax::megakernel
