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
        const bf16* in = r.exchanged<const bf16>(FIELD_INPUT);
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
            const uint32_t stage = r.await_stage();
            if (stage == 0) return false;
            for (uint64_t begin = 0;;) {
                r.expect_copies(all * columns * 2);
                int i = before - __popc(rows);
#pragma unroll 1
                for (uint32_t left = rows; left != 0; left &= left - 1, ++i) {
                    const int b = __ffs(left) - 1, j = table->choice_of(b, table->expert[rank]);
                    r.copy(stage + i * stride, in + (b * k + j) * columns, columns * 2);
                }
                if (!r.await_copies()) return false;
                if (all_there(r, stage, all, columns * 2, stride)) break;
                begin = look_again(begin, r.c.field(FIELD_SLICE_WAIT) + first, r.c.field(FIELD_SLICE_NEED));
                if (begin == 0) return false;
            }
            r.fill_stage();
        }
        return true;
    }

   private:
    // Whether every word of staged rows is there, to the whole warp.
    __device__ __forceinline__ static bool all_there(const Loader& r, uint32_t stage, int rows, int bytes, int stride) {
        uint32_t largest = 0;
#pragma unroll 1
        for (int i = 0; i < rows; ++i, stage += stride) {
#pragma unroll 3
            for (int at = r.lane * 16; at < bytes; at += 512) {
                largest = max(largest, largest_word(load_shared_words(stage + at)));
            }
        }
        return __all_sync(~0u, largest != kNothing);
    }
};

}  // namespace north_jax::megakernel::pipeline
