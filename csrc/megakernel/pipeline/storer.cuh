// The storer warps: sums of the consumers folded, finished and stored, tile by tile in turn; arrivals at counters.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Storer : Common {
    using Common::Common;
    RoutingTurn routing;

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

    // What one lane has of a tile: a row of it, for a row of the batch.
    struct Value {
        int b, row;
        float sum;
        bool exists;  // the row of the batch is among those that were asked for
    };

    // Takes the next one or two rows off `rows` and folds their sums: lanes 0 … 15 have the first row, 16 … 31 the
    // second.
    __device__ __forceinline__ Value fold(uint32_t& rows) const {
        const int batch = c.plan.batch, stride = sums_stride(batch);
        const float* sums = memory.sums + sums_.slot * (memory.layout.sums_bytes / 4);
        const int first = __ffs(rows) - 1;
        rows &= rows - 1;
        const int second = rows != 0 ? __ffs(rows) - 1 : first;
        const bool two = rows != 0;
        rows &= rows - 1;
        Value v{lane < 16 ? first : second, lane % 16, 0, lane < 16 || two};
#pragma unroll
        for (int w = 0; w < kConsumerWarps; ++w) v.sum += sums[(w * batch + v.b) * stride + v.row];
        return v;
    }

    // That what this warp has published will be seen.
    __device__ __forceinline__ void announce(int counter, int count) const {
        __syncwarp();
        if (lane == 0) add_relaxed(counter_at(c.words.counters, counter), count);
    }

    // What this warp has stored, and what it has seen others store, is there for whoever sees the arrivals.
    __device__ __forceinline__ void arrive(int counter, int count) const {
        __syncwarp();
        if (lane == 0 && count != 0) add_release(counter_at(c.words.counters, counter), count);
    }
    __device__ __forceinline__ void arrive() const { arrive(c.field(FIELD_ARRIVE), c.field(FIELD_ARRIVE_COUNT)); }

   private:
    Cursor sums_;
};

}  // namespace north_jax::megakernel::pipeline
