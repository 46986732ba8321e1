// The CPU executor: runs a plan's task lists on threads that stand for SMs, in random interleavings, with float32 sums.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/megakernel/channel.h"
#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

struct ExecutorOptions {
    int32_t threads = 1;          // each stands for an equal share of the SMs
    uint64_t seed = 0;            // of the order in which SMs and lanes get their turns; 0: one after the other
    double timeout_s = 10.0;      // a quantum without any progress for so long ends with a report
    uint32_t counter_origin = 0;  // value of every counter before the first step: they are compared by difference
};

// Runs up to `steps` steps of lists that `validate_lists` takes. Gives "" or, after a fault, what was wrong: the task,
// and for a wait that ended without success who waits for which counter and who has not arrived. After a fault the
// buffers of the batch hold anything.
std::string run_quantum(const Model& model, const TaskLists& lists, const Batch& batch, Channel& channel,
                        uint32_t quantum, int32_t steps, const ExecutorOptions& options);

}  // namespace north_jax::megakernel
