// The side warps: splits folded, sampling, the ends of steps.
#pragma once

#include "csrc/megakernel/device/dot.cuh"
#include "csrc/megakernel/operations/draw.cuh"
#include "csrc/megakernel/operations/sample.cuh"
#include "csrc/megakernel/operations/step.cuh"
#include "csrc/megakernel/pipeline/norm.cuh"

namespace north_jax::megakernel::pipeline {

struct Side : TeamRole<kSideWarps, 2> {
    using TeamRole::TeamRole;

    // Makes ready what the block's other roles read of a step, and lets them begin it.
    __device__ __forceinline__ void open_step(bool ended) const {
        Shared& s = shared();
        const Geometry& g = c.plan.geometry;
        const int batch = c.plan.batch, thread = this->thread();
        if (!ended) {
#pragma unroll 1
            for (int i = thread; i < batch * kRowFields; i += kSideWarps * 32) {
                memory.rows[i] = __ldcg(c.batch.rows + i);
            }
            if (thread >= 32 && thread < 32 + 2 * batch) {  // other threads than those with page numbers
                const int i = thread - 32, b = i % batch;
                const int position = __ldcg(c.batch.rows + b * kRowFields + ROW_POSITION);
                const bool live = __ldcg(c.batch.rows + b * kRowFields + ROW_REMAINING) > 0;
                Splits splits = attention_splits(position, i < batch ? 0 : c.plan.window);
                if (!live) splits.count = 0;
                memory.splits[i] = splits;
            }
            if (thread < 2 * batch) {
                const int b = thread / 2, page = __ldcg(c.batch.rows + b * kRowFields + ROW_POSITION) / kPageTokens;
                const DeviceBatch& all = c.batch;
                memory.pages_of_rows[thread] =
                    thread % 2 == 0
                        ? (page < all.full_entries ? __ldg(all.full_table + b * all.full_entries + page) : -1)
                        : __ldg(all.sliding_table + b * all.sliding_entries + page % all.sliding_entries);
            }
#pragma unroll 1
            for (int i = thread; i < batch * (g.head_dim / 2); i += kSideWarps * 32) {
                const int b = i / (g.head_dim / 2), pair = i % (g.head_dim / 2);
                const int position = __ldcg(c.batch.rows + b * kRowFields + ROW_POSITION);
                float sine, cosine;
                sincosf(static_cast<float>(position) * c.plan.frequencies[pair], &sine, &cosine);
                memory.rotation[i] = {cosine, sine};
            }
        }
        if (thread < 32 && !ended) {
            const bool lives = thread < batch && __ldcg(c.batch.rows + thread * kRowFields + ROW_REMAINING) > 0;
            const uint32_t rows = __ballot_sync(~0u, lives);
            if (thread == 0) s.live_rows = rows;
        }
        if (thread == 0) {
            s.ended = ended;
            s.step = c.step;
        }
        // Sampling wrote where bulk copies of stages will.
        fence_shared_for_bulk_copies();
        team().sync();
        if (thread == 0) barrier_arrive(&s.step_begins);
    }

    // Folds the splits of query heads of one row. Each warp folds up to eight splits, a lane four dims.
    __device__ __forceinline__ bool combine() {
        const Geometry& g = c.plan.geometry;
        if (!agreed(warp != 0 || wait_task())) return false;
        const int b = c.batch_begin(), group = g.heads / g.kv_heads;
        if (live(b)) {
            const int splits = memory.splits[(c.field(FIELD_WINDOW) > 0 ? c.plan.batch : 0) + b].count;
#pragma unroll 1
            for (int h = 0; h < c.field(FIELD_ROW_COUNT); ++h) {
                const int head = c.field(FIELD_ROW_BEGIN) + h, kv = head / group;
                const int first = (b * g.kv_heads + kv) * kMaxSplits * group + head % group;
                combine_head(b, head, first, group, splits);
            }
        }
        arrive_task(c, team());
        return true;
    }

   private:
    static constexpr int kSplitsOfWarp = kMaxSplits / kSideWarps;

    __device__ __forceinline__ void combine_head(int b, int head, int first, int group, int splits) const {
        Shared& s = shared();
        const float* partial = buffer<const float>(FIELD_INPUT);
        const float* stats = buffer<const float>(FIELD_INPUT_2);
        const int from = warp * kSplitsOfWarp;
        float4 value[kSplitsOfWarp];
#pragma unroll
        for (int i = 0; i < kSplitsOfWarp; ++i) {
            value[i] = {0, 0, 0, 0};
            if (from + i < splits) value[i] = load_fresh(partial + (first + (from + i) * group) * kHeadDim + lane * 4);
        }
        // Lane i: of split i.
        float2 mine{-INFINITY, 0};
        if (lane < splits) {
            const float* at = stats + (first + lane * group) * 2;
            mine = {__uint_as_float(load_relaxed(reinterpret_cast<const uint32_t*>(at))),
                    __uint_as_float(load_relaxed(reinterpret_cast<const uint32_t*>(at + 1)))};
        }
        float top = mine.x;
        for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
        const float factor = lane < splits ? __expf(mine.x - top) : 0;
        const float total = warp_sum(factor * mine.y);
        float4 sum{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < kSplitsOfWarp; ++i) {
            const float f = __shfl_sync(~0u, factor, from + i);
            sum.x += f * value[i].x, sum.y += f * value[i].y, sum.z += f * value[i].z, sum.w += f * value[i].w;
        }
        // The upper half of the warps, then warp 1, add to those below.
#pragma unroll
        for (int half = kSideWarps / 2; half > 0; half /= 2) {
            team().sync();  // the last values have been read
            if (warp >= half && warp < 2 * half) *reinterpret_cast<float4*>(&s.combined[warp - half][lane * 4]) = sum;
            team().sync();
            if (warp < half) {
                const float4 other = *reinterpret_cast<const float4*>(&s.combined[warp][lane * 4]);
                sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
            }
        }
        if (warp == 0) {
            bf16* out = buffer<bf16>(FIELD_OUTPUT) + (b * c.plan.geometry.heads + head) * kHeadDim + lane * 4;
            const float scale = 1.0f / total;
            *reinterpret_cast<uint2*>(out) = {pack(sum.x * scale, sum.y * scale), pack(sum.z * scale, sum.w * scale)};
        }
    }
};

}  // namespace north_jax::megakernel::pipeline
