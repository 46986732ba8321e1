// What becomes of the sums of a tile: one loop over tiles and rows for all products but the head's, which keeps the
// largest logits.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/pipeline/tiles.cuh"

namespace north_jax::megakernel::pipeline {

// Queries, keys and values: neighbouring pairs (2i, 2i + 1) rotated, keys and values also to their page.
struct QkvEpilogue {
    // The value is that of row `first` + v.row of the weight; those from `count` on are none.
    __device__ __forceinline__ static void store(const Storer& r, const Storer::Value& v, bf16* out, int first,
                                                 int count) {
        const Geometry& g = r.c.plan.geometry;
        const int at = first + v.row, head = at / kHeadDim, within = at % kHeadDim;
        float value = rounded<bf16>(v.sum);
        const float other = __shfl_xor_sync(~0u, value, 1);
        if (r.c.field(FIELD_ROPE) != 0 && head < g.heads + g.kv_heads) {
            const float2 turn = r.memory.rotation[v.b * (kHeadDim / 2) + within / 2];
            value = v.row % 2 == 0 ? value * turn.x - other * turn.y : value * turn.x + other * turn.y;
        }
        const uint32_t pair = pack(value, __shfl_down_sync(~0u, value, 1));
        if (!v.exists || v.row % 2 != 0 || v.row >= count) return;
        const int width = (g.heads + 2 * g.kv_heads) * kHeadDim;
        store_relaxed(reinterpret_cast<uint32_t*>(out + v.b * width + at), pair);
        int kv_head = head - g.heads;
        if (kv_head < 0) return;
        const bool is_value = kv_head >= g.kv_heads;
        kv_head -= is_value ? g.kv_heads : 0;
        const int page = r.c.field(FIELD_WINDOW) > 0 ? r.sliding_page(v.b) : r.full_page(v.b);
        const Pool& pool = r.c.batch.pools[r.c.field(FIELD_POOL)];
        if (page < 0 || page >= pool.pages) return;
        const int64_t token =
            ((int64_t{page} * 2 + is_value) * g.kv_heads + kv_head) * kPageTokens + r.position(v.b) % kPageTokens;
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(pool.data) + token * kHeadDim + within) = pair;
    }
};

// Stores a task's tiles and arrives for each.
__device__ __forceinline__ bool store_products(Storer& r) {
    const Geometry& g = r.c.plan.geometry;
    const int opcode = r.c.field(FIELD_OPCODE), begin = r.c.field(FIELD_ROW_BEGIN);
    const int count = r.c.field(FIELD_ROW_COUNT), counter = r.c.field(FIELD_ARRIVE);
    const int arrivals = r.c.field(FIELD_ARRIVE_COUNT);
    const bool routed_up = opcode == MOE_UPGATE_ACT, units = routed_up || opcode == FFN_UPGATE_ACT;
    const RoutingTable* table = nullptr;
    if (routed_up && (table = r.routing.of_task(r)) == nullptr) return false;
    const TileWalk& walk = r.task().walk;
    const int end = opcode == MOE_DOWN ? 1 : end_of(walk, table);  // all of MOE_DOWN is one tile
    const int unit_width = routed_up ? g.expert_width : g.dense_width;
    const int sum_width = opcode == ROUTER_GEMM ? g.experts : g.hidden;
    float* sums = r.exchanged<float>(FIELD_OUTPUT) + r.c.field(FIELD_SPLIT) * r.c.plan.batch * g.hidden;
    bf16* hiddens = routed_up ? r.exchanged<bf16>(FIELD_OUTPUT) : r.buffer<bf16>(FIELD_OUTPUT);
#pragma unroll 1
    for (int n = walk.first; n < end; n += walk.step) {
        if (!r.next_is_mine()) continue;
        uint32_t rows = r.shared().live_rows;
        int rank = 0, expert = 0, first = begin, outputs = count;
        if (routed_up) {
            rank = rank_of(walk, n);
            first = (n - rank * walk.tiles) * count;
            expert = table->expert[rank], rows = table->rows[rank];
        } else if (!units) {
            first += n * kTileRows, outputs = min(kTileRows, count - n * kTileRows);
        }
        if (!r.take()) return false;
#pragma unroll 1
        while (rows != 0) {
            const Storer::Value v = r.fold(rows);
            if (units) {
                const float up = __shfl_down_sync(~0u, v.sum, count);
                int place = v.b;
                float weight = 1;
                if (routed_up) {
                    const int j = table->choice_of_half(v.b, expert, r.lane);
                    place = v.b * g.top_k + j;
                    weight = table->weight[v.b][j];
                }
                const float hidden = fast_swiglu(v.sum, up) * weight;
                const uint32_t pair = pack(hidden, __shfl_down_sync(~0u, hidden, 1));
                if (v.exists && v.row < count && v.row % 2 == 0) {
                    store_relaxed(reinterpret_cast<uint32_t*>(hiddens + place * unit_width + first + v.row), pair);
                }
            } else if (opcode == QKV_PROJ) {
                QkvEpilogue::store(r, v, r.exchanged<bf16>(FIELD_OUTPUT), first, outputs);
            } else if (v.exists && v.row < outputs) {
                store_relaxed(reinterpret_cast<uint32_t*>(sums + v.b * sum_width + first + v.row),
                              __float_as_uint(v.sum));
            }
        }
        r.release();
        if (opcode == FFN_UPGATE_ACT) {
            r.arrive(counter, arrivals);
        } else {
            r.announce(counter + rank, opcode == QKV_PROJ ? outputs : arrivals);
        }
    }
    if (!routed_up || r.c.field(FIELD_ROUND_BEGIN) != 0 || r.warp != 0) return true;
    // The arrivals of ranks that no expert has.
    const int ranks = min(g.experts, r.c.plan.batch * g.top_k), dealers = r.c.field(FIELD_DEALERS);
#pragma unroll 1
    for (int rank = r.c.field(FIELD_DEALER) + dealers * r.lane; rank < ranks; rank += dealers * 32) {
        if (rank >= table->active) {
            add_release(counter_at(r.c.words.counters, counter + rank), walk.tiles * arrivals);
        }
    }
    return true;
}

// Logits of a vocabulary range, and the largest of them.
struct HeadProduct {
    __device__ __forceinline__ static bool run(Storer& r) {
        const Geometry& g = r.c.plan.geometry;
        const int begin = r.c.field(FIELD_ROW_BEGIN), count = r.c.field(FIELD_ROW_COUNT);
        float* out = r.buffer<float>(FIELD_OUTPUT);
        Best* best = r.shared().best[r.warp];  // of this storer's tiles
        if (r.lane < kMaxBatch) best[r.lane] = {-INFINITY, INT_MAX};
        __syncwarp();
#pragma unroll 1
        for (int tile = 0; tile < count; tile += kTileRows) {
            if (!r.next_is_mine()) continue;
            if (!r.take()) return false;
#pragma unroll 1
            for (uint32_t rows = r.shared().live_rows; rows != 0;) {
                const Storer::Value v = r.fold(rows);
                const bool exists = v.exists && tile + v.row < count;
                Best mine{exists ? v.sum * g.logit_scale : -INFINITY, exists ? begin + tile + v.row : INT_MAX};
                if (exists) out[static_cast<int64_t>(v.b) * g.vocabulary + mine.token] = mine.logit;
#pragma unroll 1
                for (int o = 8; o > 0; o /= 2) {
                    const Best other{__shfl_xor_sync(~0u, mine.logit, o), __shfl_xor_sync(~0u, mine.token, o)};
                    if (mine.beaten_by(other)) mine = other;
                }
                if (v.row == 0 && v.exists && best[v.b].beaten_by(mine)) best[v.b] = mine;
                __syncwarp();
            }
            r.release();
        }
        return finish(r);
    }

   private:
    // The first storer stores the best of both.
    __device__ __forceinline__ static bool finish(Storer& r) {
        Shared& s = r.shared();
        if (r.warp == 1) {
            __syncwarp();
            if (r.lane == 0) barrier_arrive(&s.head_stored);
            return true;
        }
        if (!r.wait(&s.head_stored, r.step.parity ^ 1)) return false;
        const int stride = r.c.field(FIELD_DEALERS) * kMaxLogprobs;
        Best* out = r.buffer<Best>(FIELD_OUTPUT_2) + r.c.field(FIELD_DEALER) * kMaxLogprobs;
        if (s.live_rows >> r.lane & 1) {
            const Best mine = s.best[0][r.lane], other = s.best[1][r.lane];
            out[r.lane * stride] = mine.beaten_by(other) ? other : mine;
        }
        // Rows that ask for more than the largest logit of the product.
        const Context c = r.c;  // a copy: what others see by reference lies in memory, and the role should not
        const int vocabulary = c.plan.geometry.vocabulary;
        float* logits = r.buffer<float>(FIELD_OUTPUT);
#pragma unroll 1
        for (int b = 0; b < c.plan.batch; ++b) {
            const RowSampling row{r.memory.rows + b * kRowFields, vocabulary};
            if (!row.live() || !(row.adjusts() || row.alternatives() > 1)) continue;
            __syncwarp();
            finish_range(c, b, logits + static_cast<int64_t>(b) * vocabulary, c.field(FIELD_ROW_BEGIN),
                         c.field(FIELD_ROW_COUNT), out + b * stride, r.lane);
        }
        r.arrive();
        return true;
    }
};

}  // namespace north_jax::megakernel::pipeline
