// The controller warp: descriptors into the task ring, so that no role waits for global memory to know what it does.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Controller : Common {
    using Common::Common;

    // All descriptors of a step.
    __device__ __forceinline__ bool fetch_list() {
        Shared& s = shared();
        for (int task = s.first_task; task < s.end_task; task += kTasksOfSlot) {
            if (!wait(&s.tasks_empty[filled_.slot], filled_.parity)) return false;
            if (lane == 0) {
                const int bytes = min(kTasksOfSlot, s.end_task - task) * static_cast<int>(sizeof(PipelineTask));
                uint64_t* full = &s.tasks_full[filled_.slot];
                barrier_arrive_expect(full, bytes);
                bulk_copy(shared_address(s.task[filled_.slot]), c.plan.pipeline_tasks + task, bytes, full);
            }
            __syncwarp();
            filled_.advance(kTaskSlots);
        }
        return true;
    }

    __device__ __forceinline__ void drain() {
        for (int i = 0; i < kTaskSlots; ++i) {
            // A slot that was not filled in this round shows the phase before, which is complete.
            while (!__all_sync(~0u, barrier_test(&shared().tasks_full[filled_.slot], filled_.parity))) {
            }
            filled_.advance(kTaskSlots);
        }
    }

   private:
    Cursor filled_ = Cursor::filling();
};

}  // namespace north_jax::megakernel::pipeline
