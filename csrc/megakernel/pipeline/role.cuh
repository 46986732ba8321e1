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

// The tasks of an SM in order, as one warp sees them, again and again. Descriptors are fetched two tasks ahead.
class TaskStream {
   public:
    __device__ __forceinline__ TaskStream(const DevicePlan& plan, int sm, int lane)
        : tasks_(plan.tasks), begin_(plan.begin[sm]), end_(plan.begin[sm + 1]), lane_(lane) {
        for (int i = 0; i < kAhead; ++i) ahead_[i] = fetch(begin_ + i);
        next_ = begin_;
    }

    // Puts the next descriptor into `fields`; false, and back to the first task, after the last one.
    __device__ __forceinline__ bool next(int32_t* fields, int* number) {
        if (next_ == end_) {
            next_ = begin_;
            return false;
        }
        __syncwarp();  // nobody reads the last one any more
        fields[lane_] = ahead_[0];
#pragma unroll
        for (int i = 1; i < kAhead; ++i) ahead_[i - 1] = ahead_[i];
        ahead_[kAhead - 1] = fetch(next_ + kAhead);
        *number = next_++;
        __syncwarp();
        return true;
    }

   private:
    static constexpr int kAhead = 2;

    __device__ __forceinline__ int32_t fetch(int task) const {
        while (task >= end_) task -= end_ - begin_;
        return __ldg(tasks_ + static_cast<int64_t>(task) * kDescriptorFields + lane_);
    }

    const int32_t* tasks_;
    const int begin_, end_, lane_;
    int next_;
    int32_t ahead_[kAhead];
};

// What a role needs of its block. One a warp.
struct Common {
    Context c;
    Memory memory;
    int warp;  // of the role
    int lane;
    TaskStream stream;
    Cursor step;

    __device__ __forceinline__ Common(const Context& context, const Memory& block, Role role, int warp_of_role,
                                      int warp_of_block, int lane_of_warp)
        : c(context), memory(block), warp(warp_of_role), lane(lane_of_warp),
          stream(context.plan, context.sm, lane_of_warp) {
        c.role = static_cast<int>(role);
        c.fields = block.shared->task[warp_of_block];
        fields_ = block.shared->task[warp_of_block];
    }

    __device__ __forceinline__ Shared& shared() const { return *memory.shared; }
    __device__ __forceinline__ bool next_task() { return stream.next(fields_, &c.task); }
    __device__ __forceinline__ int parameter(int b, Row which) const { return memory.rows[b * kRowFields + which]; }
    __device__ __forceinline__ int position(int b) const { return parameter(b, ROW_POSITION); }
    __device__ __forceinline__ bool live(int b) const { return parameter(b, ROW_REMAINING) > 0; }

    // Waits for a phase of a barrier; false after a fault, to the whole warp.
    __device__ __forceinline__ bool wait(uint64_t* barrier, uint32_t parity) const {
        if (__all_sync(~0u, barrier_test(barrier, parity))) return true;
        const uint64_t begin = nanoseconds();
        while (!__all_sync(~0u, barrier_test(barrier, parity))) {
            if (__any_sync(~0u, load_relaxed(c.words.abort) != 0)) return false;
            // Longer than waits at counters, so that whoever keeps this block waiting is heard first.
            if (__any_sync(~0u, nanoseconds() - begin > 2 * c.quantum.timeout_ns)) {
                if (lane == 0) report(c, DeviceFault::kBlocked, -1, 0, 0);
                return false;
            }
        }
        return true;
    }

    // Each lane waits for its counter to show `need` arrivals of this step; `counter` < 0: for none. Polls that see no
    // change stay in flight while others follow: seeing an arrival then costs one latency, not one and a half.
    __device__ __forceinline__ bool wait_counters(DeviceFault::Kind kind, int counter, int need) const {
        const uint32_t target = static_cast<uint32_t>(c.step + 1) * static_cast<uint32_t>(need);
        const uint32_t* word = c.words.counters + (counter < 0 ? 0 : counter);
        auto reached = [&](uint32_t seen) {
            return __all_sync(~0u, counter < 0 || static_cast<int32_t>(seen - target) >= 0);
        };
        uint32_t first = load_relaxed(word);
        __nanosleep(kPollInterval);
        uint32_t second = load_relaxed(word);
        __nanosleep(kPollInterval);
        uint32_t third = load_relaxed(word);
        uint64_t begin = 0;
        for (int polls = 0;; ++polls) {
            if (reached(first)) return true;
            first = second;
            second = third;
            __nanosleep(kPollInterval);
            third = load_relaxed(word);
            if (polls % 64 != 63) continue;
            if (begin == 0) begin = nanoseconds();
            if (__any_sync(~0u, load_relaxed(c.words.abort) != 0)) return false;
            if (__any_sync(~0u, nanoseconds() - begin > c.quantum.timeout_ns)) {
                const uint32_t missing =
                    __ballot_sync(~0u, counter >= 0 && static_cast<int32_t>(first - target) < 0);
                if (missing != 0 && lane == __ffs(missing) - 1) report(c, kind, counter, target, first);
                __syncwarp();
                return missing == 0;
            }
        }
    }

    // The task's WAIT.
    __device__ __forceinline__ bool wait_task() const {
        const int count = c.field(FIELD_WAIT_COUNT);
        for (int first = 0; first < count; first += 32) {
            const int counter = first + lane < count ? c.field(FIELD_WAIT) + first + lane : -1;
            if (!wait_counters(DeviceFault::kWait, counter, c.field(FIELD_WAIT_NEED))) return false;
        }
        return true;
    }

    // Waits for the step after the last one; `ended` says that there is none. False after a fault.
    __device__ __forceinline__ bool begin_step(bool* ended) {
        if (!wait(&shared().step_begins, step.parity)) return false;
        step.advance(1);
        *ended = shared().ended;
        return true;
    }

   private:
    static constexpr int kPollInterval = 50;  // ns

    int32_t* fields_;
};

// Reads a layer's experts; the router may write over them once every reader has gone on to a later layer.
class RoutingReader {
   public:
    // The table of the task's layer; null after a fault.
    __device__ __forceinline__ const RoutingTable* of_task(const Common& r) {
        const int layer = r.c.field(FIELD_LAYER);
        if (layer != layer_) {
            release(r);
            layer_ = layer;
            if (!r.wait(&r.shared().routing_full[cursor_.slot], cursor_.parity)) return nullptr;
        }
        return &r.shared().routing[cursor_.slot];
    }

    __device__ __forceinline__ void end_step(const Common& r) { release(r); }

   private:
    __device__ __forceinline__ void release(const Common& r) {
        if (layer_ < 0) return;
        layer_ = -1;
        __syncwarp();
        if (r.lane == 0) barrier_arrive(&r.shared().routing_empty[cursor_.slot]);
        cursor_.advance(2);
    }

    int layer_ = -1;
    Cursor cursor_;
};

// Warps that read routing tables: the producer, the storers, the loader's first warp and the consumers.
constexpr int kRoutingReaders = 1 + kStorerWarps + 1 + kConsumerWarps;

}  // namespace north_jax::megakernel::pipeline
