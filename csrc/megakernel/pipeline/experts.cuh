// How the experts' products are divided: MOE_UPGATE_ACT tile by tile of the active experts, MOE_DOWN over all of them.
#pragma once

#include "csrc/megakernel/pipeline/dense.cuh"

namespace north_jax::megakernel::pipeline {

// The active experts in ascending order as one long product. Stages hold the hidden units of the rows that go to each
// expert, of as many experts as there is room for.
struct ExpertDown {
    // Experts of the stage that begins at rank `first`.
    __device__ __forceinline__ static int ranks_of_stage(const Common& r, const RoutingTable& table, int first) {
        const int room = r.task().walk.pages_of_stage;
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
        const int stride = staged_row_stride(columns);
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
};

}  // namespace north_jax::megakernel::pipeline
