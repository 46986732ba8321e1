// The weight rows of every matrix task, tile by tile, as the producer streams them: one loop for all operations.
#pragma once

#include "csrc/megakernel/pipeline/experts.cuh"

namespace north_jax::megakernel::pipeline {

// Which tiles of a task this SM streams, and what of each.
struct Tiles {
    int first, end, step;            // tile numbers
    int rows;                        // of a tile
    int begin, count, page_columns;  // columns, and how many a page

    __device__ __forceinline__ static Tiles of_input(const Geometry& g, int count, int rows) {
        return {0, count, 1, rows, 0, g.hidden, kPageColumns};
    }
};

// Streams a task's weights. Lane l names row l of each tile.
__device__ __forceinline__ bool stream_weights(Producer& r) {
    const Geometry& g = r.c.plan.geometry;
    const int opcode = r.c.field(FIELD_OPCODE), row_begin = r.c.field(FIELD_ROW_BEGIN);
    const int row_count = r.c.field(FIELD_ROW_COUNT);
    const RoutingTable* table = nullptr;
    if (opcode == MOE_UPGATE_ACT || opcode == MOE_DOWN) {
        table = r.routing.of_task(r);
        if (table == nullptr) return false;
    }
    Tiles t;
    if (opcode == O_PROJ || opcode == FFN_DOWN) {
        t = {0, 1, 1, row_count, r.c.field(FIELD_K_BEGIN), r.c.field(FIELD_K_COUNT), SlicedProduct::page_columns(r)};
    } else if (opcode == MOE_DOWN) {  // one tile an expert
        t = {0, table->active, 1, row_count, 0, g.expert_width, g.expert_width};
    } else if (opcode == MOE_UPGATE_ACT) {
        const Dealt mine = ExpertUp::items(r, *table);
        t = Tiles::of_input(g, 0, 2 * row_count);
        t.first = mine.first, t.end = mine.end, t.step = mine.step;
    } else {
        t = opcode == FFN_UPGATE_ACT ? Tiles::of_input(g, 1, 2 * row_count)
                                     : Tiles::of_input(g, ceil_div(row_count, kTileRows), kTileRows);
    }
    const int units = t.rows / 2, unit = r.lane < units ? r.lane : r.lane - units;  // of gate rows above up rows
    const bool up = r.lane >= units;
#pragma unroll 1
    for (int n = t.first; n < t.end; n += t.step) {
        int64_t row = row_begin + n * kTileRows + r.lane;
        int rows = min(t.rows, row_count - n * kTileRows);
        if (opcode == MOE_UPGATE_ACT) {
            const ExpertItem item = expert_item(ExpertUp::tiles_of_expert(r), n);
            row = (int64_t{table->expert[item.rank]} * 2 + up) * g.expert_width + item.tile * units + unit;
            rows = t.rows;
        } else if (opcode == FFN_UPGATE_ACT) {
            row = row_begin + unit + (up ? g.dense_width : 0);
            rows = t.rows;
        } else if (opcode == MOE_DOWN) {
            row = int64_t{table->expert[n]} * g.hidden + row_begin + r.lane;
            rows = t.rows;
        }
        if (!r.fill_tile(row, rows, t.begin, t.count, t.page_columns)) return false;
    }
    return true;
}

}  // namespace north_jax::megakernel::pipeline
