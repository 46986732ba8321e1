// Faults in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

class Context;

// A task that cannot go on: its number and what it waits for.
struct BlockedWait {
    int32_t task;
    int32_t counter;  // -1: room in the token ring
    int32_t need;
};

// "task 17 (O_PROJ of layer 2 on SM 3)". Any number is described, also one that does not exist.
std::string describe(const TaskLists& lists, int32_t task);

// "counter 4 (layer 2 router)"
std::string describe_counter(const TaskLists& lists, int32_t counter);

// Who waits for what, and who has not arrived. Only while no SM runs.
std::string describe_deadlock(const Context& context, const std::vector<BlockedWait>& blocked, int32_t step);

}  // namespace north_jax::megakernel
