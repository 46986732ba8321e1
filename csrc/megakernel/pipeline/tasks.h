// Tasks as the pipelined kernel reads them; also for hosts without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

// A task with what would take a look-up on its way to a weight.
struct PipelineTask {
    int32_t fields[kDescriptorFields];
    const void* weight;
    int32_t columns;    // of it
    int32_t places[5];  // of INPUT, INPUT_2, INPUT_3, OUTPUT and OUTPUT_2 in the workspace, in units of 16 bytes
};

namespace pipeline {

// All tasks of the lists, in order.
std::vector<PipelineTask> pipeline_tasks(const TaskLists& lists, const Model& model);

}  // namespace pipeline
}  // namespace north_jax::megakernel
