// The kernel's side of trace.h. Without NORTH_JAX_TRACE a tracer is empty and does nothing.
#pragma once

#include "csrc/megakernel/device/memory.cuh"
#include "csrc/megakernel/pipeline/trace.h"

namespace north_jax::megakernel::pipeline {

#ifdef NORTH_JAX_TRACE

struct TraceTarget {
    TraceEvent* events;  // null: nothing is recorded
    int capacity;        // events of a warp
    int step;
};

__device__ TraceTarget trace_target;  // of the launches to come

class Tracer {
   public:
    // `target`, in shared memory: what is recorded must not wait for global memory.
    __device__ __forceinline__ void record(const TraceTarget& target, TraceEvent::Kind kind, int step, int task,
                                           int place) {
        if (target.events == nullptr || step != target.step || used_ == target.capacity) return;
        const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
        const int64_t first = (static_cast<int64_t>(blockIdx.x) * warps + warp) * target.capacity;
        const TraceEvent event{static_cast<uint32_t>(clock64()), kind, task, place};
        if (threadIdx.x % 32 == 0) target.events[first + used_] = event;
        ++used_;
    }

   private:
    int used_ = 0;
};

#else

struct TraceTarget {};

struct Tracer {
    __device__ __forceinline__ void record(const TraceTarget&, TraceEvent::Kind, int, int, int) {}
};

#endif

}  // namespace north_jax::megakernel::pipeline
