// The loader: activations into the stage ring, by its first warp; routing, by its second; the splits of attention, by
// the other two; the residual stream and its norm, sampling and the ends of steps, by all of them.
#pragma once

#include "csrc/megakernel/device/tensor.cuh"
#include "csrc/megakernel/pipeline/router.cuh"

namespace north_jax::megakernel::pipeline {

constexpr int kFolderWarps = 2;

struct Loader : TeamRole<kLoaderWarps, 1> {
    using TeamRole::TeamRole;
    RoutingTurn routing;   // of the first warp, which reads, and of the second, which fills
    int input_layer = -1;  // whose input has been staged
    int norm_turn = 0;     // which half of the sums is next

    __device__ __forceinline__ Part part() const { return stages() ? kStaging : routes() ? kRouting : kFolding; }
    __device__ __forceinline__ bool stages() const { return warp == 0; }
    __device__ __forceinline__ bool routes() const { return warp == 1; }
    __device__ __forceinline__ bool folds() const { return warp >= kLoaderWarps - kFolderWarps; }
    __device__ __forceinline__ bool folds_first() const { return warp == kLoaderWarps - kFolderWarps; }
    __device__ __forceinline__ Team folders() const {
        return {thread() - (kLoaderWarps - kFolderWarps) * 32, kFolderWarps * 32, 2};
    }

    // Waits for an empty stage; gives its address, 0 after a fault.
    __device__ __forceinline__ uint32_t await_stage() {
        if (!wait(&shared().stage_empty[stage_.slot], stage_.parity)) return 0;
        return memory.stages + stage_.slot * memory.layout.stage_bytes;
    }
    // The same for copies of `bytes`.
    __device__ __forceinline__ uint32_t open_stage(int bytes) {
        const uint32_t stage = await_stage();
        if (stage != 0 && lane == 0) barrier_arrive_expect(&shared().stage_full[stage_.slot], bytes);
        __syncwarp();
        return stage;
    }
    __device__ __forceinline__ void copy(uint32_t to, const void* from, int bytes) const {
        bulk_copy(to, from, bytes, copying_ ? &shared().staged : &shared().stage_full[stage_.slot]);
    }

    // Copies that this warp looks at before the stage is filled: expects `bytes` of them.
    __device__ __forceinline__ void expect_copies(int bytes) {
        copying_ = true;
        if (lane == 0) barrier_arrive_expect(&shared().staged, bytes);
        __syncwarp();
    }
    // Waits for them; false after a fault.
    __device__ __forceinline__ bool await_copies() {
        if (!wait(&shared().staged, copies_.parity)) return false;
        copies_.advance(1);
        copying_ = false;
        return true;
    }
    __device__ __forceinline__ void close_stage() { stage_.advance(kStages); }
    // What all lanes have written is the stage's content.
    __device__ __forceinline__ void fill_stage() {
        fence_shared_for_bulk_copies();  // its next content may come by them
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().stage_full[stage_.slot]);
        close_stage();
    }

    // Waits until the consumers have done with the last layer's input. By the first warp.
    __device__ __forceinline__ bool open_input() {
        if (!wait(&shared().input_empty, input_.parity)) return false;
        input_.advance(1);
        return true;
    }

    __device__ __forceinline__ void end_step() {
        if (stages()) routing.end_step(*this);
        if (routes()) routing.layer = -1;
        input_layer = -1;
    }

    // Copies on their way into a block that is about to end land first.
    __device__ __forceinline__ void drain() {
        if (!stages()) return;
        // What was opened for copies completes; what was not shows the phase before, which is complete.
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            while (!__all_sync(~0u, barrier_test(&shared().stage_full[stage_.slot], stage_.parity))) {
            }
            stage_.advance(kStages);
        }
        while (copying_ && !__all_sync(~0u, barrier_test(&shared().staged, copies_.parity))) {
        }
        while (shared().input_copied && !__all_sync(~0u, barrier_test(&shared().input_full, input_.parity))) {
        }
    }

   private:
    Cursor stage_ = Cursor::filling(), input_ = Cursor::filling(), copies_;
    bool copying_ = false;
};

}  // namespace north_jax::megakernel::pipeline
