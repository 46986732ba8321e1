// What the lanes of an SM do with a task. Nothing here waits, except as `slice` says, or knows of other tasks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/reference/context.h"

namespace north_jax::megakernel {

// One execution of a MATRIX task: a sequence of items (the whole product, a K slice, an expert, a split of a row). Each
// is loaded and then consumed, in order; the loads may be ahead of the consumption, and of earlier tasks' stores.
class MatrixTask {
   public:
    MatrixTask(Context& context, const Task& task) : context_(context), task_(task) {}
    virtual ~MatrixTask() = default;

    // Reads what decides the items: lengths or routing. A dealt task gets the numbers of its own items, one that claims
    // gets {0, number of all items, 1}.
    virtual Dealt open() = 0;

    // An item's place among the counters from SLICE_WAIT on.
    virtual int32_t slice(int32_t) const { return 0; }

    // Copies what the item needs of the activations in global memory.
    virtual void load(int32_t item, std::vector<float>& staged) = 0;

    // Computes. Only LOCAL buffers, pages of earlier steps and weights are read besides what was staged.
    virtual void consume(int32_t item, const std::vector<float>& staged) = 0;

    // After the last item: what is not written item by item, and arrivals.
    virtual void finish() = 0;

   protected:
    Context& context_;
    const Task task_;
};

std::unique_ptr<MatrixTask> make_matrix_task(Context& context, const Task& task);

// Runs a task of the other lanes, without its wait and its arrival. SAMPLE_DRAW and END_STEP are not among them.
void run_task(Context& context, const Task& task);

// SAMPLE_DRAW for one row; false, without effect, where the token ring is full.
bool draw_row(Context& context, const Task& task, int32_t row);

}  // namespace north_jax::megakernel
