#include "csrc/megakernel/pipeline/tasks.h"

#include <algorithm>
#include <limits>

#include "csrc/megakernel/division.h"
#include "csrc/megakernel/pipeline/limits.h"

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

int32_t parts_of(const int32_t* task) {
    const int32_t opcode = task[FIELD_OPCODE];
    if (opcode == ATTN_COMBINE) return kFolding;
    if (opcode == ATTN_DECODE || takes_stages(opcode))
        return kMultiplying | kStaging | (is_routed(opcode) ? kRouting : 0);
    // The first task that takes a layer's input from global memory has it staged.
    const bool staged = is_routed(opcode) || task[FIELD_INPUT] != BUFFER_LOCAL_HIDDEN;
    if (takes_input(opcode)) return kMultiplying | (staged ? kStaging : 0) | (is_routed(opcode) ? kRouting : 0);
    return kStaging | kRouting | kFolding;  // norm, sampling and the ends of steps are the loader's
}

TileWalk walk_of(const int32_t* task, const Geometry& g, int32_t batch) {
    const int32_t opcode = task[FIELD_OPCODE], rows = task[FIELD_ROW_COUNT];
    const auto tile = static_cast<int16_t>(rows);
    TileWalk walk{0, 1, 1, 1, 0, tile, tile, rows, 0, 0, 0, g.hidden, kPageColumns, 0, 0, 0};
    switch (opcode) {
        case FFN_UPGATE_ACT:
        case MOE_UPGATE_ACT:
            walk.rows = walk.last_rows = static_cast<int16_t>(2 * rows);
            walk.second_half = opcode == MOE_UPGATE_ACT ? g.expert_width : g.dense_width;
            break;
        case O_PROJ:
        case FFN_DOWN: {
            const int32_t slice = task[FIELD_K_SLICE], pages = ceil_div(slice, kPageColumns);
            walk.first_column = task[FIELD_K_BEGIN], walk.columns = task[FIELD_K_COUNT];
            walk.page_columns = slice / pages;
            walk.pages_of_stage = stage_bytes(batch) / (batch * staged_row_stride(walk.page_columns));
            walk.first_slice = task[FIELD_K_BEGIN] / slice;
            walk.slices_of_page = ceil_div(1 << 16, pages);
            break;
        }
        case MOE_DOWN:
            walk.end = std::numeric_limits<int32_t>::max();
            walk.expert_rows = g.hidden;
            walk.columns = walk.page_columns = g.expert_width;
            walk.pages_of_stage = stage_bytes(batch) / staged_row_stride(g.expert_width);
            break;
        default:  // tiles of rows, the last one perhaps of fewer
            walk.end = ceil_div(rows, kTileRows);
            walk.rows = walk.units = kTileRows;
            walk.last_rows = static_cast<int16_t>(rows - (walk.end - 1) * kTileRows);
    }
    if (opcode == MOE_UPGATE_ACT) {
        const Dealt all = dealt(std::numeric_limits<int32_t>::max(), task[FIELD_DEALER], task[FIELD_DEALERS],
                                task[FIELD_ROUND_BEGIN], task[FIELD_ROUND_END]);
        walk.first = all.first, walk.end = all.end, walk.step = all.step;
        walk.tiles = g.expert_width / rows;
        walk.tiles_inverse = static_cast<uint32_t>(((int64_t{1} << 32) + walk.tiles - 1) / walk.tiles);
        walk.expert_rows = 2 * g.expert_width;
    }
    return walk;
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
        task.parts = parts_of(task.fields);
        const Operation& operation = kOperations[task.fields[FIELD_OPCODE]];
        for (int k = 0; k < 5; ++k) {
            const Field field = static_cast<Field>(FIELD_INPUT + k);
            if (operation.fields >> field & 1) task.places[k] = place_of(lists, task.fields, field, sm_of[i]) / 16;
        }
        if (is_product(task.fields[FIELD_OPCODE])) task.walk = walk_of(task.fields, model.geometry, lists.batch);
        if (!(operation.fields >> FIELD_WEIGHT & 1)) continue;
        const WeightMatrix& weight = model.weights.at(task.fields[FIELD_WEIGHT]);
        task.weight = weight.data;
        task.columns = static_cast<int32_t>(weight.columns);
    }
    return tasks;
}

}  // namespace north_jax::megakernel::pipeline
