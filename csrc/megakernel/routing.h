// The router's choice of experts, and a batch's assignments sorted by expert, as C++ and CUDA compute them alike.
//
// The same as `route` in north_jax/moe/layer.py and `routes` in north_jax/megakernel/division.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "csrc/host_device.h"
#include "csrc/megakernel/abi.h"

namespace north_jax::megakernel {

HOST_DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Chooses the k largest of `logits`, the largest first and among equal ones the lowest, and their weights. NaN is
// larger than any number, as for jax.lax.top_k. Always k different experts.
HOST_DEVICE inline void choose_experts(const float* logits, int32_t experts, int32_t k, bool softmax, bool renormalise,
                                       int32_t* chosen, float* weights) {
    for (int32_t j = 0; j < k; ++j) {
        int32_t best = -1;
        for (int32_t e = 0; e < experts; ++e) {
            bool taken = false;
            for (int32_t i = 0; i < j; ++i) taken |= chosen[i] == e;
            if (taken) continue;
            if (best < 0 || (logits[best] == logits[best] && !(logits[e] <= logits[best]))) best = e;
        }
        chosen[j] = best;
        weights[j] = softmax ? expf(logits[best] - logits[chosen[0]]) : sigmoid(logits[best]);
    }
    if (!softmax && !renormalise) return;
    float sum = 0;
    for (int32_t j = 0; j < k; ++j) sum += weights[j];
    for (int32_t j = 0; j < k; ++j) weights[j] /= sum;
}

HOST_DEVICE inline int32_t routes_size(int32_t experts, int32_t assignments) {
    return 1 + experts + experts + 1 + assignments;
}

// The ROUTES buffer (division.routes_size) of a model with `experts` experts.
template <typename Int>  // int32_t or const int32_t
struct Routes {
    Int* data;
    int32_t experts;

    HOST_DEVICE Int& active() const { return data[0]; }
    HOST_DEVICE Int& expert(int32_t rank) const { return data[1 + rank]; }
    HOST_DEVICE Int& first(int32_t rank) const { return data[1 + experts + rank]; }  // up to active, with it
    HOST_DEVICE Int& assignment(int32_t place) const { return data[2 + 2 * experts + place]; }
};

// Sorts the assignments by expert and then by number; chosen[i] is the expert of assignment i, -1 for none.
HOST_DEVICE inline void sort_assignments(const int32_t* chosen, int32_t assignments, Routes<int32_t> routes) {
    int32_t active = 0, place = 0;
    for (int32_t e = 0; e < routes.experts; ++e) {
        const int32_t first = place;
        for (int32_t i = 0; i < assignments; ++i) {
            if (chosen[i] == e) routes.assignment(place++) = i;
        }
        if (place == first) continue;
        routes.expert(active) = e;
        routes.first(active++) = first;
    }
    routes.first(active) = place;
    routes.active() = active;
}

}  // namespace north_jax::megakernel
