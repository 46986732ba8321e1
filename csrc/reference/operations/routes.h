// Routing: ROUTER_TOPK, ROUTE_FINALIZE, MOE_GATHER, MOE_COMBINE, and what tasks read of it.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "csrc/megakernel/routing.h"
#include "csrc/reference/operations/rows.h"

namespace north_jax::megakernel {

// A batch's routing as a task knows it.
struct Routing {
    std::vector<int32_t> rows;    // live rows that were routed
    std::vector<float> weights;   // [B · k], by assignment
    std::vector<int32_t> sorted;  // the contents of ROUTES
};

// The routing that the router's logits (INPUT_2) mean.
inline Routing choose(Context& context, const Task& task) {
    const Geometry& g = context.geometry;
    const int32_t assignments = context.lists.batch * g.top_k;
    const float* logits = context.buffer<const float>(task, FIELD_INPUT_2);
    std::vector<int32_t> chosen(assignments, -1);
    Routing routing{context.live_rows(task), std::vector<float>(assignments),
                    std::vector<int32_t>(routes_size(g.experts, assignments))};
    for (const int32_t row : routing.rows) {
        choose_experts(logits + int64_t{row} * g.experts, g.experts, g.top_k, g.softmax_router, g.renormalise,
                       &chosen[row * g.top_k], &routing.weights[row * g.top_k]);
    }
    sort_assignments(chosen.data(), assignments, {routing.sorted.data(), g.experts});
    return routing;
}

// A copy of ROUTES that is safe to walk: what was read too early is an error, not an address.
inline std::vector<int32_t> read_routes(Context& context, const Task& task, Field field) {
    const int32_t experts = context.geometry.experts, assignments = context.lists.batch * context.geometry.top_k;
    const int32_t* data = context.buffer<const int32_t>(task, field);
    std::vector<int32_t> copy(data, data + routes_size(experts, assignments));
    const Routes<const int32_t> routes{copy.data(), experts};
    const int32_t active = routes.active();
    bool sound = active >= 0 && active <= experts && routes.first(0) == 0;
    for (int32_t rank = 0; sound && rank < active; ++rank) {
        sound = routes.expert(rank) >= 0 && routes.expert(rank) < experts &&
                routes.first(rank) < routes.first(rank + 1) && routes.first(rank + 1) <= assignments;
    }
    for (int32_t i = 0; sound && i < routes.first(active); ++i) {
        sound = routes.assignment(i) >= 0 && routes.assignment(i) < assignments;
    }
    if (!sound) context.fail(task, "ROUTES holds no routes, it was read before it was written");
    return copy;
}

// One entry of TOPK.
struct Choice {
    int32_t expert;  // -1 in an idle row
    int32_t weight_bits;
};

inline Choice read_choice(Context& context, const Task& task, Field field, int64_t assignment) {
    const int32_t* entry = context.buffer<const int32_t>(task, field) + 2 * assignment;
    if (entry[0] < -1 || entry[0] >= context.geometry.experts) {
        context.fail(task, "TOPK holds no expert, it was read before it was written");
    }
    return {entry[0], entry[1]};
}

inline void router_topk(Context& context, const Task& task) {
    const Geometry& g = context.geometry;
    std::vector<int32_t> chosen(g.top_k);
    std::vector<float> weights(g.top_k);
    const float* logits = context.buffer<const float>(task, FIELD_INPUT);
    int32_t* out = context.buffer<int32_t>(task, FIELD_OUTPUT);
    for (int32_t i = 0; i < task[FIELD_BATCH_COUNT]; ++i) {
        const int32_t row = task[FIELD_BATCH_BEGIN] + i;
        const bool live = context.live(row);
        if (live) {
            choose_experts(logits + int64_t{row} * g.experts, g.experts, g.top_k, g.softmax_router, g.renormalise,
                           chosen.data(), weights.data());
        }
        for (int32_t j = 0; j < g.top_k; ++j) {
            int32_t* entry = out + (int64_t{row} * g.top_k + j) * 2;
            entry[0] = live ? chosen[j] : -1;
            entry[1] = live ? std::bit_cast<int32_t>(weights[j]) : 0;
        }
    }
}

inline void route_finalize(Context& context, const Task& task) {
    const int32_t assignments = context.lists.batch * context.geometry.top_k;
    std::vector<int32_t> chosen(assignments);
    for (int32_t i = 0; i < assignments; ++i) chosen[i] = read_choice(context, task, FIELD_INPUT, i).expert;
    sort_assignments(chosen.data(), assignments,
                     {context.buffer<int32_t>(task, FIELD_OUTPUT), context.geometry.experts});
}

template <typename T>
void moe_gather(Context& context, const Task& task) {
    const Geometry& g = context.geometry;
    const std::vector<int32_t> copy = read_routes(context, task, FIELD_INPUT_2);
    const Routes<const int32_t> routes{copy.data(), g.experts};
    const T* in = context.buffer<const T>(task, FIELD_INPUT);
    T* out = context.buffer<T>(task, FIELD_OUTPUT);
    const int32_t end = smaller(routes.first(routes.active()), task[FIELD_ROW_BEGIN] + task[FIELD_ROW_COUNT]);
    for (int32_t place = task[FIELD_ROW_BEGIN]; place < end; ++place) {
        const int64_t row = routes.assignment(place) / g.top_k;
        for (int64_t i = 0; i < g.hidden; ++i) out[place * int64_t{g.hidden} + i] = in[row * g.hidden + i];
    }
}

inline void moe_combine(Context& context, const Task& task) {
    const Geometry& g = context.geometry;
    const std::vector<int32_t> copy = read_routes(context, task, FIELD_INPUT_3);
    const Routes<const int32_t> routes{copy.data(), g.experts};
    const float* in = context.buffer<const float>(task, FIELD_INPUT);
    float* out = context.buffer<float>(task, FIELD_OUTPUT);
    std::vector<float> sums(task[FIELD_ROW_COUNT]);
    for (const int32_t row : context.live_rows(task)) {
        sums.assign(sums.size(), 0.0f);
        for (int32_t place = 0; place < routes.first(routes.active()); ++place) {  // experts ascend
            const int32_t assignment = routes.assignment(place);
            if (assignment / g.top_k != row) continue;
            const float weight =
                std::bit_cast<float>(read_choice(context, task, FIELD_INPUT_2, assignment).weight_bits);
            const float* from = in + int64_t{place} * g.hidden + task[FIELD_ROW_BEGIN];
            for (size_t i = 0; i < sums.size(); ++i) sums[i] += weight * from[i];
        }
        float* to = out + int64_t{row} * g.hidden + task[FIELD_ROW_BEGIN];
        for (size_t i = 0; i < sums.size(); ++i) to[i] = sums[i];
    }
}

}  // namespace north_jax::megakernel
