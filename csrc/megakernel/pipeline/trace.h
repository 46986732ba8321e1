// What the warps of the pipelined kernel do when: recorded by builds with NORTH_JAX_TRACE alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace north_jax::megakernel {

// One moment of one warp.
struct TraceEvent {
    enum Kind : int32_t {
        kNone = 0,
        kTask = 1,  // begins `task`; `place` is nothing
        kBarrier =
            2,  // begins to wait at the barrier at place `place` of the block's shared memory, in units of 8 bytes
        kCounter = 3,  // begins to wait at counter `place`, the first of those it waits for
        kEnd = 4,      // no longer waits
        kGlobal = 5,   // `place` is the low half of the clock that all SMs share, in ns
    };
    uint32_t clock;  // of the SM, in cycles
    int32_t kind;
    int32_t task;
    int32_t place;
};

// Step `step` of every launch to come is recorded, at most `events` moments of each warp.
cudaError_t trace_begin(int step, int events);
// What the last launch recorded: [sms, warps, events], kNone where nothing was.
cudaError_t trace_end(int sms, int events, std::vector<TraceEvent>* recorded);

// The role of each warp of a block.
std::vector<std::string> trace_warps();
// The barriers of a block's shared memory, by place; "" for what is none.
std::vector<std::string> trace_barriers();

}  // namespace north_jax::megakernel
