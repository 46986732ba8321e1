// The experts' products: dealt tile by tile from a routing of the team's own, or claimed by way of ROUTES.
#pragma once

#include "csrc/megakernel/division.h"
#include "csrc/megakernel/plain/gemm.cuh"
#include "csrc/megakernel/plain/routing.cuh"

namespace north_jax::megakernel {

// Gate and up rows of one hidden unit of an expert, and `count` input rows, given by number: store(number, silu · up).
template <class T, class Input, class Store>
__device__ void expert_unit(const Context& c, const Team& team, int expert, int unit, int count, Input input,
                            Store store) {
    const int columns = c.columns(), units = c.plan.geometry.expert_width;
    const T* gate = c.weight<T>() + (static_cast<int64_t>(expert) * 2 * units + unit) * columns;
    const T* up = gate + static_cast<int64_t>(units) * columns;
    for (int first = 0; first < count; first += kWidth) {
        const int some = min(kWidth, count - first);
        const PairSums sums =
            dot_pairs<T>(gate, up, [&](int n) { return input(first + n); }, some, columns, team.lane());
        if (team.lane() < some) store(first + team.lane(), swiglu(sums.first, sums.second));
    }
}

// The arrivals of ranks that no expert has, at DEALER rank mod DEALERS.
__device__ inline void arrive_for_absent(const Context& c, const Team& team, int active, int tiles) {
    const Geometry& g = c.plan.geometry;
    const int ranks = min(g.experts, c.field(FIELD_BATCH_COUNT) * g.top_k), dealers = c.field(FIELD_DEALERS);
    for (int r = c.field(FIELD_DEALER) + dealers * team.thread; r < ranks; r += dealers * team.threads) {
        if (r < active) continue;
        add_release(counter_at(c.words.counters, c.field(FIELD_ARRIVE) + r), tiles * c.field(FIELD_ARRIVE_COUNT));
    }
}

// The n-th set bit of `mask`.
__device__ inline int nth_bit(uint32_t mask, int n) {
    for (; n > 0; --n) mask &= mask - 1;
    return __ffs(mask) - 1;
}

template <class T>
__device__ __noinline__ bool moe_upgate_act(const Context& c, const Team& team, Routing* routing) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    route(c, team, c.buffer<const float>(FIELD_INPUT_2), routing);
    const int units = c.field(FIELD_ROW_COUNT), tiles = g.expert_width / units;
    const Dealt items = dealt(routing->active * tiles, c.field(FIELD_DEALER), c.field(FIELD_DEALERS),
                              c.field(FIELD_ROUND_BEGIN), c.field(FIELD_ROUND_END));
    const int count = items.first < items.end ? ceil_div(items.end - items.first, items.step) : 0;
    const T* in = c.buffer<const T>(FIELD_INPUT);
    T* out = c.buffer<T>(FIELD_OUTPUT);
    for (int n = team.warp(); n < count * units; n += team.warps()) {
        const ExpertItem item = expert_item(tiles, items.first + n / units * items.step);
        const int expert = routing->expert[item.rank], unit = item.tile * units + n % units;
        const uint32_t rows = routing->rows[expert];
        expert_unit<T>(
            c, team, expert, unit, __popc(rows),
            [&](int i) { return in + static_cast<int64_t>(nth_bit(rows, i)) * g.hidden; },
            [&](int i, float value) {
                const int b = nth_bit(rows, i), j = routing->choice_of(b, expert);
                out[static_cast<int64_t>(b * g.top_k + j) * g.expert_width + unit] =
                    from_float<T>(value * routing->weight[b][j]);
            });
    }
    team.sync();
    for (int n = team.thread; n < count; n += team.threads) {
        const ExpertItem item = expert_item(tiles, items.first + n * items.step);
        add_release(counter_at(c.words.counters, c.field(FIELD_ARRIVE) + item.rank), c.field(FIELD_ARRIVE_COUNT));
    }
    if (c.field(FIELD_ROUND_BEGIN) == 0) arrive_for_absent(c, team, routing->active, tiles);
    return true;
}

template <class T>
__device__ __noinline__ bool moe_down(const Context& c, const Team& team, Routing* routing) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    route(c, team, c.buffer<const float>(FIELD_INPUT_2), routing);
    if (!wait_slices(c, team, 0, routing->active)) return false;
    const int begin = c.field(FIELD_ROW_BEGIN), count = c.field(FIELD_ROW_COUNT), columns = c.columns();
    const T* in = c.buffer<const T>(FIELD_INPUT);
    float* out = c.buffer<float>(FIELD_OUTPUT);
    for (int p = team.warp(); p < (count + 1) / 2; p += team.warps()) {
        const int first = begin + 2 * p, second = begin + min(2 * p + 1, count - 1);
        for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
            if (!c.live(b)) continue;
            PairSums total{};
            for (int r = 0; r < routing->active; ++r) {
                const int expert = routing->expert[r];
                if (!(routing->rows[expert] >> b & 1)) continue;
                const int64_t hidden = static_cast<int64_t>(b * g.top_k + routing->choice_of(b, expert));
                const T* x = in + hidden * columns;
                const T* weight = c.weight<T>() + static_cast<int64_t>(expert) * g.hidden * columns;
                const PairSums sums =
                    dot_pair<1>(weight + static_cast<int64_t>(first) * columns,
                                weight + static_cast<int64_t>(second) * columns, &x, columns, team.lane());
                total.first += sums.first;
                total.second += sums.second;
            }
            if (team.lane() == 0) {
                out[b * g.hidden + first] = total.first;
                if (second != first) out[b * g.hidden + second] = total.second;
            }
        }
    }
    arrive_task(c, team);
    return true;
}

template <class T>
__device__ __noinline__ bool moe_upgate_act_drain(const Context& c, const Team& team, int* claimed) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const Routes<const int32_t> routes{c.buffer<const int32_t>(FIELD_INPUT_2), g.experts};
    const int units = c.field(FIELD_ROW_COUNT), tiles = g.expert_width / units, items = routes.active() * tiles;
    const T* in = c.buffer<const T>(FIELD_INPUT);
    T* out = c.buffer<T>(FIELD_OUTPUT);
    arrive_for_absent(c, team, routes.active(), tiles);
    for (int n = claim(c, team, claimed); n < items; n = claim(c, team, claimed)) {
        const ExpertItem item = expert_item(tiles, n);
        const int first = routes.first(item.rank), count = routes.first(item.rank + 1) - first;
        for (int u = team.warp(); u < units; u += team.warps()) {
            const int unit = item.tile * units + u;
            expert_unit<T>(
                c, team, routes.expert(item.rank), unit, count,
                [&](int i) { return in + static_cast<int64_t>(first + i) * g.hidden; },
                [&](int i, float value) {
                    out[static_cast<int64_t>(first + i) * g.expert_width + unit] = from_float<T>(value);
                });
        }
        team.sync();
        if (team.leader()) {
            add_release(counter_at(c.words.counters, c.field(FIELD_ARRIVE) + item.rank), c.field(FIELD_ARRIVE_COUNT));
        }
    }
    return true;
}

template <class T>
__device__ __noinline__ bool moe_down_drain(const Context& c, const Team& team, int* claimed) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const Routes<const int32_t> routes{c.buffer<const int32_t>(FIELD_INPUT_2), g.experts};
    const int rows = c.field(FIELD_ROW_COUNT), tiles = ceil_div(g.hidden, rows), items = routes.active() * tiles;
    const int columns = c.columns();
    const T* in = c.buffer<const T>(FIELD_INPUT);
    float* out = c.buffer<float>(FIELD_OUTPUT);
    for (int n = claim(c, team, claimed); n < items; n = claim(c, team, claimed)) {
        const ExpertItem item = expert_item(tiles, n);
        if (!wait_slices(c, team, item.rank, 1)) return false;
        const T* weight = c.weight<T>() + static_cast<int64_t>(routes.expert(item.rank)) * g.hidden * columns;
        const int end = min(g.hidden, (item.tile + 1) * rows);
        for (int row = item.tile * rows + 2 * team.warp(); row < end; row += 2 * team.warps()) {
            const int second = min(row + 1, end - 1);
            for (int place = routes.first(item.rank); place < routes.first(item.rank + 1); ++place) {
                const T* x = in + static_cast<int64_t>(place) * columns;
                const PairSums sums =
                    dot_pair<1>(weight + static_cast<int64_t>(row) * columns,
                                weight + static_cast<int64_t>(second) * columns, &x, columns, team.lane());
                if (team.lane() == 0) {
                    float* to = out + static_cast<int64_t>(place) * g.hidden;
                    to[row] = sums.first;
                    if (second != row) to[second] = sums.second;
                }
            }
        }
    }
    arrive_task(c, team);
    return true;
}

__device__ __noinline__ inline bool moe_combine(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int b = c.batch_begin(), begin = c.field(FIELD_ROW_BEGIN);
    if (c.live(b)) {
        const float* in = c.buffer<const float>(FIELD_INPUT);
        const int32_t* topk = c.buffer<const int32_t>(FIELD_INPUT_2);
        const Routes<const int32_t> routes{c.buffer<const int32_t>(FIELD_INPUT_3), g.experts};
        float* out = c.buffer<float>(FIELD_OUTPUT);
        const int assignments = routes.first(routes.active());
        for (int i = team.thread; i < c.field(FIELD_ROW_COUNT); i += team.threads) {
            float sum = 0;
            for (int place = 0; place < assignments; ++place) {  // sorted by expert
                const int n = routes.assignment(place);
                if (n / g.top_k != b) continue;
                sum += __int_as_float(topk[2 * n + 1]) * in[static_cast<int64_t>(place) * g.hidden + begin + i];
            }
            out[b * g.hidden + begin + i] = sum;
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
