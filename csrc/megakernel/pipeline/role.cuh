// What every role has: its context, its way through the SM's list, bounded waits at barriers and counters.
#pragma once

#include "csrc/megakernel/device/barrier.cuh"
#include "csrc/megakernel/pipeline/shared.cuh"

namespace north_jax::megakernel::pipeline {

// A place in a ring of slots, and the parity of its barriers' phases. Who fills begins with `filling`: all slots are
// empty as if they had been emptied before.
struct Cursor {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ static Cursor filling() { return {0, 1}; }
    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// What runs in every layer has to stay in the instruction cache: beyond it, code comes at a tenth of its speed from
// behind the stream of weights. So waits at barriers are a few instructions that know neither clock nor report; the
// controller, which waits for the slowest warp of the block, looks after both (controller.cuh).

// Of this warp, about a counter.
__device__ __noinline__ inline void report_waiter(DeviceFault::Kind kind, int counter, uint32_t needed, uint32_t seen) {
    const Shared& s = shared_of_block();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    report_fault({s.patience.abort, s.patience.fault, s.patience.timeout_ns, static_cast<int>(blockIdx.x),
                  static_cast<int>(role_of_warp(warp)), s.task_of_warp[warp], s.step},
                 kind, counter, needed, seen);
}

// Polls that see no change stay in flight while others follow: seeing an arrival then costs one latency, not one and a
// half. `counter` < 0: nothing to wait for, and nothing to ask the memory.
//
// No acquire follows: what is read next goes to the L2 (bulk copies, relaxed loads), where the arrival's release has
// put it, and is issued after the branch on the poll.
__device__ __noinline__ inline bool poll_counters(int counter, int need, bool slice) {
    constexpr int kPollInterval = 50;  // ns
    const Shared& s = shared_of_block();
    const uint32_t target = s.counter_origin + static_cast<uint32_t>(s.step + 1) * need;
    auto poll = [&] { return counter < 0 ? target : load_relaxed(counter_at(s.patience.counters, counter)); };
    uint32_t first = poll();
    __nanosleep(kPollInterval);
    uint32_t second = poll();
    __nanosleep(kPollInterval);
    uint32_t third = poll();
    uint64_t begin = 0;
    for (int polls = 0;; ++polls) {
        if (__all_sync(~0u, static_cast<int32_t>(first - target) >= 0)) return true;
        first = second;
        second = third;
        __nanosleep(kPollInterval);
        third = poll();
        if (polls % 64 != 63) continue;
        if (begin == 0) begin = nanoseconds();
        if (__any_sync(~0u, load_relaxed(s.patience.abort) != 0)) return false;
        if (__any_sync(~0u, nanoseconds() - begin > s.patience.timeout_ns)) {
            const uint32_t missing = __ballot_sync(~0u, static_cast<int32_t>(first - target) < 0);
            if (missing != 0 && threadIdx.x % 32 == __ffs(missing) - 1) {
                report_waiter(slice ? DeviceFault::kSliceWait : DeviceFault::kWait, counter, need,
                              need + first - target);
            }
            __syncwarp();
            return missing == 0;
        }
    }
}

// Counters up to `end`, of which this lane names the first and every 32nd after it.
__device__ __noinline__ inline bool poll_range(int counter, int end, int need) {
#pragma unroll 1
    for (; __any_sync(~0u, counter < end); counter += 32) {
        if (!poll_counters(counter < end ? counter : -1, need, false)) return false;
    }
    return true;
}

// What a role needs of its block. One a warp.
struct Common {
    Context c;
    Memory memory;
    int warp;  // of the role
    int lane;
    Cursor step;

    __device__ __forceinline__ Common(const Context& context, const Memory& block, Role role, int warp_of_role,
                                      int lane_of_warp)
        : c(context), memory(block), warp(warp_of_role), lane(lane_of_warp) {
        c.role = static_cast<int>(role);
        c.task = first_task();
    }

    __device__ __forceinline__ static Shared& shared() { return shared_of_block(); }
    __device__ __forceinline__ int first_task() const { return shared().first_task - 1; }

    // Goes on to the next task of the list that `part` takes part in; `ended` says that there was none, and that the
    // next one is the first again. False after a fault.
    __device__ __forceinline__ bool next_task(Part part, bool* ended) {
        forget();
        Shared& s = shared();
#pragma unroll 1
        for (;;) {
            *ended = c.task + 1 == s.end_task;
            if (place_ == kTasksOfSlot || (*ended && place_ > 0)) {
                __syncwarp();
                if (lane == 0) barrier_arrive(&s.tasks_empty[tasks_.slot]);
                tasks_.advance(kTaskSlots);
                place_ = 0;
            }
            if (*ended) {
                c.task = first_task();
                break;
            }
            if (place_ == 0 && !wait(&s.tasks_full[tasks_.slot], tasks_.parity)) return false;
            const PipelineTask& next = s.task[tasks_.slot][place_++];
            ++c.task;
            if ((next.parts & part) == 0) continue;
            c.fields = next.fields;
            break;
        }
        trace(TraceEvent::kTask, 0);
        if (lane == 0) s.task_of_warp[threadIdx.x / 32] = *ended ? -1 : c.task;
        return true;
    }

    __device__ __forceinline__ static Part part() { return kMultiplying; }

    __device__ __forceinline__ const PipelineTask& task() const {
        return *reinterpret_cast<const PipelineTask*>(c.fields);
    }

    // A buffer that the task names; `local` ones are this SM's.
    template <class T>
    __device__ __forceinline__ T* buffer(Field f) const {
        static_assert(FIELD_OUTPUT_2 - FIELD_INPUT == 4, "the order of PipelineTask::places");
        const int place = task().places[f - FIELD_INPUT];
        return reinterpret_cast<T*>(c.batch.workspace + static_cast<int64_t>(place) * 16);
    }
    // One that SMs exchange, of this step.
    template <class T>
    __device__ __forceinline__ T* exchanged(Field f) const {
        const BufferPlace& place = c.plan.buffers[c.field(f)];
        return reinterpret_cast<T*>(buffer<std::byte>(f) + c.step % 2 * (place.planes / 2) * place.plane_bytes);
    }
    __device__ __forceinline__ bool names_local(Field f) const {
        return c.field(f) == BUFFER_LOCAL_RESIDUAL || c.field(f) == BUFFER_LOCAL_HIDDEN;
    }

    // The task's weight.
    __device__ __forceinline__ const bf16* weight() const { return static_cast<const bf16*>(task().weight); }
    __device__ __forceinline__ int columns() const { return task().columns; }

    __device__ __forceinline__ int parameter(int b, Row which) const { return memory.rows[b * kRowFields + which]; }
    __device__ __forceinline__ int position(int b) const { return parameter(b, ROW_POSITION); }
    // The pages of its position.
    __device__ __forceinline__ int full_page(int b) const { return memory.pages_of_rows[2 * b]; }
    __device__ __forceinline__ int sliding_page(int b) const { return memory.pages_of_rows[2 * b + 1]; }
    __device__ __forceinline__ bool live(int b) const { return parameter(b, ROW_REMAINING) > 0; }

    // Waits for a phase of a barrier; false after a fault, to the whole warp.
    __device__ __forceinline__ bool wait(uint64_t* barrier, uint32_t parity) const {
        if (__all_sync(~0u, barrier_test(barrier, parity))) return true;
        trace(TraceEvent::kBarrier, static_cast<int>(barrier - reinterpret_cast<uint64_t*>(&shared())));
        do {
            if (__any_sync(~0u, shared().aborted)) return false;
        } while (!__all_sync(~0u, barrier_test(barrier, parity)));
        trace(TraceEvent::kEnd, 0);
        return true;
    }

    // The slice that this lane names; none where it is negative.
    __device__ __forceinline__ bool wait_slices(int slice) const {
        const int need = c.field(FIELD_SLICE_NEED);
        if (need == 0) return true;
        trace(TraceEvent::kCounter, c.field(FIELD_SLICE_WAIT));
        const bool ok = poll_counters(slice < 0 ? -1 : c.field(FIELD_SLICE_WAIT) + slice, need, true);
        trace(TraceEvent::kEnd, 0);
        return ok;
    }

    // The task's WAIT.
    __device__ __forceinline__ bool wait_task() const {
        const int count = c.field(FIELD_WAIT_COUNT);
        const int first = c.field(FIELD_WAIT);
        trace(TraceEvent::kCounter, first);
        const bool ok = poll_range(first + lane, first + count, c.field(FIELD_WAIT_NEED));
        trace(TraceEvent::kEnd, 0);
        return ok;
    }

    // Waits for the step after the last one; `ended` says that there is none. False after a fault.
    __device__ __forceinline__ bool begin_step(bool* ended) {
        if (!wait(&shared().step_begins, step.parity)) return false;
        step.advance(1);
        *ended = shared().ended;
        return true;
    }

    // Records a moment of this warp, in builds for it.
    __device__ __forceinline__ void trace(TraceEvent::Kind kind, int place) const {
        tracer_.record(shared().trace, kind, c.step, c.task, place);
    }

   private:
    // Lane and warp as if they had changed: what follows from them is computed again in every task. All that the
    // compiler would keep across tasks instead does not fit into the registers.
    __device__ __forceinline__ void forget() {
        asm volatile("" : "+r"(lane), "+r"(warp));
        lane &= 31;
        warp &= 15;
    }

    Cursor tasks_;
    int place_ = 0;  // in the slot
    mutable Tracer tracer_;
};

// A role whose warps do things together, at a named barrier of theirs.
template <int kTeamWarps, int kBarrier>
struct TeamRole : Common {
    using Common::Common;

    __device__ __forceinline__ int thread() const { return warp * 32 + lane; }
    __device__ __forceinline__ Team team() const { return {thread(), kTeamWarps * 32, kBarrier}; }
    __device__ __forceinline__ void sync() const { team().sync(); }

    // Whether all warps say so, to all of them. Before anything that needs all of them: whoever leaves says no once
    // more (`leave`), so that nobody waits for a warp that has gone.
    __device__ __forceinline__ bool agreed(bool value) { return ended(team().all(value)); }
    // The result of what ended with all warps of one mind.
    __device__ __forceinline__ bool ended(bool ok) {
        refused_ |= !ok;
        return ok;
    }
    __device__ __forceinline__ void leave() {
        if (!refused_) agreed(false);
    }

   private:
    bool refused_ = false;
};

// Where a warp is in the ring of routing tables. A reader keeps its layer's table until it goes on to a later one; the
// router may write over it once every reader has.
struct RoutingTurn {
    int layer = -1;
    Cursor cursor;

    // The table of the task's layer, for a reader; null after a fault.
    __device__ __forceinline__ const RoutingTable* of_task(const Common& r) {
        const int of = r.c.field(FIELD_LAYER);
        if (of != layer) {
            release(r);
            layer = of;
            if (!r.wait(&r.shared().routing_full[cursor.slot], cursor.parity)) return nullptr;
        }
        return &r.shared().routing[cursor.slot];
    }

    __device__ __forceinline__ void end_step(const Common& r) { release(r); }

   private:
    __device__ __forceinline__ void release(const Common& r) {
        if (layer < 0) return;
        layer = -1;
        __syncwarp();
        if (r.lane == 0) barrier_arrive(&r.shared().routing_empty[cursor.slot]);
        cursor.advance(2);
    }
};

// Warps that read routing tables: the producer, the storers, the loader's first warp and the consumers.
constexpr int kRoutingReaders = 1 + kStorerWarps + 1 + kConsumerWarps;

}  // namespace north_jax::megakernel::pipeline
