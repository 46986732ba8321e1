// Attention over pages: each split by the whole team, a warp for every so many keys; splits folded by ATTN_COMBINE.
#pragma once

#include <cmath>

#include "csrc/megakernel/device/dot.cuh"
#include "csrc/megakernel/division.h"

namespace north_jax::megakernel {

constexpr int kHeadsAtOnce = 4;  // query heads that one pass over the keys serves

// Bytes of shared memory for the warps' results.
constexpr int attention_scratch_bytes(int warps) { return warps * kHeadsAtOnce * (kMaxHeadDim + 2) * 4; }

// One split for query heads [head0, head0 + heads) of KV head `kv`. kLane values of a head lie in each lane.
template <class T, int kLane>
__device__ void attend(const Context& c, const Team& team, int b, int kv, int group, int heads, int begin, int end,
                       float* scratch, float* out, float* stats) {
    const Geometry& g = c.plan.geometry;
    const int d = g.head_dim, width = (g.heads + 2 * g.kv_heads) * d, lane = team.lane();
    const int position = c.row(b)[ROW_POSITION];
    const float scale = 1.0f / sqrtf(static_cast<float>(d));
    const T* qkv = c.buffer<const T>(FIELD_INPUT) + static_cast<int64_t>(b) * width;
    const int head0 = kv * (g.heads / g.kv_heads) + group;
    float q[kHeadsAtOnce][kLane], acc[kHeadsAtOnce][kLane] = {}, largest[kHeadsAtOnce], total[kHeadsAtOnce];
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
        largest[h] = -INFINITY;
        total[h] = 0;
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            const int at = lane + 32 * i;
            q[h][i] = h < heads && at < d ? to_float(qkv[(head0 + h) * d + at]) * scale : 0;
        }
    }
    for (int p = begin + team.warp(); p < end; p += team.warps()) {
        const T* key;
        const T* value;
        if (p == position) {  // of this step: its page may not be written yet
            key = qkv + (g.heads + kv) * d;
            value = key + g.kv_heads * d;
        } else {
            key = c.keys<T>(b, p, kv);
            value = key + g.kv_heads * kPageTokens * d;
        }
        float k[kLane], v[kLane];
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            const int at = lane + 32 * i;
            k[i] = at < d ? to_float(key[at]) : 0;
            v[i] = at < d ? to_float(value[at]) : 0;
        }
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h) {
            float dot = 0;
#pragma unroll
            for (int i = 0; i < kLane; ++i) dot += q[h][i] * k[i];
            dot = warp_sum(dot);
            const float next = fmaxf(largest[h], dot), shrink = expf(largest[h] - next), weight = expf(dot - next);
            largest[h] = next;
            total[h] = total[h] * shrink + weight;
#pragma unroll
            for (int i = 0; i < kLane; ++i) acc[h][i] = acc[h][i] * shrink + weight * v[i];
        }
    }
    const int row = d + 2;
    team.sync();  // the last results have been read
    for (int h = 0; h < kHeadsAtOnce; ++h) {
        float* mine = scratch + (team.warp() * kHeadsAtOnce + h) * row;
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            if (lane + 32 * i < d) mine[lane + 32 * i] = acc[h][i];
        }
        if (lane == 0) {
            mine[d] = largest[h];
            mine[d + 1] = total[h];
        }
    }
    team.sync();
    for (int n = team.thread; n < heads * d; n += team.threads) {
        const int h = n / d, at = n % d;
        float top = -INFINITY, sum = 0, norm = 0;
        for (int w = 0; w < team.warps(); ++w) top = fmaxf(top, scratch[(w * kHeadsAtOnce + h) * row + d]);
        for (int w = 0; w < team.warps(); ++w) {
            const float* theirs = scratch + (w * kHeadsAtOnce + h) * row;
            const float factor = theirs[d + 1] > 0 ? expf(theirs[d] - top) : 0;  // a warp without keys adds nothing
            sum += factor * theirs[at];
            norm += factor * theirs[d + 1];
        }
        out[(group + h) * d + at] = sum;
        if (at == 0) {
            stats[(group + h) * 2] = top;
            stats[(group + h) * 2 + 1] = norm;
        }
    }
}

template <class T>
__device__ void run_attention_item(const Context& c, const Team& team, const AttentionItem& item, float* scratch) {
    const Geometry& g = c.plan.geometry;
    const int b = item.row, kv = item.head, group = g.heads / g.kv_heads, d = g.head_dim;
    const Splits splits = attention_splits(c.row(b)[ROW_POSITION], c.field(FIELD_WINDOW));
    const int begin = splits.first(item.split), end = splits.last(item.split);
    const int64_t place = (static_cast<int64_t>(b) * g.kv_heads + kv) * kMaxSplits + item.split;
    float* out = c.buffer<float>(FIELD_OUTPUT) + place * group * d;
    float* stats = c.buffer<float>(FIELD_OUTPUT_2) + place * group * 2;
    for (int h = 0; h < group; h += kHeadsAtOnce) {
        const int heads = min(kHeadsAtOnce, group - h);
        if (d <= 32) {
            attend<T, 1>(c, team, b, kv, h, heads, begin, end, scratch, out, stats);
        } else if (d <= 64) {
            attend<T, 2>(c, team, b, kv, h, heads, begin, end, scratch, out, stats);
        } else if (d <= 128) {
            attend<T, 4>(c, team, b, kv, h, heads, begin, end, scratch, out, stats);
        } else {
            attend<T, 8>(c, team, b, kv, h, heads, begin, end, scratch, out, stats);
        }
    }
    team.sync();
    if (team.leader()) {
        const int missing = item.split + 1 == splits.count ? kMaxSplits - splits.count : 0;
        uint32_t* counter = counter_at(c.words.counters, c.field(FIELD_ARRIVE) + b * g.kv_heads + kv);
        add_release(counter, c.field(FIELD_ARRIVE_COUNT) * (1 + missing));
    }
}

// ATTN_DECODE and ATTN_DRAIN: the items that are dealt to this task, or that it claims.
template <class T>
__device__ __noinline__ bool attention(const Context& c, const Team& team, float* scratch, int* claimed) {
    const int kv_heads = c.plan.geometry.kv_heads, window = c.field(FIELD_WINDOW), dealers = c.field(FIELD_DEALERS);
    const int first_row = c.batch_begin(), rows = c.field(FIELD_BATCH_COUNT);
    const bool drains = c.field(FIELD_OPCODE) == ATTN_DRAIN;
    for (int n = c.field(FIELD_DEALER) + dealers * team.thread; n < c.plan.batch * kv_heads;
         n += dealers * team.threads) {
        const int b = n / kv_heads;
        if (b < first_row || b >= first_row + rows || c.live(b)) continue;
        add_release(counter_at(c.words.counters, c.field(FIELD_ARRIVE) + n), kMaxSplits * c.field(FIELD_ARRIVE_COUNT));
    }
    const int items = attention_item_count(c.batch.rows, first_row, rows, kv_heads, window);
    int n = drains ? claim(c, team, claimed) : c.field(FIELD_DEALER);
    while (n < items) {
        const AttentionItem item = attention_item(c.batch.rows, first_row, kv_heads, window, n);
        if (!wait_slices(c, team, item.head, 1)) return false;
        run_attention_item<T>(c, team, item, scratch);
        n = drains ? claim(c, team, claimed) : n + dealers;
    }
    return true;
}

template <class T>
__device__ __noinline__ bool attn_combine(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int b = c.batch_begin(), d = g.head_dim, group = g.heads / g.kv_heads;
    if (c.live(b)) {
        const int splits = attention_splits(c.row(b)[ROW_POSITION], c.field(FIELD_WINDOW)).count;
        const float* partial = c.buffer<const float>(FIELD_INPUT);
        const float* stats = c.buffer<const float>(FIELD_INPUT_2);
        T* out = c.buffer<T>(FIELD_OUTPUT) + static_cast<int64_t>(b) * g.heads * d;
        for (int n = team.thread; n < c.field(FIELD_ROW_COUNT) * d; n += team.threads) {
            const int head = c.field(FIELD_ROW_BEGIN) + n / d, at = n % d, kv = head / group;
            const int64_t first = (static_cast<int64_t>(b) * g.kv_heads + kv) * kMaxSplits * group + head % group;
            float top = -INFINITY, sum = 0, total = 0;
            for (int s = 0; s < splits; ++s) top = fmaxf(top, stats[(first + s * group) * 2]);
            for (int s = 0; s < splits; ++s) {
                const int64_t place = first + s * group;
                const float factor = expf(stats[place * 2] - top);
                sum += factor * partial[place * d + at];
                total += factor * stats[place * 2 + 1];
            }
            out[head * d + at] = from_float<T>(sum / total);
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
