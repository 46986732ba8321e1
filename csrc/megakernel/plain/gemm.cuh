// Dense matrix products: a warp per pair of output rows, all rows of the batch.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/device/dot.cuh"

namespace north_jax::megakernel {

constexpr int kWidth = 8;  // rows of the batch that one pass over a weight row serves

// For every pair of weight rows (first(p), second(p)), p in [0, pairs), and every live row of the task's batch:
// store(p, row of the batch, sum with first, sum with second). input(b) is a row of `columns` values.
template <class T, class First, class Second, class Input, class Store>
__device__ void gemm_pairs(const Context& c, const Team& team, int pairs, int columns, First first, Second second,
                           Input input, Store store) {
    for (int p = team.warp(); p < pairs; p += team.warps()) {
        const T* w0 = first(p);
        const T* w1 = second(p);
        for (int b0 = c.batch_begin(); b0 < c.batch_end(); b0 += kWidth) {
            const int count = min(kWidth, c.batch_end() - b0);
            const PairSums sums =
                dot_pairs<T>(w0, w1, [&](int n) { return input(b0 + n); }, count, columns, team.lane());
            const int b = b0 + team.lane();
            if (team.lane() < count && c.live(b)) store(p, b, sums.first, sums.second);
        }
    }
}

// Consecutive rows of the task's weight, two by two, from column K_BEGIN on: store(row, b, sum).
template <class T, class Store>
__device__ void gemm_rows(const Context& c, const Team& team, int k_begin, int k_count, Store store) {
    const int begin = c.field(FIELD_ROW_BEGIN), count = c.field(FIELD_ROW_COUNT), columns = c.columns();
    const T* weight = c.weight<T>() + k_begin;
    const T* x = c.buffer<const T>(FIELD_INPUT) + k_begin;
    auto row = [&](int r) { return weight + static_cast<int64_t>(begin + min(r, count - 1)) * columns; };
    gemm_pairs<T>(
        c, team, (count + 1) / 2, k_count, [&](int p) { return row(2 * p); }, [&](int p) { return row(2 * p + 1); },
        [&](int b) { return x + static_cast<int64_t>(b) * columns; },
        [&](int p, int b, float s0, float s1) {
            store(begin + 2 * p, b, s0);
            if (2 * p + 1 < count) store(begin + 2 * p + 1, b, s1);
        });
}

template <class T>
__device__ __noinline__ bool router_gemm(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    float* out = c.buffer<float>(FIELD_OUTPUT);
    const int experts = c.plan.geometry.experts;
    gemm_rows<T>(c, team, 0, c.columns(), [&](int row, int b, float sum) { out[b * experts + row] = sum; });
    arrive_task(c, team);
    return true;
}

// O_PROJ and FFN_DOWN: onto part SPLIT of OUTPUT.
template <class T>
__device__ __noinline__ bool residual_gemm(const Context& c, const Team& team) {
    const int slice = c.field(FIELD_K_SLICE), k_begin = c.field(FIELD_K_BEGIN), k_count = c.field(FIELD_K_COUNT);
    if (!wait_slices(c, team, k_begin / slice, k_count / slice)) return false;
    const int hidden = c.plan.geometry.hidden;
    float* out = c.buffer<float>(FIELD_OUTPUT) + static_cast<int64_t>(c.field(FIELD_SPLIT)) * c.plan.batch * hidden;
    gemm_rows<T>(c, team, k_begin, k_count, [&](int row, int b, float sum) { out[b * hidden + row] = sum; });
    arrive_task(c, team);
    return true;
}

// Queries, keys and values of one layer; rotates neighbouring pairs (2i, 2i + 1) and writes keys and values to the
// pages.
template <class T>
__device__ __noinline__ bool qkv_proj(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int d = g.head_dim, columns = c.columns(), width = (g.heads + 2 * g.kv_heads) * d;
    const int begin = c.field(FIELD_ROW_BEGIN);
    const bool rope = c.field(FIELD_ROPE) != 0;
    T* out = c.buffer<T>(FIELD_OUTPUT);
    const T* weight = c.weight<T>();
    const T* x = c.buffer<const T>(FIELD_INPUT);
    auto row = [&](int r) { return weight + static_cast<int64_t>(begin + r) * columns; };
    gemm_pairs<T>(
        c, team, c.field(FIELD_ROW_COUNT) / 2, columns, [&](int p) { return row(2 * p); },
        [&](int p) { return row(2 * p + 1); }, [&](int b) { return x + static_cast<int64_t>(b) * columns; },
        [&](int p, int b, float s0, float s1) {
            const int r = begin + 2 * p, head = r / d, within = r % d, position = c.row(b)[ROW_POSITION];
            float even = rounded<T>(s0), odd = rounded<T>(s1);
            if (rope && head < g.heads + g.kv_heads) {
                float sine, cosine;
                sincosf(static_cast<float>(position) * c.plan.frequencies[within / 2], &sine, &cosine);
                const float e = even, o = odd;
                even = e * cosine - o * sine;
                odd = o * cosine + e * sine;
            }
            T* to = out + static_cast<int64_t>(b) * width + r;
            to[0] = from_float<T>(even);
            to[1] = from_float<T>(odd);
            if (head < g.heads) return;
            const bool value = head >= g.heads + g.kv_heads;
            T* page = c.keys<T>(b, position, (head - g.heads) % g.kv_heads);
            if (page == nullptr) return;
            page += (value ? g.kv_heads * kPageTokens * d : 0) + within;
            page[0] = to[0];
            page[1] = to[1];
        });
    arrive_task(c, team);
    return true;
}

template <class T>
__device__ __noinline__ bool ffn_upgate_act(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const int columns = c.columns(), units = c.plan.geometry.dense_width, begin = c.field(FIELD_ROW_BEGIN);
    T* out = c.buffer<T>(FIELD_OUTPUT);
    const T* weight = c.weight<T>();
    const T* x = c.buffer<const T>(FIELD_INPUT);
    auto row = [&](int r) { return weight + static_cast<int64_t>(r) * columns; };
    gemm_pairs<T>(
        c, team, c.field(FIELD_ROW_COUNT), columns, [&](int p) { return row(begin + p); },
        [&](int p) { return row(units + begin + p); }, [&](int b) { return x + static_cast<int64_t>(b) * columns; },
        [&](int p, int b, float gate, float up) {
            out[static_cast<int64_t>(b) * units + begin + p] = from_float<T>(swiglu(gate, up));
        });
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
