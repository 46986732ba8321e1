// The storer warps: sums of the consumers folded, finished and stored, tile by tile in turn; arrivals at counters.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Storer : Common {
    using Common::Common;
    RoutingReader routing;

    // Whether the next tile is this warp's: those in even slots are the first one's.
    __device__ __forceinline__ bool next_is_mine() {
        const bool mine = sums_.slot % kStorerWarps == warp;
        if (!mine) sums_.advance(memory.layout.sums);
        return mine;
    }

    // Waits for the next tile of this warp.
    __device__ __forceinline__ bool take() const { return wait(&shared().sums_full[sums_.slot], sums_.parity); }

    __device__ __forceinline__ void release() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().sums_empty[sums_.slot]);
        sums_.advance(memory.layout.sums);
    }

    // Takes a tile: store(row of the batch, row of the tile, sum, whether that row of the batch is among `rows`), by
    // the whole warp: lanes 0 … 15 and 16 … 31 each have the rows of one row of the batch. Bit b of `rows`: row b.
    template <class Store>
    __device__ __forceinline__ bool store_rows(uint32_t rows, Store store) {
        if (!take()) return false;
        const int batch = c.plan.batch, stride = sums_stride(batch);
        const float* sums = memory.sums + sums_.slot * (memory.layout.sums_bytes / 4);
#pragma unroll 1
        while (rows != 0) {
            const int first = __ffs(rows) - 1;
            rows &= rows - 1;
            const int second = rows != 0 ? __ffs(rows) - 1 : first;
            const bool exists = lane < 16 || rows != 0;
            rows &= rows - 1;
            const int b = lane < 16 ? first : second, row = lane % 16;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < kConsumerWarps; ++w) sum += sums[(w * batch + b) * stride + row];
            store(b, row, sum, exists);
        }
        release();
        return true;
    }

    // The same for all live rows.
    template <class Store>
    __device__ __forceinline__ bool store_tile(Store store) {
        return store_rows(memory.shared->live_rows, store);
    }

    // What this warp has stored, and what it has seen others store, is there for whoever sees the arrivals.
    __device__ __forceinline__ void arrive(int counter, int count) const {
        __syncwarp();
        if (lane == 0 && count != 0) add_release(c.words.counters + counter, count);
    }
    __device__ __forceinline__ void arrive() const { arrive(c.field(FIELD_ARRIVE), c.field(FIELD_ARRIVE_COUNT)); }

   private:
    Cursor sums_;
};

}  // namespace north_jax::megakernel::pipeline
