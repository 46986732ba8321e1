// Checks one descriptor.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

// "", or what is wrong, without the task's name. The model and the layout were found sound before.
std::string validate_task(const Model& model, const TaskLists& lists, int32_t task);

}  // namespace north_jax::megakernel
