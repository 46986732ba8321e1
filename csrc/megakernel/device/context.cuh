// What an operation sees of the call, the step and its own task.
#pragma once

#include <cuda_bf16.h>

#include "csrc/megakernel/device/memory.cuh"
#include "csrc/megakernel/device/team.cuh"
#include "csrc/megakernel/launch.h"

namespace north_jax::megakernel {

using bf16 = __nv_bfloat16;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
// x as a value of type T would hold it.
template <class T>
__device__ float rounded(float x) {
    return to_float(from_float<T>(x));
}

struct Context {
    const DevicePlan& plan;
    const DeviceWords& words;
    const DeviceBatch& batch;
    Channel* channel;
    DeviceFault* fault;
    Quantum quantum;
    int sm;
    int role = 0;  // of the pipelined kernel's warps
    int step = 0;
    int task = -1;                    // row in plan.tasks
    const int32_t* fields = nullptr;  // of the task

    __device__ int field(Field f) const { return fields[f]; }
    __device__ int* row(int b) const { return batch.rows + b * kRowFields; }
    __device__ bool live(int b) const { return row(b)[ROW_REMAINING] > 0; }
    __device__ int batch_begin() const { return field(FIELD_BATCH_BEGIN); }
    __device__ int batch_end() const { return field(FIELD_BATCH_BEGIN) + field(FIELD_BATCH_COUNT); }

    // The buffer that a field names, in the plane of a layer.
    template <class E>
    __device__ E* buffer(Field f, int layer) const {
        const BufferPlace& place = plan.buffers[field(f)];
        const bool local = field(f) == BUFFER_LOCAL_RESIDUAL || field(f) == BUFFER_LOCAL_HIDDEN;
        const int64_t plane = layer % place.planes + (local ? static_cast<int64_t>(sm) * place.planes : 0);
        return reinterpret_cast<E*>(batch.workspace + place.offset + plane * place.plane_bytes);
    }
    template <class E>
    __device__ E* buffer(Field f) const {
        return buffer<E>(f, field(FIELD_LAYER));
    }
    template <class T>
    __device__ const T* weight() const {
        return static_cast<const T*>(plan.weights[field(FIELD_WEIGHT)].data);
    }
    __device__ int64_t weight_rows() const { return plan.weights[field(FIELD_WEIGHT)].rows; }
    __device__ int columns() const { return static_cast<int>(plan.weights[field(FIELD_WEIGHT)].columns); }

    // Where the keys of a head and position of a row lie in the task's pool; the values follow kv_heads pages of a head
    // later. Null where the row has no page there.
    template <class T>
    __device__ T* keys(int b, int position, int head) const {
        const bool sliding = field(FIELD_WINDOW) > 0;
        const int entries = sliding ? batch.sliding_entries : batch.full_entries;
        const int32_t* table = (sliding ? batch.sliding_table : batch.full_table) + static_cast<int64_t>(b) * entries;
        const Pool& pool = batch.pools[field(FIELD_POOL)];
        const int page = table[position / kPageTokens % entries];
        if (page < 0 || page >= pool.pages) return nullptr;
        const Geometry& g = plan.geometry;
        const int64_t head_row = (static_cast<int64_t>(page) * 2 * g.kv_heads + head) * kPageTokens;
        return static_cast<T*>(pool.data) + (head_row + position % kPageTokens) * g.head_dim;
    }
};

// Who waits, for reports; and how long.
struct Place {
    uint32_t* abort;
    DeviceFault* fault;
    uint64_t timeout_ns;
    int sm, role, task, step;
};

// Records the first fault of a launch and lets every other wait end.
__device__ __noinline__ inline void report_fault(Place place, DeviceFault::Kind kind, int counter, uint32_t needed,
                                                 uint32_t seen) {
    if (atomicCAS(place.abort, 0u, 1u) != 0) return;
    DeviceFault* fault = place.fault;
    fault->sm = place.sm;
    fault->role = place.role;
    fault->task = place.task;
    fault->counter = counter;
    fault->needed = needed;
    fault->seen = seen;
    fault->step = place.step;
    store_release_system(&fault->kind, static_cast<uint32_t>(kind));
}

__device__ inline void report(const Context& c, DeviceFault::Kind kind, int counter, uint32_t needed, uint32_t seen) {
    report_fault({c.words.abort, c.fault, c.quantum.timeout_ns, c.sm, c.role, c.task, c.step}, kind, counter, needed,
                 seen);
}

// Waits until ready() gives true, for at most `patience` times quantum.timeout_ns; false after a fault, here or
// elsewhere.
template <class Ready, class Report>
__device__ bool wait_until(const Context& c, Ready ready, Report on_timeout, int patience = 1) {
    if (ready()) return true;
    const uint64_t begin = nanoseconds();
    while (!ready()) {
        __nanosleep(40);
        if (load_relaxed(c.words.abort) != 0) return false;
        if (nanoseconds() - begin > patience * c.quantum.timeout_ns) {
            on_timeout();
            return false;
        }
    }
    return true;
}

// Waits for `count` counters from `first` on to show `need` arrivals of this step; the whole team passes together.
__device__ inline bool wait_counters(const Context& c, const Team& team, DeviceFault::Kind kind, int first, int count,
                                     int need) {
    const uint32_t target = c.quantum.counter_origin + static_cast<uint32_t>(c.step + 1) * need;
    bool ok = true;
    for (int i = team.thread; i < count && ok; i += team.threads) {
        const uint32_t* counter = counter_at(c.words.counters, first + i);
        uint32_t seen = 0;
        ok = wait_until(
            c,
            [&] {
                seen = load_acquire(counter);
                return static_cast<int32_t>(seen - target) >= 0;
            },
            [&] { report(c, kind, first + i, need, need + seen - target); });
    }
    return team.all(ok);
}

// The task's WAIT.
__device__ inline bool wait_task(const Context& c, const Team& team) {
    return wait_counters(c, team, DeviceFault::kWait, c.field(FIELD_WAIT), c.field(FIELD_WAIT_COUNT),
                         c.field(FIELD_WAIT_NEED));
}

// SLICE_WAIT + [first, first + count).
__device__ inline bool wait_slices(const Context& c, const Team& team, int first, int count) {
    if (c.field(FIELD_SLICE_NEED) == 0) return true;
    return wait_counters(c, team, DeviceFault::kSliceWait, c.field(FIELD_SLICE_WAIT) + first, count,
                         c.field(FIELD_SLICE_NEED));
}

// The whole team has written: arrives at ARRIVE.
__device__ inline void arrive_task(const Context& c, const Team& team) {
    team.sync();
    const int count = c.field(FIELD_ARRIVE_COUNT);
    if (team.leader() && count != 0) add_release(counter_at(c.words.counters, c.field(FIELD_ARRIVE)), count);
}

// The next item of the task's queue, for the whole team. `shared` is a word of shared memory.
__device__ inline int claim(const Context& c, const Team& team, int* shared) {
    team.sync();  // everybody has read the last one
    if (team.leader()) *shared = static_cast<int>(atomicAdd(c.words.claims + c.field(FIELD_QUEUE), 1u));
    team.sync();
    return *shared;
}

}  // namespace north_jax::megakernel
