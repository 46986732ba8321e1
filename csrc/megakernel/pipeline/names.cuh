// What people call the parts of a block: for reports of tools, on the host.
#pragma once

#include <iterator>
#include <string>
#include <utility>

#include "csrc/megakernel/pipeline/shared.cuh"

namespace north_jax::megakernel::pipeline {

inline const char* role_name(int warp) { return kRoleNames[static_cast<int>(role_of_warp(warp))]; }

// The name of a barrier of `s`; "" for any other address.
inline std::string barrier_name(const Shared& s, const uint64_t* barrier) {
    const std::pair<const char*, std::pair<const uint64_t*, int>> arrays[] = {
        {"page_full", {s.page_full, kMaxPages}},
        {"page_empty", {s.page_empty, kMaxPages}},
        {"stage_full", {s.stage_full, kStages}},
        {"stage_empty", {s.stage_empty, kStages}},
        {"input_full", {&s.input_full, 1}},
        {"input_empty", {&s.input_empty, 1}},
        {"sums_full", {s.sums_full, kMaxSums}},
        {"sums_empty", {s.sums_empty, kMaxSums}},
        {"routing_full", {s.routing_full, 2}},
        {"routing_empty", {s.routing_empty, 2}},
        {"consumers_met", {&s.consumers_met, 1}},
        {"scores_full", {s.scores_full, 2}},
        {"scores_empty", {s.scores_empty, 2}},
        {"head_stored", {&s.head_stored, 1}},
        {"staged", {&s.staged, 1}},
        {"step_begins", {&s.step_begins, 1}},
        {"tasks_full", {s.tasks_full, kTaskSlots}},
        {"tasks_empty", {s.tasks_empty, kTaskSlots}},
    };
    for (const auto& [name, array] : arrays) {
        const auto [first, count] = array;
        if (barrier >= first && barrier < first + count) {
            return std::string(name) + "[" + std::to_string(barrier - first) + "]";
        }
    }
    return "";
}

}  // namespace north_jax::megakernel::pipeline
