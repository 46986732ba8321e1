// The controller warp: descriptors into the task ring, so that no role waits for global memory to know what it does.
//
// It waits for whoever is slowest in the block, and so it is the one that sees faults: those of other blocks, and that
// nothing has happened here for too long.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Controller : Common {
    using Common::Common;

    // All descriptors of a step.
    __device__ __forceinline__ bool fetch_list() {
        Shared& s = shared();
        for (int task = s.first_task; task < s.end_task; task += kTasksOfSlot) {
            if (!wait_patiently(&s.tasks_empty[filled_.slot], filled_.parity)) return false;
            if (lane == 0) {
                const int bytes = min(kTasksOfSlot, s.end_task - task) * static_cast<int>(sizeof(PipelineTask));
                uint64_t* full = &s.tasks_full[filled_.slot];
                barrier_arrive_expect(full, bytes);
                bulk_copy(shared_address(s.task[filled_.slot]), c.plan.pipeline_tasks + task, bytes, full);
            }
            __syncwarp();
            filled_.advance(kTaskSlots);
            trace(TraceEvent::kGlobal, static_cast<int>(nanoseconds()));
        }
        return true;
    }

    __device__ __forceinline__ void drain() {
#pragma unroll 1
        for (int i = 0; i < kTaskSlots; ++i) {
            // A slot that was not filled in this round shows the phase before, which is complete.
            while (!__all_sync(~0u, barrier_test(&shared().tasks_full[filled_.slot], filled_.parity))) {
            }
            filled_.advance(kTaskSlots);
        }
    }

    // As Common::begin_step.
    __device__ __forceinline__ bool begin_step(bool* ended) {
        if (!wait_patiently(&shared().step_begins, step.parity)) return false;
        step.advance(1);
        *ended = shared().ended;
        return true;
    }

   private:
    // Waits for a phase of a barrier, no longer than patience allows; false after a fault.
    __device__ __forceinline__ bool wait_patiently(uint64_t* barrier, uint32_t parity) const {
        const Patience& p = shared().patience;
        const uint64_t begin = nanoseconds();
        for (int round = 0; !__all_sync(~0u, barrier_test(barrier, parity)); ++round) {
            if (round % 16 != 0) continue;
            if (__any_sync(~0u, shared().aborted || load_relaxed(p.abort) != 0)) return false;
            // Longer than waits at counters, so that whoever keeps this block waiting is heard first.
            if (__any_sync(~0u, nanoseconds() - begin > 2 * p.timeout_ns)) {
                if (lane == 0) report_slowest();
                __syncwarp();
                return false;
            }
        }
        return true;
    }

    // Of the warp that the others wait for: the one that has got least far.
    __device__ __forceinline__ void report_slowest() const {
        const Shared& s = shared();
        int slowest = 0;
#pragma unroll 1
        for (int warp = 0; warp < kWarps; ++warp) {
            if (warp != kControllerWarp && s.task_of_warp[warp] < s.task_of_warp[slowest]) slowest = warp;
        }
        const Patience& p = s.patience;
        report_fault({p.abort, p.fault, p.timeout_ns, static_cast<int>(blockIdx.x),
                      static_cast<int>(role_of_warp(slowest)), s.task_of_warp[slowest], s.step},
                     DeviceFault::kBlocked, -1, 0, 0);
    }

    Cursor filled_ = Cursor::filling();
};

}  // namespace north_jax::megakernel::pipeline
