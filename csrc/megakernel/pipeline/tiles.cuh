// The tiles of every matrix task, as the producer streams and the consumers multiply them: one loop each for all
// operations, along the walk that the host has laid out (tasks.h).
#pragma once

#include "csrc/megakernel/pipeline/consumer.cuh"
#include "csrc/megakernel/pipeline/experts.cuh"
#include "csrc/megakernel/pipeline/producer.cuh"
#include "csrc/megakernel/pipeline/storer.cuh"

namespace north_jax::megakernel::pipeline {

// The experts that a task walks; `ok` is false after a fault.
template <class R>
__device__ __forceinline__ const RoutingTable* experts_of(R& r, bool* ok) {
    if (!is_routed(r.c.field(FIELD_OPCODE))) return nullptr;
    const RoutingTable* table = r.routing.of_task(r);
    *ok = table != nullptr;
    return table;
}

// One past the last tile of a walk.
__device__ __forceinline__ int end_of(const TileWalk& walk, const RoutingTable* table) {
    return table == nullptr ? walk.end : min(walk.end, table->active * walk.tiles);
}

// The rank of the expert that a tile belongs to.
__device__ __forceinline__ int rank_of(const TileWalk& walk, int tile) {
    return walk.tiles_inverse == 0 ? tile : static_cast<int>(__umulhi(tile, walk.tiles_inverse));
}

// Streams a task's weights, lane l row l of each tile.
__device__ __forceinline__ bool stream_weights(Producer& r) {
    bool ok = true;
    const RoutingTable* table = experts_of(r, &ok);
    if (!ok) return false;
    const TileWalk& walk = r.task().walk;
    const int columns = walk.columns, page_columns = walk.page_columns, end = end_of(walk, table);
    // Rows of MOE_UPGATE_ACT are those of a tile, in the expert that the tile belongs to.
    int first_row = r.lane < walk.units ? r.lane : r.lane - walk.units + walk.second_half;
    if (r.c.field(FIELD_OPCODE) != MOE_UPGATE_ACT) first_row += r.c.field(FIELD_ROW_BEGIN);
    const int64_t width = r.columns();
    const bf16* weight = r.weight() + walk.first_column;
#pragma unroll 1
    for (int n = walk.first; n < end; n += walk.step) {
        int row = first_row;
        if (table != nullptr) {
            const int rank = rank_of(walk, n);
            row += table->expert[rank] * walk.expert_rows + (n - rank * walk.tiles) * walk.units;
        } else {
            row += n * kTileRows;
        }
        const int rows = n + 1 == walk.end ? walk.last_rows : walk.rows;
        const bf16* from = weight + row * width;
#pragma unroll 1
        for (int k = 0; k < columns; k += page_columns) {
            if (!r.fill_page(from + k, rows, min(page_columns, columns - k) * 2)) return false;
        }
    }
    return true;
}

// Multiplies a task's pages with the layer's input or with what is staged, tile by tile; all of MOE_DOWN is one tile.
__device__ __forceinline__ bool multiply_tiles(Consumer& r) {
    bool ok = true;
    const RoutingTable* table = experts_of(r, &ok);
    if (!ok) return false;
    const TileWalk& walk = r.task().walk;
    const bool down = r.c.field(FIELD_OPCODE) == MOE_DOWN, staged = walk.pages_of_stage != 0;
    const int batch = r.c.plan.batch, g = r.lane / 4, columns = walk.page_columns;
    const int stride = staged ? staged_row_stride(columns) : kRowStride;
    const int total = down ? table->active * columns : walk.columns;
    const int end = down ? 1 : end_of(walk, table);
    if (!staged && !r.take_input()) return false;
#pragma unroll 1
    for (int tile = walk.first; tile < end; tile += walk.step) {
        uint32_t base = r.memory.input;  // of the rows of the next page
        int left = 0;                    // pages of the stage
        r.clear();
#pragma unroll 1
        for (int k = 0, p = 0; k < total; k += columns, ++p) {
            if (staged && left == 0) {
                if (p > 0) r.release_stage();
                if ((base = r.take_stage()) == 0) return false;
                left = down ? ExpertDown::ranks_of_stage(r, *table, p) : walk.pages_of_stage;
            }
            --left;
            // MOE_DOWN stages the rows that go to the expert, the others all.
            const uint32_t rows = down ? table->rows[p] : (1u << batch) - 1;
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
