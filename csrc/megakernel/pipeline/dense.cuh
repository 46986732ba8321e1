// What dense products multiply: the layer's input, or what arrives slice by slice.
#pragma once

#include "csrc/megakernel/pipeline/loader.cuh"

namespace north_jax::megakernel::pipeline {

// Stages the layer's input where no task before has: the rows of INPUT, kPageColumns at a time.
__device__ __forceinline__ bool stage_input(Loader& r) {
    const int layer = r.c.field(FIELD_LAYER);
    if (r.input_layer == layer) return true;
    r.input_layer = layer;
    if (!r.stages()) return true;
    if (!r.wait_task()) return false;
    fence_bulk_copies();
    if (!r.open_input()) return false;
    const int batch = r.c.plan.batch, columns = r.c.plan.geometry.hidden;
    const bf16* in = r.buffer<const bf16>(FIELD_INPUT) + r.lane * columns;
    if (r.lane == 0) barrier_arrive_expect(&r.shared().input_full, batch * columns * 2);
    __syncwarp();
    if (r.lane == 0) r.shared().input_copied = true;
    uint32_t to = r.memory.input + r.lane * kRowStride;
#pragma unroll 1
    for (int k = 0; k < columns; k += kPageColumns) {
        if (r.lane < batch) bulk_copy(to, in + k, min(kPageColumns, columns - k) * 2, &r.shared().input_full);
        to += batch * kRowStride;
    }
    return true;
}

// O_PROJ and FFN_DOWN: the input arrives in slices of K_SLICE columns.
struct SlicedProduct {
    __device__ __forceinline__ static bool run(Loader& r) {
        if (!r.stages()) return true;
        const TileWalk& walk = r.task().walk;
        const int columns = walk.page_columns, each = walk.pages_of_stage, batch = r.c.plan.batch;
        const int end = walk.columns, width = r.columns(), stride = staged_row_stride(columns);
        const bf16* in = r.buffer<const bf16>(FIELD_INPUT) + walk.first_column + r.lane * width;
#pragma unroll 1
        for (int p = 0, k = 0; k < end; p += each) {
            // Lane l names the slice of the stage's page l.
            const bool mine = r.lane < each && k + r.lane * columns < end;
            const int slice = walk.first_slice + ((p + r.lane) * walk.slices_of_page >> 16);
            if (!r.wait_slices(mine ? slice : -1)) return false;
            const int count = __popc(__ballot_sync(~0u, mine));
            fence_bulk_copies();
            const uint32_t stage = r.open_stage(count * batch * columns * 2);
            if (stage == 0) return false;
            uint32_t to = stage + r.lane * stride;
#pragma unroll 1
            for (int i = 0; i < count; ++i, k += columns, to += batch * stride) {
                if (r.lane < batch) r.copy(to, in + k, columns * 2);
            }
            r.close_stage();
        }
        return true;
    }
};

}  // namespace north_jax::megakernel::pipeline
