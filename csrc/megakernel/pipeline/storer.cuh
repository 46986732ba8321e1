// The storer warps: sums of the consumers folded, finished and stored, tile by tile in turn; arrivals at counters.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Storer : Common {
    using Common::Common;
    RoutingReader routing;

    // Whether the next tile is this warp's.
    __device__ __forceinline__ bool next_is_mine() { return tiles_++ % kStorerWarps == warp; }

    // Waits for the next tile of this warp.
    __device__ __forceinline__ bool take() const { return wait(&shared().sums_full[warp], parity_); }

    __device__ __forceinline__ void release() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().sums_empty[warp]);
        parity_ ^= 1;
    }

    // Takes a tile: store(row of the batch, row of the tile, sum, whether there is such a row of the batch), by the
    // whole warp: lanes 0 … 15 and 16 … 31 each have the rows of one row of the batch.
    template <class Store>
    __device__ __forceinline__ bool store_tile(Store store) {
        if (!take()) return false;
        const int batch = c.plan.batch;
        const float* sums = memory.sums + warp * (memory.layout.sums_bytes / 4);
#pragma unroll 1
        for (int first = 0; first < batch; first += 2) {
            const int b = first + lane / 16, row = lane % 16;
            float sum = 0;
            if (b < batch) {
#pragma unroll
                for (int w = 0; w < kConsumerWarps; ++w) sum += sums[(w * batch + b) * kSumsStride + row];
            }
            store(b, row, sum, b < batch && live(b));
        }
        release();
        return true;
    }

    // What this warp has stored, and what it has seen others store, is there for whoever sees the arrivals.
    __device__ __forceinline__ void arrive(int counter, int count) const {
        __syncwarp();
        if (lane == 0 && count != 0) add_release(c.words.counters + counter, count);
    }
    __device__ __forceinline__ void arrive() const { arrive(c.field(FIELD_ARRIVE), c.field(FIELD_ARRIVE_COUNT)); }

   private:
    int tiles_ = 0;
    uint32_t parity_ = 0;
};

}  // namespace north_jax::megakernel::pipeline
