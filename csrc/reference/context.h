// What all SMs of a running quantum share: the plan, the batch, counters, queues, and where a step stands.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/megakernel/division.h"
#include "csrc/reference/counters.h"
#include "csrc/reference/executor.h"

namespace north_jax::megakernel {

// Ends the quantum; its message goes to the caller.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One execution of a task.
struct Task {
    const int32_t* fields;
    int32_t number;
    int32_t sm;
    int32_t step;

    int32_t operator[](Field field) const { return fields[field]; }
    const Operation& operation() const { return kOperations[fields[FIELD_OPCODE]]; }
    bool reads(Field field) const { return operation().fields >> field & 1; }
};

inline bool is_local(int32_t buffer) { return buffer == BUFFER_LOCAL_RESIDUAL || buffer == BUFFER_LOCAL_HIDDEN; }

class Context {
   public:
    Context(const Model& model, const TaskLists& lists, const Batch& batch, Channel& channel, uint32_t quantum,
            int32_t steps, const ExecutorOptions& options);

    [[noreturn]] void fail(const Task& task, const std::string& what) const;

    // A buffer of the step, in the plane of `layer`; the task's own where it is left out.
    template <typename U>
    U* buffer(const Task& task, Field field, int32_t layer) const {
        const BufferPlace& place = lists.buffers[task[field]];
        int64_t plane = layer % place.planes;
        if (is_local(task[field])) plane += int64_t{task.sm} * place.planes;
        return reinterpret_cast<U*>(batch.workspace + place.offset + plane * place.plane_bytes);
    }
    template <typename U>
    U* buffer(const Task& task, Field field) const {
        return buffer<U>(task, field, task[FIELD_LAYER]);
    }

    // Row `index` of the task's weight matrix.
    template <typename T>
    const T* weight(const Task& task, int64_t index) const {
        const WeightMatrix& matrix = model.weights[task[FIELD_WEIGHT]];
        return static_cast<const T*>(matrix.data) + index * matrix.columns;
    }

    // Keys (part 0) or values (part 1) of one head for the positions of a page from `position` on.
    template <typename T>
    T* page(const Task& task, int32_t row, int32_t position, int32_t part, int32_t head) const {
        const int64_t number = page_number(task, row, position);
        const int64_t line = ((number * 2 + part) * geometry.kv_heads + head) * kPageTokens + position % kPageTokens;
        return static_cast<T*>(batch.pools[task[FIELD_POOL]].data) + line * geometry.head_dim;
    }

    int32_t& parameter(int32_t row, Row which) const { return batch.rows[row * kRowFields + which]; }
    bool live(int32_t row) const { return is_live(batch.rows, row); }

    // The task's rows of the batch that are not idle.
    std::vector<int32_t> live_rows(const Task& task) const;

    // Whether any row's parameters ask for the task; always for one that is not optional.
    bool is_asked_for(const Task& task) const;

    void arrive(const Task& task, int32_t counter, int64_t count);
    void arrive(const Task& task) { arrive(task, task[FIELD_ARRIVE], task[FIELD_ARRIVE_COUNT]); }

    int32_t claim(const Task& task) {
        return static_cast<int32_t>(claims_[task[FIELD_QUEUE]].fetch_add(1, std::memory_order_relaxed));
    }

    // A task begins its last turn of this step: before its last arrival, behind which END_STEP may look. Orders
    // nothing: END_STEP must wait by counters.
    void complete(const Task& task) { completed_[task.number].store(task.step + 1, std::memory_order_relaxed); }
    bool is_complete(int32_t task, int32_t step) const {
        return completed_[task].load(std::memory_order_relaxed) > step;
    }

    // END_STEP: checks that the step is over and decides whether another one follows.
    void end_step(const Task& task);

    // The step that may run, -1 for no further one.
    int32_t decided() const { return decided_.load(std::memory_order_acquire); }

    // Writes to the token ring; false where the host has to take entries first.
    bool publish(int32_t step, int32_t row, int32_t token, Finish finish);

    // Whether the host asked for the end of this quantum, or of a row in it.
    bool stopped() const;
    bool cancelled(int32_t row) const;

    const Model& model;
    const Geometry& geometry;
    const TaskLists& lists;
    const Batch& batch;
    const ExecutorOptions& options;
    Counters counters;

   private:
    int32_t page_number(const Task& task, int32_t row, int32_t position) const;
    bool any_live() const;
    void poison() const;

    Channel& channel_;
    const uint32_t quantum_;
    const int32_t steps_;
    std::vector<std::atomic<uint32_t>> claims_;
    std::vector<std::atomic<int32_t>> completed_;  // by task: the number of steps that it completed
    std::atomic<int32_t> decided_;
    std::mutex ring_;
};

}  // namespace north_jax::megakernel
