// The consumer warps: products of pages with activations. Each warp takes an eighth of a page's columns.
#pragma once

#include "csrc/megakernel/device/tensor.cuh"
#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Consumer : Common {
    using Common::Common;
    static constexpr int kSums = 4;  // so that a product does not wait for the one before it
    RoutingTurn routing;
    float sum[kSums][4];                      // of every kSums-th step
    int scores_written = 0, scores_read = 0;  // pages
    int self_turn = 0;                        // which half of the own scores is next

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * kSums; ++i) sum[i / 4][i % 4] = 0;
    }

    // Waits for the next page; gives its address, 0 after a fault.
    __device__ __forceinline__ uint32_t take_page() const {
        if (!wait(&shared().page_full[page_.slot], page_.parity)) return 0;
        return memory.pages + page_.slot * kPageBytes;
    }
    // Waits for the page `after` the next one (0 or 1), which it does not take; gives its address, 0 after a fault.
    __device__ __forceinline__ uint32_t see_page(int after) const {
        Cursor seen = page_;
        if (after == 1) seen.advance(memory.layout.pages);
        if (!wait(&shared().page_full[seen.slot], seen.parity)) return 0;
        return memory.pages + seen.slot * kPageBytes;
    }
    __device__ __forceinline__ void release_page() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().page_empty[page_.slot]);
        page_.advance(memory.layout.pages);
    }

    // Waits for the next stage; gives its address, 0 after a fault.
    __device__ __forceinline__ uint32_t take_stage() const {
        if (!wait(&shared().stage_full[stage_.slot], stage_.parity)) return 0;
        return memory.stages + stage_.slot * memory.layout.stage_bytes;
    }
    __device__ __forceinline__ void release_stage() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().stage_empty[stage_.slot]);
        stage_.advance(kStages);
    }

    // Adds the product of a page of `columns` columns with a row of activations: `row` is the address of the one that
    // is this lane's column of the product, 0 for zeros.
    __device__ __forceinline__ void multiply(uint32_t page, uint32_t row, int columns) {
        const int steps = columns / (kConsumerWarps * 16);
        uint32_t from = page + lane % 16 * kRowStride + warp * steps * 32 + lane / 16 * 16;
        uint32_t with = row + warp * steps * 32 + lane % 4 * 4;
        // Whole pages and North's experts at once: all loads go out before the first product waits for one.
        if (steps == 8) return multiply_steps<8>(from, with, row != 0);
        if (steps == 6) return multiply_steps<6>(from, with, row != 0);
#pragma unroll 1
        for (int k = 0; k < steps; ++k, from += 32, with += 32) multiply_steps<1>(from, with, row != 0);
    }

    // Hands the sums of a tile to the storer whose turn it is, and begins new ones.
    __device__ __forceinline__ bool hand_over() {
        if (!wait(&shared().sums_empty[sums_.slot], sums_.parity)) return false;
        const int batch = c.plan.batch, stride = sums_stride(batch), g = lane / 4, column = lane % 4 * 2;
        float* to = memory.sums + sums_.slot * (memory.layout.sums_bytes / 4) + (warp * batch + column) * stride + g;
        if (column < batch) {
            to[0] = all(0);
            to[8] = all(2);
        }
        if (column + 1 < batch) {
            to[stride] = all(1);
            to[stride + 8] = all(3);
        }
        arrive_at_storer();
        return true;
    }

    // Tells the storer whose turn it is that this warp's part of something is in global memory.
    __device__ __forceinline__ bool hand_over_stored() {
        if (!wait(&shared().sums_empty[sums_.slot], sums_.parity)) return false;
        arrive_at_storer();
        return true;
    }

    // A barrier of the consumers.
    __device__ __forceinline__ bool meet() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().consumers_met);
        const bool ok = wait(&shared().consumers_met, met_);
        met_ ^= 1;
        return ok;
    }

    // Waits for the layer's normalised input, at the first task that takes it.
    __device__ __forceinline__ bool take_input() {
        if (input_layer_ == c.field(FIELD_LAYER)) return true;
        release_input();
        input_layer_ = c.field(FIELD_LAYER);
        return wait(&shared().input_full, input_.parity);
    }

    __device__ __forceinline__ void end_step() {
        routing.end_step(*this);
        release_input();
    }

   private:
    __device__ __forceinline__ float all(int i) const { return (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]); }

    template <int kSteps>
    __device__ __forceinline__ void multiply_steps(uint32_t from, uint32_t with, bool some) {
        FragmentA a[kSteps];
        FragmentB b[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            a[k] = load_matrices(from + k * 32);
            b[k] = {{0, 0}};
            if (some) b[k] = {{load_shared(with + k * 32), load_shared(with + k * 32 + 16)}};
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) multiply_add(sum[k % kSums], a[k], b[k]);
    }

    __device__ __forceinline__ void arrive_at_storer() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().sums_full[sums_.slot]);
        sums_.advance(memory.layout.sums);
    }

    __device__ __forceinline__ void release_input() {
        if (input_layer_ < 0) return;
        input_layer_ = -1;
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().input_empty);
        input_.advance(1);
    }

    int input_layer_ = -1;
    Cursor page_, stage_, input_, sums_ = Cursor::filling();
    uint32_t met_ = 0;
};

}  // namespace north_jax::megakernel::pipeline
