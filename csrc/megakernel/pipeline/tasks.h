// Tasks as the pipelined kernel reads them; also for hosts without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

// How a product walks its tiles of weight rows: all that would take a division or a look-up on the device. Tile n of a
// routed task belongs to the expert of rank n / tiles.
struct TileWalk {
    int32_t first, end, step;  // tile numbers; of a routed task, those below active experts · tiles
    int32_t tiles;             // of an expert
    uint32_t tiles_inverse;    // 2^32 / tiles, rounded up; 0 where tiles is 1
    int16_t rows, last_rows;   // of a tile, and of the last one
    int32_t units;             // rows of a tile before its second half (up rows): all of them where there is none
    int32_t second_half;       // weight rows from one half to the other
    int32_t expert_rows;       // weight rows of an expert
    int32_t first_column;      // and how many
    int32_t columns;
    int32_t page_columns;     // of a page
    int32_t pages_of_stage;   // of MOE_DOWN: rows of activations; 0: not staged
    int32_t first_slice;      // in which the columns begin
    uint32_t slices_of_page;  // 2^16 · slices a page, rounded up
};

// Warps that have something to do of a task: the others go past it.
enum Part : int32_t {
    kMultiplying = 1,  // producer, consumers and storers
    kStaging = 2,      // the loader's warp that fills stages
    kRouting = 4,      // that chooses experts
    kFolding = 8       // those that fold splits
};

// A task with what would take a look-up on its way to a weight.
struct PipelineTask {
    int32_t fields[kDescriptorFields];
    const void* weight;
    int32_t columns;    // of it
    int32_t places[5];  // of INPUT, INPUT_2, INPUT_3, OUTPUT and OUTPUT_2 in the workspace, in units of 16 bytes
    TileWalk walk;      // of products
    int32_t parts;      // Part, of those that take part
};
static_assert(sizeof(PipelineTask) % 16 == 0, "bulk copies move 16 bytes");

namespace pipeline {

// All tasks of the lists, in order.
std::vector<PipelineTask> pipeline_tasks(const TaskLists& lists, const Model& model);

}  // namespace pipeline
}  // namespace north_jax::megakernel
