// ATTN_COMBINE: the splits of query heads of one row folded, by two warps of the loader.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/pipeline/loader.cuh"

namespace north_jax::megakernel::pipeline {

// Each warp folds up to sixteen splits, a lane four dims.
struct SplitsFold {
    __device__ __forceinline__ static bool run(Loader& r) {
        const Geometry& g = r.c.plan.geometry;
        if (!r.folders().all(!r.folds_first() || r.wait_task())) return false;
        const int b = r.c.batch_begin(), group = g.heads / g.kv_heads;
        if (r.live(b)) {
            const int splits = r.memory.splits[(r.c.field(FIELD_WINDOW) > 0 ? r.c.plan.batch : 0) + b].count;
            const int end = r.c.field(FIELD_ROW_BEGIN) + r.c.field(FIELD_ROW_COUNT);
#pragma unroll 1
            for (int head = r.c.field(FIELD_ROW_BEGIN); head < end; ++head) {
                const int kv = head / group;
                const int first = (b * g.kv_heads + kv) * kMaxSplits * group + head - kv * group;
                const float4 sum = fold(r, first, group, splits);
                if (!r.folds_first()) continue;
                bf16* out = r.buffer<bf16>(FIELD_OUTPUT) + (b * g.heads + head) * kHeadDim + r.lane * 4;
                *reinterpret_cast<uint2*>(out) = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
            }
        }
        r.folders().sync();
        const int arrivals = r.c.field(FIELD_ARRIVE_COUNT);
        if (r.folders().leader() && arrivals != 0) {
            add_release(counter_at(r.c.words.counters, r.c.field(FIELD_ARRIVE)), arrivals);
        }
        return true;
    }

   private:
    static constexpr int kSplitsOfWarp = kMaxSplits / kFolderWarps;

    // A head whose splits begin at `first`, `group` apart, to the first warp.
    __device__ __forceinline__ static float4 fold(Loader& r, int first, int group, int splits) {
        const int from = r.folds_first() ? 0 : kSplitsOfWarp, lane = r.lane;
        const float* partial = r.buffer<const float>(FIELD_INPUT) + (first + from * group) * kHeadDim + lane * 4;
        float4 value[kSplitsOfWarp];
#pragma unroll
        for (int i = 0; i < kSplitsOfWarp; ++i, partial += group * kHeadDim) {
            value[i] = load_fresh(partial, from + i < splits);
        }
        // Lane i: of split i, its largest score and the sum of its weights.
        float2 mine{-INFINITY, 0};
        if (lane < splits) mine = load_fresh_two(r.buffer<const float>(FIELD_INPUT_2) + (first + lane * group) * 2);
        float top = mine.x;
#pragma unroll 1
        for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
        const float factor = fast_exp2(mine.x - top);
        float total = factor * mine.y;
#pragma unroll 1
        for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
        const float share = __fdividef(factor, total);
        float4 sum{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < kSplitsOfWarp; ++i) add(sum, __shfl_sync(~0u, share, from + i), value[i]);
        // The second warp leaves its part to the first.
        float4* mailbox = reinterpret_cast<float4*>(r.shared().combined) + lane;
        r.folders().sync();  // the last head has been read
        if (!r.folds_first()) *mailbox = sum;
        r.folders().sync();
        if (r.folds_first()) add(sum, 1, *mailbox);
        return sum;
    }

    __device__ __forceinline__ static void add(float4& to, float factor, const float4& from) {
        to.x += factor * from.x, to.y += factor * from.y, to.z += factor * from.z, to.w += factor * from.w;
    }
};

}  // namespace north_jax::megakernel::pipeline
