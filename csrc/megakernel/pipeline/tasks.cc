#include "csrc/megakernel/pipeline/tasks.h"

#include <algorithm>

namespace north_jax::megakernel::pipeline {
namespace {

// Where the buffer that a field of a task names begins in the workspace, in bytes.
int64_t place_of(const TaskLists& lists, const int32_t* task, Field field, int32_t sm) {
    const int32_t buffer = task[field];
    if (buffer == BUFFER_NONE) return 0;
    const BufferPlace& place = lists.buffers[buffer];
    const bool local = buffer == BUFFER_LOCAL_RESIDUAL || buffer == BUFFER_LOCAL_HIDDEN;
    const bool of_layer_before =
        task[FIELD_OPCODE] == ADD_RMSNORM && task[FIELD_INPUT_2] != BUFFER_NONE && field <= FIELD_INPUT_3;
    const int64_t plane = (task[FIELD_LAYER] - of_layer_before) % place.planes;
    return place.offset + (plane + (local ? int64_t{sm} * place.planes : 0)) * place.plane_bytes;
}

}  // namespace

std::vector<PipelineTask> pipeline_tasks(const TaskLists& lists, const Model& model) {
    const size_t count = lists.tasks.size() / kDescriptorFields;
    std::vector<PipelineTask> tasks(count);
    std::vector<int32_t> sm_of(count);
    for (int32_t sm = 0; sm < lists.sms(); ++sm) {
        std::fill(sm_of.begin() + lists.begin[sm], sm_of.begin() + lists.begin[sm + 1], sm);
    }
    for (size_t i = 0; i < count; ++i) {
        PipelineTask& task = tasks[i];
        std::copy_n(&lists.tasks[i * kDescriptorFields], kDescriptorFields, task.fields);
        const Operation& operation = kOperations[task.fields[FIELD_OPCODE]];
        for (int k = 0; k < 5; ++k) {
            const Field field = static_cast<Field>(FIELD_INPUT + k);
            if (operation.fields >> field & 1) task.places[k] = place_of(lists, task.fields, field, sm_of[i]) / 16;
        }
        if (!(operation.fields >> FIELD_WEIGHT & 1)) continue;
        const WeightMatrix& weight = model.weights.at(task.fields[FIELD_WEIGHT]);
        task.weight = weight.data;
        task.columns = static_cast<int32_t>(weight.columns);
    }
    return tasks;
}

}  // namespace north_jax::megakernel::pipeline
