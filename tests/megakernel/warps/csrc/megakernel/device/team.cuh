// In place of csrc/megakernel/device/team.cuh: the block is one team.
#pragma once

#include "cuda_runtime.h"

namespace north_jax::megakernel {

struct Team {
    int thread;
    int threads;

    int warp() const { return thread / 32; }
    int warps() const { return threads / 32; }
    int lane() const { return thread % 32; }
    bool leader() const { return thread == 0; }
    void sync() const { fibers::meet(fibers::block->team, threads); }
    bool all(bool value) const {
        fibers::block->slots[thread] = value;
        sync();
        bool result = true;
        for (int i = 0; i < threads; ++i) result = result && fibers::block->slots[i];
        sync();
        return result;
    }
};

}  // namespace north_jax::megakernel
