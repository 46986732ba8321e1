// Dense products: QKV_PROJ, ROUTER_GEMM, FFN_UPGATE_ACT and LM_HEAD of a layer's input, O_PROJ and FFN_DOWN of what
// arrives slice by slice.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/pipeline/consumer.cuh"
#include "csrc/megakernel/pipeline/loader.cuh"
#include "csrc/megakernel/pipeline/producer.cuh"
#include "csrc/megakernel/pipeline/storer.cuh"

namespace north_jax::megakernel::pipeline {

__device__ __forceinline__ bool takes_input(int opcode) {
    return opcode == QKV_PROJ || opcode == ROUTER_GEMM || opcode == FFN_UPGATE_ACT || opcode == MOE_UPGATE_ACT ||
           opcode == LM_HEAD;
}

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

// A product of the layer's input with consecutive rows of a weight.
struct InputProduct {
    // Tiles of the task, which the consumers treat alike whatever they are of.
    __device__ __forceinline__ static int tiles(const Consumer& r) {
        return ceil_div(r.c.field(FIELD_ROW_COUNT), kTileRows);
    }
};

struct RouterProduct : InputProduct {
    __device__ __forceinline__ static bool run(Storer& r) {
        if (!r.next_is_mine()) return true;
        const int begin = r.c.field(FIELD_ROW_BEGIN), count = r.c.field(FIELD_ROW_COUNT);
        const int experts = r.c.plan.geometry.experts;
        float* out = r.buffer<float>(FIELD_OUTPUT);
        const bool ok = r.store_tile([&](int b, int row, float sum, bool live) {
            if (live && row < count) out[b * experts + begin + row] = sum;
        });
        if (ok) r.arrive();
        return ok;
    }
};

// Queries, keys and values of one layer; rotates neighbouring pairs (2i, 2i + 1) and writes keys and values to the
// pages.
struct QkvProduct : InputProduct {
    __device__ __forceinline__ static bool run(Storer& r) {
        if (!r.next_is_mine()) return true;
        const Geometry& g = r.c.plan.geometry;
        const int begin = r.c.field(FIELD_ROW_BEGIN), count = r.c.field(FIELD_ROW_COUNT);
        const int head = begin / kHeadDim, within = begin % kHeadDim;
        const int width = (g.heads + 2 * g.kv_heads) * kHeadDim;
        const bool rotates = r.c.field(FIELD_ROPE) != 0 && head < g.heads + g.kv_heads;
        bf16* out = r.buffer<bf16>(FIELD_OUTPUT);
        const bool ok = r.store_tile([&](int b, int row, float sum, bool live) {
            float value = rounded<bf16>(sum);
            const float other = __shfl_xor_sync(~0u, value, 1);
            if (rotates && live) {
                const float2 turn = r.memory.rotation[b * (kHeadDim / 2) + (within + row) / 2];
                value = row % 2 == 0 ? value * turn.x - other * turn.y : value * turn.x + other * turn.y;
            }
            const uint32_t pair = pack(value, __shfl_down_sync(~0u, value, 1));
            if (!live || row % 2 != 0 || row >= count) return;
            *reinterpret_cast<uint32_t*>(out + b * width + begin + row) = pair;
            if (head < g.heads) return;
            const bool is_value = head >= g.heads + g.kv_heads;
            const int page = r.c.field(FIELD_WINDOW) > 0 ? r.sliding_page(b) : r.full_page(b);
            const Pool& pool = r.c.batch.pools[r.c.field(FIELD_POOL)];
            if (page < 0 || page >= pool.pages) return;
            const int kv_head = (head - g.heads) % g.kv_heads;
            const int64_t token =
                ((int64_t{page} * 2 + is_value) * g.kv_heads + kv_head) * kPageTokens + r.position(b) % kPageTokens;
            *reinterpret_cast<uint32_t*>(static_cast<bf16*>(pool.data) + token * kHeadDim + within + row) = pair;
        });
        if (ok) r.arrive();
        return ok;
    }
};

// Gate rows above up rows: 8 hidden units of 16 rows.
struct DenseUp : InputProduct {
    __device__ __forceinline__ static int tiles(const Consumer&) { return 1; }
    __device__ __forceinline__ static bool run(Storer& r) {
        if (!r.next_is_mine()) return true;
        const int units = r.c.field(FIELD_ROW_COUNT), begin = r.c.field(FIELD_ROW_BEGIN);
        const int width = r.c.plan.geometry.dense_width;
        bf16* out = r.buffer<bf16>(FIELD_OUTPUT);
        const bool ok = r.store_tile([&](int b, int row, float gate, bool live) {
            const float up = __shfl_down_sync(~0u, gate, units);
            if (live && row < units) out[b * width + begin + row] = from_float<bf16>(swiglu(gate, up));
        });
        if (ok) r.arrive();
        return ok;
    }
};

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
    __device__ __forceinline__ static bool run(Consumer& r) {
        const int columns = page_columns(r), each = pages_of_stage(r, columns), batch = r.c.plan.batch;
        const int pages = r.c.field(FIELD_K_COUNT) / columns, g = r.lane / 4;
        uint32_t stage = 0;
        r.clear();
#pragma unroll 1
        for (int p = 0; p < pages; ++p) {
            if (p % each == 0 && (stage = r.take_stage()) == 0) return false;
            const uint32_t row = stage + (p % each * batch + g) * row_stride(columns);
            const uint32_t page = r.take_page();
            if (page == 0) return false;
            r.multiply(page, g < batch ? row : 0, columns);
            r.release_page();
            if (p % each == each - 1 || p == pages - 1) r.release_stage();
        }
        return r.hand_over();
    }
    __device__ __forceinline__ static bool run(Storer& r) {
        if (!r.next_is_mine()) return true;
        const int begin = r.c.field(FIELD_ROW_BEGIN), count = r.c.field(FIELD_ROW_COUNT);
        const int hidden = r.c.plan.geometry.hidden;
        float* out = r.buffer<float>(FIELD_OUTPUT) + r.c.field(FIELD_SPLIT) * r.c.plan.batch * hidden;
        const bool ok = r.store_tile([&](int b, int row, float sum, bool live) {
            if (live && row < count) out[b * hidden + begin + row] = sum;
        });
        if (ok) r.arrive();
        return ok;
    }
};

// Logits of a vocabulary range, and the largest of them.
struct HeadProduct : InputProduct {
    __device__ __forceinline__ static bool run(Storer& r) {
        const Geometry& g = r.c.plan.geometry;
        const int begin = r.c.field(FIELD_ROW_BEGIN), count = r.c.field(FIELD_ROW_COUNT), batch = r.c.plan.batch;
        float* out = r.buffer<float>(FIELD_OUTPUT);
        Best best[kMaxBatch / 2];  // lanes 0 … 15: even rows of the batch, 16 … 31: odd ones
#pragma unroll
        for (int i = 0; i < kMaxBatch / 2; ++i) best[i] = {-INFINITY, INT_MAX};
        for (int tile = 0; tile < count; tile += kTileRows) {
            if (!r.next_is_mine()) continue;
            // All rows, idle ones too: even ones in one half of the warp, odd ones in the other.
            const bool ok = r.store_rows((1u << batch) - 1, [&](int b, int row, float sum, bool exists) {
                if (!exists || !r.live(b) || tile + row >= count) return;
                const Best other{sum * g.logit_scale, begin + tile + row};
                out[static_cast<int64_t>(b) * g.vocabulary + other.token] = other.logit;
#pragma unroll
                for (int i = 0; i < kMaxBatch / 2; ++i) {
                    if (b / 2 == i && best[i].beaten_by(other)) best[i] = other;
                }
            });
            if (!ok) return false;
        }
#pragma unroll
        for (int i = 0; i < kMaxBatch / 2; ++i) {
            for (int o = 8; o > 0; o /= 2) {
                const Best other{__shfl_xor_sync(~0u, best[i].logit, o), __shfl_xor_sync(~0u, best[i].token, o)};
                if (best[i].beaten_by(other)) best[i] = other;
            }
        }
        return finish(r, best, batch);
    }

   private:
    // The second storer leaves its best to the first, which stores those of both.
    __device__ __forceinline__ static bool finish(Storer& r, const Best (&best)[kMaxBatch / 2], int batch) {
        Shared& s = r.shared();
        const int b_of_lane = r.lane / 16;
        if (r.warp == 1) {
#pragma unroll
            for (int i = 0; i < kMaxBatch / 2; ++i) {
                if (r.lane % 16 == 0) s.best[2 * i + b_of_lane] = best[i];
            }
            __syncwarp();
            if (r.lane == 0) barrier_arrive(&s.head_stored);
            return true;
        }
        if (!r.wait(&s.head_stored, r.step.parity ^ 1)) return false;
        const int stride = r.c.field(FIELD_DEALERS) * kMaxLogprobs;
        Best* out = r.buffer<Best>(FIELD_OUTPUT_2) + r.c.field(FIELD_DEALER) * kMaxLogprobs;
#pragma unroll
        for (int i = 0; i < kMaxBatch / 2; ++i) {
            const int b = 2 * i + b_of_lane;
            if (r.lane % 16 != 0 || b >= batch || !r.live(b)) continue;
            const Best other = s.best[b];
            out[b * stride] = best[i].beaten_by(other) ? other : best[i];
        }
        // Rows that ask for more than the largest logit of the product.
        const int vocabulary = r.c.plan.geometry.vocabulary;
        float* logits = r.buffer<float>(FIELD_OUTPUT);
#pragma unroll 1
        for (int b = 0; b < batch; ++b) {
            const RowSampling row{r.memory.rows + b * kRowFields, vocabulary};
            if (!row.live() || !(row.adjusts() || row.alternatives() > 1)) continue;
            __syncwarp();
            finish_range(r.c, b, logits + static_cast<int64_t>(b) * vocabulary, r.c.field(FIELD_ROW_BEGIN),
                         r.c.field(FIELD_ROW_COUNT), out + b * stride, r.lane);
        }
        r.arrive();
        return true;
    }
};

}  // namespace north_jax::megakernel::pipeline
