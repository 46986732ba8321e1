// Which experts a batch's rows go to: chosen by every team for itself, or through TOPK and ROUTES for the drained
// orders.
#pragma once

#include "csrc/megakernel/device/dot.cuh"
#include "csrc/megakernel/routing.h"

namespace north_jax::megakernel {

// One layer's routing, in shared memory.
struct Routing {
    int active;                          // experts that some row goes to
    int16_t expert[kMaxExperts];         // by rank, ascending
    uint32_t rows[kMaxExperts];          // by expert: bit b, row b goes there
    int16_t choice[kMaxRows][kMaxTopK];  // expert of each of a row's choices
    float weight[kMaxRows][kMaxTopK];

    // Which of row b's choices is `chosen`.
    __device__ int choice_of(int b, int chosen) const {
        int j = 0;
        while (choice[b][j] != chosen) ++j;
        return j;
    }
};

// The k largest of `logits`, the largest first and among equal ones the lowest, by one warp; the same as
// choose_experts.
__device__ inline void choose_by_warp(const Geometry& g, const float* logits, int lane, int16_t* choice,
                                      float* weight) {
    uint32_t taken = 0;  // bit i: this lane's logit lane + 32 i
    float first = 0, sum = 0;
    for (int j = 0; j < g.top_k; ++j) {
        float best = 0;
        int expert = 1 << 30;
        for (int i = 0; lane + 32 * i < g.experts; ++i) {
            if (taken >> i & 1) continue;
            const float x = logits[lane + 32 * i];
            if (expert == 1 << 30 || x > best) {
                best = x;
                expert = lane + 32 * i;
            }
        }
        for (int o = 16; o > 0; o /= 2) {
            const float x = __shfl_xor_sync(~0u, best, o);
            const int e = __shfl_xor_sync(~0u, expert, o);
            // NaN on either side compares false: then the lower expert is taken, by both lanes alike.
            const bool other = expert == 1 << 30 || (e != 1 << 30 && (x > best || (!(best > x) && e < expert)));
            if (other) {
                best = x;
                expert = e;
            }
        }
        if (expert % 32 == lane) taken |= 1u << expert / 32;
        if (j == 0) first = best;
        const float w = g.softmax_router ? expf(best - first) : sigmoid(best);
        sum += w;
        if (lane == 0) {
            choice[j] = static_cast<int16_t>(expert);
            weight[j] = w;
        }
    }
    if (lane == 0 && (g.softmax_router || g.renormalise)) {
        for (int j = 0; j < g.top_k; ++j) weight[j] /= sum;
    }
    __syncwarp();
}

// The routing of the task's batch from router logits; the whole team calls it.
__device__ inline void route(const Context& c, const Team& team, const float* logits, Routing* routing) {
    const Geometry& g = c.plan.geometry;
    team.sync();  // nobody reads the last one any more
    for (int e = team.thread; e < g.experts; e += team.threads) routing->rows[e] = 0;
    for (int b = c.batch_begin() + team.warp(); b < c.batch_end(); b += team.warps()) {
        if (c.live(b)) choose_by_warp(g, logits + b * g.experts, team.lane(), routing->choice[b], routing->weight[b]);
    }
    team.sync();
    for (int n = team.thread; n < c.field(FIELD_BATCH_COUNT) * g.top_k; n += team.threads) {
        const int b = c.batch_begin() + n / g.top_k;
        if (c.live(b)) atomicOr(&routing->rows[routing->choice[b][n % g.top_k]], 1u << b);
    }
    team.sync();
    if (team.warp() == 0) {
        int active = 0;
        for (int first = 0; first < g.experts; first += 32) {
            const int e = first + team.lane();
            const bool used = e < g.experts && routing->rows[e] != 0;
            const uint32_t ballot = __ballot_sync(~0u, used);
            if (used) routing->expert[active + __popc(ballot & ((1u << team.lane()) - 1))] = static_cast<int16_t>(e);
            active += __popc(ballot);
        }
        if (team.lane() == 0) routing->active = active;
    }
    team.sync();
}

__device__ __noinline__ inline bool router_topk(const Context& c, const Team& team, Routing* routing) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const float* logits = c.buffer<const float>(FIELD_INPUT);
    int32_t* out = c.buffer<int32_t>(FIELD_OUTPUT);
    for (int b = c.batch_begin() + team.warp(); b < c.batch_end(); b += team.warps()) {
        const bool live = c.live(b);
        if (live) choose_by_warp(g, logits + b * g.experts, team.lane(), routing->choice[b], routing->weight[b]);
        for (int j = team.lane(); j < g.top_k; j += 32) {
            out[(b * g.top_k + j) * 2] = live ? routing->choice[b][j] : -1;
            out[(b * g.top_k + j) * 2 + 1] = live ? __float_as_int(routing->weight[b][j]) : 0;
        }
    }
    arrive_task(c, team);
    return true;
}

__device__ __noinline__ inline bool route_finalize(const Context& c, const Team& team, int32_t* chosen) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int assignments = c.plan.batch * g.top_k;
    const int32_t* topk = c.buffer<const int32_t>(FIELD_INPUT);
    for (int n = team.thread; n < assignments; n += team.threads) chosen[n] = topk[2 * n];
    team.sync();
    if (team.leader()) sort_assignments(chosen, assignments, {c.buffer<int32_t>(FIELD_OUTPUT), g.experts});
    arrive_task(c, team);
    return true;
}

template <class T>
__device__ __noinline__ bool moe_gather(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const Routes<const int32_t> routes{c.buffer<const int32_t>(FIELD_INPUT_2), g.experts};
    const int end = min(c.field(FIELD_ROW_BEGIN) + c.field(FIELD_ROW_COUNT), routes.first(routes.active()));
    const T* in = c.buffer<const T>(FIELD_INPUT);
    T* out = c.buffer<T>(FIELD_OUTPUT);
    for (int n = c.field(FIELD_ROW_BEGIN); n < end; ++n) {
        const T* row = in + static_cast<int64_t>(routes.assignment(n) / g.top_k) * g.hidden;
        for (int i = team.thread; i < g.hidden; i += team.threads) out[static_cast<int64_t>(n) * g.hidden + i] = row[i];
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
