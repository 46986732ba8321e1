// In place of csrc/megakernel/device/team.cuh.
#pragma once

#include "cuda_runtime.h"

namespace north_jax::megakernel {

struct Team {
    int thread;
    int threads;
    int barrier;

    int warp() const { return thread / 32; }
    int warps() const { return threads / 32; }
    int lane() const { return thread % 32; }
    bool leader() const { return thread == 0; }
    void sync() const { fibers::meet_team(barrier, threads, true); }
    bool all(bool value) const { return fibers::meet_team(barrier, threads, value); }
};

}  // namespace north_jax::megakernel
