// ATTN_DECODE: one split of one KV head of one row at a time, on tensor cores.
//
// A page of the ring holds the 64 keys of a KV page in rows 0 … 7, 8 keys a row, and their values in rows 8 … 15. With
// the rows' padding, the keys q, q + 8, …, q + 56 lie in different banks: these are the rows of every fragment.
//
//   scores   [64 keys, 8 query heads] = K Qᵀ: four warps, 16 keys each; the other four do the next page, and each four
//            do theirs before they go on with the page before
//   outputs  [128 dims, 8 query heads] += Vᵀ P: each warp has 16 dims of all heads, so nothing is left to fold
//
// The softmax runs over the pages with a running maximum, by all warps alike. The step's own key and value come with
// the queries, not through the page, which is being written meanwhile: the last split begins with them.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/device/dot.cuh"
#include "csrc/megakernel/division.h"
#include "csrc/megakernel/pipeline/consumer.cuh"
#include "csrc/megakernel/pipeline/exchange.cuh"
#include "csrc/megakernel/pipeline/loader.cuh"
#include "csrc/megakernel/pipeline/producer.cuh"
#include "csrc/megakernel/pipeline/storer.cuh"

namespace north_jax::megakernel::pipeline {

constexpr int kKeysOfRow = kRowBytes / (kHeadDim * 2);  // 8
constexpr int kKeyRows = kPageTokens / kKeysOfRow;      // 8 rows of the page for keys, then as many for values
static_assert(2 * kKeyRows == kTileRows, "keys and values of a KV page fill a page of the ring");
constexpr int kQueryStride = kHeadDim * 2 + 16;                       // bytes of a staged head
constexpr int kPiecesOfHead = kHeadDim / 8;                           // of sixteen bytes
constexpr int kQueryPieces = (kQueryHeads + 2) * kPiecesOfHead / 32;  // of a lane
static_assert((kQueryHeads + 2) * kQueryStride <= kMinStageBytes, "queries, key and value fit into a stage");

// Scores are those of the exponential to base 2.
constexpr float kScoreScale = 1.4426950408889634f / 11.313708498984761f;  // log2(e) / sqrt(d)
static_assert(kHeadDim == 128, "the root of 128");

// Written by a function of its own, for all roles: the arithmetic is long. All lanes do the same. `entries`: of a row's
// page table.
__device__ __noinline__ inline void find_keys(KeyRange* to, const Splits* of_rows, int kv_heads, int entries,
                                              int number) {
    int row = 0;
#pragma unroll 1
    for (;; ++row) {
        const int items = of_rows[row].count * kv_heads;
        if (number < items) break;
        number -= items;
    }
    const Splits splits = of_rows[row];
    KeyRange i;
    i.row = row, i.splits = splits.count;
    // Exact: the quotient is small, and a half is far from where a float would round it up or down.
    i.head = static_cast<int>(__fdividef(static_cast<float>(number) + 0.5f, static_cast<float>(splits.count)));
    i.split = number - i.head * splits.count;
    i.begin = splits.first(i.split);
    i.has_self = i.split + 1 == splits.count;
    i.end = i.has_self ? splits.end - 1 : splits.last(i.split);
    i.first_page = i.begin / kPageTokens;
    i.first_entry = i.first_page % entries;
    i.pages = i.end > i.begin ? (i.end - 1) / kPageTokens - i.first_page + 1 : 0;
    *to = i;
}

struct Attention {
    using Item = KeyRange;

    __device__ __forceinline__ static bool slides(const Common& r) { return r.c.field(FIELD_WINDOW) > 0; }
    __device__ __forceinline__ static Item item(const Common& r, int number) {
        // Warps may be items apart, so that each has a place of its own.
        KeyRange* to = &r.shared().keys[threadIdx.x / 32];
        const DeviceBatch& batch = r.c.batch;
        __syncwarp();  // all lanes have read the item before
        find_keys(to, r.memory.splits + (slides(r) ? r.c.plan.batch : 0), r.c.plan.geometry.kv_heads,
                  slides(r) ? batch.sliding_entries : batch.full_entries, number);
        __syncwarp();
        return *to;
    }
    __device__ __forceinline__ static int items(const Common& r) { return r.shared().attention_items[slides(r)]; }

    __device__ __forceinline__ static bool run(Producer& r) {
        const int count = items(r), kv_heads = r.c.plan.geometry.kv_heads;
        const int entries = slides(r) ? r.c.batch.sliding_entries : r.c.batch.full_entries;
        const int32_t* table = slides(r) ? r.c.batch.sliding_table : r.c.batch.full_table;
        const Pool& pool = r.c.batch.pools[r.c.field(FIELD_POOL)];
        constexpr int kHeadValues = kPageTokens * kHeadDim;
#pragma unroll 1
        for (int n = r.c.field(FIELD_DEALER); n < count; n += r.c.field(FIELD_DEALERS)) {
            const Item i = item(r, n);
            int32_t some = 0;  // page numbers, one a lane
#pragma unroll 1
            for (int p = 0; p < i.pages; ++p) {
                if (p % 32 == 0) {
                    int entry = i.first_entry + p + r.lane;
                    if (entry >= entries) entry -= entries;  // a ring: its pages are at least those of a window
                    some = p + r.lane < i.pages ? __ldg(table + i.row * entries + entry) : -1;
                }
                const int page = __shfl_sync(~0u, some, p % 32);
                if (page < 0 || page >= pool.pages) {
                    if (r.lane == 0) report(r.c, DeviceFault::kNoPage, -1, i.row, (i.first_page + p) * kPageTokens);
                    return false;
                }
                // Lanes 0 … 7 copy keys, 8 … 15 values.
                const int64_t head = (int64_t{page} * 2 + (r.lane >= kKeyRows)) * kv_heads + i.head;
                const bf16* from =
                    static_cast<const bf16*>(pool.data) + head * kHeadValues + r.lane % kKeyRows * (kRowBytes / 2);
                if (!r.fill_page(from, kTileRows, kRowBytes)) return false;
            }
        }
        return true;
    }

    // Queries of the KV head, then its new key and value.
    __device__ __forceinline__ static bool run(Loader& r) {
        if (!r.stages()) return true;
        const Geometry& g = r.c.plan.geometry;
        const int count = items(r), group = g.heads / g.kv_heads, width = (g.heads + 2 * g.kv_heads) * kHeadDim;
#pragma unroll 1
        for (int n = r.c.field(FIELD_DEALER); n < count; n += r.c.field(FIELD_DEALERS)) {
            const Item i = item(r, n);
            if (!r.wait_slices(r.lane == 0 ? i.head : -1)) return false;
            const bf16* from = r.exchanged<const bf16>(FIELD_INPUT) + i.row * width;
            // A lane has every 32nd piece of eight values; those beyond the last one are the last one again.
            auto piece = [&](int j) { return min(j * 32 + r.lane, (group + 2) * kPiecesOfHead - 1); };
            uint4 values[kQueryPieces];
            for (uint64_t begin = 0;;) {
                uint32_t largest = 0;
#pragma unroll
                for (int j = 0; j < kQueryPieces; ++j) {
                    const int n = piece(j), which = n / kPiecesOfHead;
                    const int head = which < group    ? i.head * group + which
                                     : which == group ? g.heads + i.head
                                                      : g.heads + g.kv_heads + i.head;
                    values[j] = load_fresh_words(from + head * kHeadDim + n % kPiecesOfHead * 8);
                }
#pragma unroll
                for (const uint4& each : values) largest = max(largest, largest_word(each));
                if (__all_sync(~0u, largest != kNothing)) break;
                begin = look_again(begin, r.c.field(FIELD_SLICE_WAIT) + i.head, r.c.field(FIELD_SLICE_NEED));
                if (begin == 0) return false;
            }
            const uint32_t stage = r.await_stage();
            if (stage == 0) return false;
#pragma unroll
            for (int j = 0; j < kQueryPieces; ++j) {
                const int n = piece(j), which = n / kPiecesOfHead;
                const int place = which < group ? which : which - group + kQueryHeads;
                store_shared(stage + place * kQueryStride + n % kPiecesOfHead * 16, values[j]);
            }
            r.fill_stage();
        }
        return true;
    }

    __device__ __forceinline__ static bool run(Consumer& r) {
        const int count = items(r);
#pragma unroll 1
        for (int n = r.c.field(FIELD_DEALER); n < count; n += r.c.field(FIELD_DEALERS)) {
            if (!attend(r, item(r, n))) return false;
        }
        return true;
    }

    __device__ __forceinline__ static bool run(Storer& r) {
        const int kv_heads = r.c.plan.geometry.kv_heads, dealer = r.c.field(FIELD_DEALER);
        const int dealers = r.c.field(FIELD_DEALERS), each = r.c.field(FIELD_ARRIVE_COUNT);
        if (r.warp == 0 && r.shared().live_rows != (1u << r.c.plan.batch) - 1) {  // for idle rows
#pragma unroll 1
            for (int n = dealer + dealers * r.lane; n < r.c.plan.batch * kv_heads; n += dealers * 32) {
                if (r.live(n / kv_heads)) continue;
                add_release(counter_at(r.c.words.counters, r.c.field(FIELD_ARRIVE) + n), kMaxSplits * each);
            }
        }
        const int count = items(r);
#pragma unroll 1
        for (int n = dealer; n < count; n += dealers) {
            if (!r.next_is_mine()) continue;
            const Item i = item(r, n);
            if (!r.take()) return false;
            const int missing = i.split + 1 == i.splits ? kMaxSplits - i.splits : 0;
            r.arrive(r.c.field(FIELD_ARRIVE) + i.row * kv_heads + i.head, each * (1 + missing));
            r.release();
        }
        return true;
    }

   private:
    __device__ __forceinline__ static bool attend(Consumer& r, const Item& i) {
        Shared& s = r.shared();
        const Geometry& geometry = r.c.plan.geometry;
        const int g = r.lane / 4, t = r.lane % 4, dims = r.warp * 16;
        const uint32_t stage = r.take_stage();
        if (stage == 0) return false;

        // Of this lane's query head g, alike in all four lanes and all warps.
        float largest = -INFINITY, total = 0;
        float out[4] = {};  // dims + g and dims + g + 8, of query heads 2t and 2t + 1
        if (i.has_self) {
            const float score = score_self(r, stage);
            if (r.lane == 0) s.self_score[r.self_turn][r.warp] = score * kScoreScale;
            const uint32_t value = stage + (kQueryHeads + 1) * kQueryStride;
            const float low = load_bf16(value, dims + g), high = load_bf16(value, dims + g + 8);
            if (!r.meet()) return false;
            largest = s.self_score[r.self_turn][g];
            r.self_turn ^= 1;
            total = 1;
            out[0] = out[1] = low;
            out[2] = out[3] = high;
        }
        if (i.pages > 0 && !score_page(r, stage, i, 0)) return false;
#pragma unroll 1
        for (int p = 0; p < i.pages; ++p) {
            // Ahead of this page's softmax, so that the other warps find the next page's scores ready.
            if (p + 1 < i.pages && !score_page(r, stage, i, p + 1)) return false;
            const int turn = r.scores_read % 2, round = r.scores_read / 2 % 2;
            const uint32_t page = r.take_page();
            if (page == 0 || !r.wait(&s.scores_full[turn], round)) return false;
            const float* scores = s.scores[turn];
            const uint32_t values = page + kKeyRows * kRowStride;
            // Positions of the item, counted from the page's first one.
            const int start = (i.first_page + p) * kPageTokens, begin = i.begin - start, end = i.end - start;
            if (begin > 0 || end < kPageTokens) clear_values(r, values + dims * 2, begin, end);

            float weight[16];  // of keys 16 t …
            float most = largest;
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(scores + g * kScoreStride + t * 20 + j);
                weight[j] = four.x, weight[j + 1] = four.y, weight[j + 2] = four.z, weight[j + 3] = four.w;
            }
            __syncwarp();
            if (r.lane == 0) barrier_arrive(&s.scores_empty[turn]);
            ++r.scores_read;
#pragma unroll
            for (int j = 0; j < 16; ++j) most = fmaxf(most, weight[j]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float shrink = fast_exp2(largest - most);
            float sum = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                weight[j] = fast_exp2(weight[j] - most);
                sum += weight[j];
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            total = total * shrink + sum;
            largest = most;

            const float shrink_0 = __shfl_sync(~0u, shrink, 8 * t), shrink_1 = __shfl_sync(~0u, shrink, 8 * t + 4);
            out[0] *= shrink_0, out[1] *= shrink_1, out[2] *= shrink_0, out[3] *= shrink_1;
            const uint32_t from =
                values + r.lane % 8 * kRowStride + (dims + r.lane / 8 % 2 * 8) * 2 + r.lane / 16 * kHeadDim * 2;
#pragma unroll
            for (int j = 0; j < 8; j += 2) {  // keys j and j + 1 of every 8
                multiply_add(out, load_matrices_transposed(from + j * kHeadDim * 2),
                             {{pack(weight[j], weight[j + 8]), pack(weight[j + 1], weight[j + 9])}});
            }
            r.release_page();
        }
        r.release_stage();

        const int group = geometry.heads / geometry.kv_heads;
        const int64_t place = ((i.row * geometry.kv_heads + i.head) * kMaxSplits + i.split) * group;
        float* partials = r.buffer<float>(FIELD_OUTPUT) + place * kHeadDim + dims + g;
        if (2 * t < group) {
            partials[2 * t * kHeadDim] = out[0];
            partials[2 * t * kHeadDim + 8] = out[2];
        }
        if (2 * t + 1 < group) {
            partials[(2 * t + 1) * kHeadDim] = out[1];
            partials[(2 * t + 1) * kHeadDim + 8] = out[3];
        }
        if (r.warp == 0 && t == 0 && g < group) {
            float* stats = r.buffer<float>(FIELD_OUTPUT_2) + (place + g) * 2;
            stats[0] = largest;
            stats[1] = total;
        }
        return r.hand_over_stored();
    }

    // Zeros for the values of keys that are not in [begin, end) of a page, in this warp's dims: what was never written
    // may be NaN, which no weight of 0 hides.
    __device__ __forceinline__ static void clear_values(const Consumer& r, uint32_t values, int begin, int end) {
#pragma unroll 1
        for (int key = r.lane; key < kPageTokens; key += 32) {
            if (key >= begin && key < end) continue;
            const uint32_t at = values + key / kKeysOfRow * kRowStride + key % kKeysOfRow * kHeadDim * 2;
            clear_shared(at);
            clear_shared(at + 16);
        }
        fence_shared_for_bulk_copies();  // the page's next content comes by one
        __syncwarp();
    }

    __device__ __forceinline__ static float load_bf16(uint32_t row, int column) {
        const uint32_t pair = load_shared(row + column / 2 * 4);
        return column % 2 == 0 ? low_half(pair) : high_half(pair);
    }

    // The product of query head `warp` with the new key, to the whole warp.
    __device__ __forceinline__ static float score_self(const Consumer& r, uint32_t stage) {
        const uint32_t query = stage + r.warp * kQueryStride + r.lane * 8;
        const uint32_t key = stage + kQueryHeads * kQueryStride + r.lane * 8;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t q = load_shared(query + 4 * i), k = load_shared(key + 4 * i);
            sum += low_half(q) * low_half(k) + high_half(q) * high_half(k);
        }
        return warp_sum(sum);
    }

    // The scores of page p of the item, by one half of the warps and the other in turn. `p` is the page that is taken
    // next, or the one after it.
    __device__ __forceinline__ static bool score_page(Consumer& r, uint32_t stage, const Item& i, int p) {
        Shared& s = r.shared();
        const int turn = r.scores_written % 2, round = r.scores_written / 2 % 2;
        const bool mine = r.warp / 4 == turn;
        ++r.scores_written;
        if (!mine) return true;
        const uint32_t page = r.see_page(p == 0 ? 0 : 1);
        if (page == 0 || !r.wait(&s.scores_empty[turn], round ^ 1)) return false;
        const int start = (i.first_page + p) * kPageTokens;
        store_scores(r, page, stage, s.scores[turn], i.begin - start, i.end - start);
        __syncwarp();
        if (r.lane == 0) barrier_arrive(&s.scores_full[turn]);
        return true;
    }

    // Scores of keys q = 2 (warp % 4) and q + 1 of every 8; minus infinity outside [begin, end).
    __device__ __forceinline__ static void store_scores(const Consumer& r, uint32_t page, uint32_t stage, float* scores,
                                                        int begin, int end) {
        const int g = r.lane / 4, t = r.lane % 4, q = r.warp % 4 * 2;
        const int group = r.c.plan.geometry.heads / r.c.plan.geometry.kv_heads;
        const uint32_t keys = page + r.lane % 8 * kRowStride + (q + r.lane / 8 % 2) * kHeadDim * 2 + r.lane / 16 * 16;
        const uint32_t query = stage + g * kQueryStride + t * 4;
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            FragmentB b{{0, 0}};
            if (g < group) b = {{load_shared(query + k * 32), load_shared(query + k * 32 + 16)}};
            multiply_add(sum[k % 2], load_matrices(keys + k * 32), b);
        }
        // Key 8 g + q lies at 20 (g / 2) + 8 (g % 2) + q: lanes that read 16 keys find them together.
        float* to = scores + 2 * t * kScoreStride + g / 2 * 20 + g % 2 * 8 + q;
        auto score = [&](int i, int key) {
            return key >= begin && key < end ? (sum[0][i] + sum[1][i]) * kScoreScale : -INFINITY;
        };
        const int key = 8 * g + q;
        *reinterpret_cast<float2*>(to) = {score(0, key), score(2, key + 1)};
        *reinterpret_cast<float2*>(to + kScoreStride) = {score(1, key), score(3, key + 1)};
    }
};

}  // namespace north_jax::megakernel::pipeline
