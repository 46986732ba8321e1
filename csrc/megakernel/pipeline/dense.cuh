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
    r.input_copied = true;
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
    // Columns of a page: a slice, or equal parts of it.
    __device__ __forceinline__ static int page_columns(const Common& r) {
        const int slice = r.c.field(FIELD_K_SLICE);
        return slice / ceil_div(slice, kPageColumns);
    }
    __device__ __forceinline__ static int row_stride(int columns) { return columns * 2 + 16; }
    __device__ __forceinline__ static int pages_of_stage(const Common& r, int columns) {
        return r.memory.layout.stage_bytes / (r.c.plan.batch * row_stride(columns));
    }

    __device__ __forceinline__ static bool run(Loader& r) {
        if (!r.stages()) return true;
        const int columns = page_columns(r), each = pages_of_stage(r, columns), batch = r.c.plan.batch;
        const int begin = r.c.field(FIELD_K_BEGIN), pages = r.c.field(FIELD_K_COUNT) / columns;
        const int slice = r.c.field(FIELD_K_SLICE), width = r.columns();
        const bf16* in = r.buffer<const bf16>(FIELD_INPUT) + begin;
#pragma unroll 1
        for (int p = 0; p < pages; p += each) {
            const int count = min(each, pages - p);
            if (!r.wait_slices(r.lane < count ? (begin + (p + r.lane) * columns) / slice : -1)) return false;
            fence_bulk_copies();
            const uint32_t stage = r.open_stage(count * batch * columns * 2);
            if (stage == 0) return false;
            uint32_t to = stage + r.lane * row_stride(columns);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                if (r.lane < batch) r.copy(to, in + r.lane * width + (p + i) * columns, columns * 2);
                to += batch * row_stride(columns);
            }
            r.close_stage();
        }
        return true;
    }
};

}  // namespace north_jax::megakernel::pipeline
