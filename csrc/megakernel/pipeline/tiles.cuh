// The tiles of every matrix task, as the producer streams and the consumers multiply them: one loop each for all
// operations.
#pragma once

#include "csrc/megakernel/pipeline/consumer.cuh"
#include "csrc/megakernel/pipeline/experts.cuh"
#include "csrc/megakernel/pipeline/producer.cuh"
#include "csrc/megakernel/pipeline/storer.cuh"

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

// Multiplies a task's pages with the layer's input or with what is staged, tile by tile.
__device__ __forceinline__ bool multiply_tiles(Consumer& r) {
    const int opcode = r.c.field(FIELD_OPCODE), batch = r.c.plan.batch, g = r.lane / 4;
    const RoutingTable* table = nullptr;
    if (opcode == MOE_UPGATE_ACT || opcode == MOE_DOWN) {
        table = r.routing.of_task(r);
        if (table == nullptr) return false;
    }
    const bool staged = takes_stages(opcode);
    int tiles = 1, total = r.c.plan.geometry.hidden, columns = kPageColumns, each = 1;
    if (opcode == MOE_DOWN) {
        columns = r.c.plan.geometry.expert_width;
        total = table->active * columns;
    } else if (staged) {
        columns = SlicedProduct::page_columns(r);
        total = r.c.field(FIELD_K_COUNT);
        each = SlicedProduct::pages_of_stage(r, columns);
    } else if (opcode == MOE_UPGATE_ACT) {
        const Dealt mine = ExpertUp::items(r, *table);
        tiles = ceil_div(mine.end - mine.first, mine.step);
    } else if (opcode != FFN_UPGATE_ACT) {
        tiles = ceil_div(r.c.field(FIELD_ROW_COUNT), kTileRows);
    }
    if (!staged && !r.take_input()) return false;
    const int stride = staged ? SlicedProduct::row_stride(columns) : kRowStride;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        uint32_t base = r.memory.input;  // of the rows of the next page
        int left = 0;                    // pages of the stage
        r.clear();
#pragma unroll 1
        for (int k = 0, p = 0; k < total; k += columns, ++p) {
            if (staged && left == 0) {
                if (p > 0) r.release_stage();
                if ((base = r.take_stage()) == 0) return false;
                left = opcode == MOE_DOWN ? ExpertDown::ranks_of_stage(r, *table, p) : each;
            }
            --left;
            // MOE_DOWN stages the rows that go to the expert, the others all.
            const uint32_t rows = opcode == MOE_DOWN ? table->rows[p] : (1u << batch) - 1;
            const uint32_t row = base + __popc(rows & ((1u << g) - 1)) * stride;
            const uint32_t page = r.take_page();
            if (page == 0) return false;
            r.multiply(page, rows >> g & 1 ? row : 0, min(columns, total - k));
            r.release_page();
            base += __popc(rows) * stride;
        }
        if (staged && total > 0) r.release_stage();
        if (!r.hand_over()) return false;
    }
    return true;
}

}  // namespace north_jax::megakernel::pipeline
