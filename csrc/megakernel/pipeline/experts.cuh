// The experts' products: MOE_UPGATE_ACT tile by tile of the active experts, MOE_DOWN over all of them.
#pragma once

#include "csrc/megakernel/pipeline/dense.cuh"

namespace north_jax::megakernel::pipeline {

struct ExpertUp {
    __device__ __forceinline__ static Dealt items(const Common& r, const RoutingTable& table) {
        return dealt(table.active * tiles_of_expert(r), r.c.field(FIELD_DEALER), r.c.field(FIELD_DEALERS),
                     r.c.field(FIELD_ROUND_BEGIN), r.c.field(FIELD_ROUND_END));
    }
    __device__ __forceinline__ static int tiles_of_expert(const Common& r) {
        return r.c.plan.geometry.expert_width / r.c.field(FIELD_ROW_COUNT);
    }

    // Negative after a fault.
    __device__ __forceinline__ static int tiles(Consumer& r) {
        const RoutingTable* table = r.routing.of_task(r);
        if (table == nullptr) return -1;
        const Dealt mine = items(r, *table);
        return ceil_div(mine.end - mine.first, mine.step);
    }
    __device__ __forceinline__ static bool run(Storer& r) {
        const RoutingTable* table = r.routing.of_task(r);
        if (table == nullptr) return false;
        const Geometry& g = r.c.plan.geometry;
        const int units = r.c.field(FIELD_ROW_COUNT), each = tiles_of_expert(r);
        const int counter = r.c.field(FIELD_ARRIVE), count = r.c.field(FIELD_ARRIVE_COUNT);
        bf16* out = r.buffer<bf16>(FIELD_OUTPUT);
        const Dealt mine = items(r, *table);
#pragma unroll 1
        for (int n = mine.first; n < mine.end; n += mine.step) {
            if (!r.next_is_mine()) continue;
            const ExpertItem item = expert_item(each, n);
            const int expert = table->expert[item.rank], rows = table->rows[item.rank];
            const bool ok = r.store_tile([&](int b, int row, float gate, bool live) {
                const float up = __shfl_down_sync(~0u, gate, units);
                if (!live || row >= units || !(rows >> b & 1)) return;
                const int j = table->choice_of(b, expert);
                out[(b * g.top_k + j) * g.expert_width + item.tile * units + row] =
                    from_float<bf16>(swiglu(gate, up) * table->weight[b][j]);
            });
            if (!ok) return false;
            r.arrive(counter + item.rank, count);
        }
        if (r.c.field(FIELD_ROUND_BEGIN) != 0 || r.warp != 0) return true;
        // The arrivals of ranks that no expert has.
        const int ranks = min(g.experts, r.c.plan.batch * g.top_k), dealers = r.c.field(FIELD_DEALERS);
#pragma unroll 1
        for (int rank = r.c.field(FIELD_DEALER) + dealers * r.lane; rank < ranks; rank += dealers * 32) {
            if (rank >= table->active) add_release(r.c.words.counters + counter + rank, each * count);
        }
        return true;
    }
};

// The active experts in ascending order as one long product. Stages hold the hidden units of the rows that go to each
// expert, of as many experts as there is room for.
struct ExpertDown {
    // Experts of the stage that begins at rank `first`.
    __device__ __forceinline__ static int ranks_of_stage(const Common& r, const RoutingTable& table, int first) {
        const int room = r.memory.layout.stage_bytes / SlicedProduct::row_stride(r.c.plan.geometry.expert_width);
        int used = 0, rank = first;
        while (rank < table.active && rank - first < 32) {
            used += __popc(table.rows[rank]);
            if (used > room) break;
            ++rank;
        }
        return rank - first;
    }

    __device__ __forceinline__ static bool run(Loader& r) {
        const RoutingTable* table = r.routing.of_task(r);
        if (table == nullptr) return false;
        const int columns = r.c.plan.geometry.expert_width, k = r.c.plan.geometry.top_k;
        const int stride = SlicedProduct::row_stride(columns);
        const bf16* in = r.buffer<const bf16>(FIELD_INPUT);
#pragma unroll 1
        for (int first = 0, count; first < table->active; first += count) {
            count = ranks_of_stage(r, *table, first);
            const int rank = first + r.lane;
            if (!r.wait_slices(r.lane < count ? rank : -1)) return false;
            fence_bulk_copies();
            uint32_t rows = r.lane < count ? table->rows[rank] : 0;
            int before = __popc(rows);  // rows of the stage up to this lane's expert
            for (int o = 1; o < 32; o *= 2) {
                const int other = __shfl_up_sync(~0u, before, o);
                if (r.lane >= o) before += other;
            }
            const int all = __shfl_sync(~0u, before, 31);
            const uint32_t stage = r.open_stage(all * columns * 2);
            if (stage == 0) return false;
            for (int i = before - __popc(rows); rows != 0; rows &= rows - 1, ++i) {
                const int b = __ffs(rows) - 1, j = table->choice_of(b, table->expert[rank]);
                r.copy(stage + i * stride, in + (b * k + j) * columns, columns * 2);
            }
            __syncwarp();
            r.close_stage();
        }
        return true;
    }
    __device__ __forceinline__ static bool run(Consumer& r) {
        const RoutingTable* table = r.routing.of_task(r);
        if (table == nullptr) return false;
        const int columns = r.c.plan.geometry.expert_width, stride = SlicedProduct::row_stride(columns);
        const int g = r.lane / 4;
        r.clear();
#pragma unroll 1
        for (int first = 0, count; first < table->active; first += count) {
            count = ranks_of_stage(r, *table, first);
            const uint32_t stage = r.take_stage();
            if (stage == 0) return false;
            int used = 0;
#pragma unroll 1
            for (int rank = first; rank < first + count; ++rank) {
                const uint32_t rows = table->rows[rank];
                const int place = used + __popc(rows & ((1u << g) - 1));
                used += __popc(rows);
                const uint32_t page = r.take_page();
                if (page == 0) return false;
                r.multiply(page, rows >> g & 1 ? stage + place * stride : 0, columns);
                r.release_page();
            }
            r.release_stage();
        }
        return r.hand_over();
    }
    __device__ __forceinline__ static bool run(Storer& r) {
        return r.routing.of_task(r) != nullptr && SlicedProduct::run(r);
    }
};

}  // namespace north_jax::megakernel::pipeline
