// Checks before a quantum: nothing in a model, its task lists or a batch's rows may lead the executor astray, or a
// kernel.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

// "", or what is wrong with a model or with task lists for it.
std::string validate_lists(const Model& model, const TaskLists& lists);

// The same of a batch in memory of the host, for lists that were found sound. What lies in buffers, page tables and the
// workspace is checked where it is read.
std::string validate_batch(const Model& model, const TaskLists& lists, const Batch& batch, int32_t steps);

// Counters that a task arrives at; those of dynamic tasks depend on lengths or routing. The descriptor may hold
// anything.
struct CounterRange {
    int64_t first;
    int64_t count;
    bool dynamic;
};
CounterRange arrivals_of(const Geometry& geometry, const int32_t* fields);

// Ranges of the vocabulary in RANGE_BEST.
int32_t ranges_of(const TaskLists& lists);

// Bytes of one plane of a buffer; 0 for a model that has none.
int64_t plane_bytes_of(const Model& model, const TaskLists& lists, int32_t buffer);

}  // namespace north_jax::megakernel
