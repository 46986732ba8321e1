// The producer warp: weight rows and keys into the page ring, ahead of everybody.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

struct Producer : Common {
    using Common::Common;
    RoutingTurn routing;

    // Fills the next page with `rows` rows of `bytes` bytes. Lane l < rows copies row l, from `from`.
    __device__ __forceinline__ bool fill_page(const void* from, int rows, int bytes) {
        Shared& s = shared();
        if (!wait(&s.page_empty[filled_.slot], filled_.parity)) return false;
        const int most = rows * bytes <= kBytesInFlight / 3 ? 3 : 2;
#pragma unroll 1
        for (; in_flight_ >= most; --in_flight_) {
            if (!wait(&s.page_full[landed_.slot], landed_.parity)) return false;
            landed_.advance(memory.layout.pages);
        }
        ++in_flight_;
        uint64_t* full = &s.page_full[filled_.slot];
        if (lane == 0) barrier_arrive_expect(full, rows * bytes);
        __syncwarp();
        if (lane < rows) {
            bulk_copy_once(memory.pages + filled_.slot * kPageBytes + lane * kRowStride, from, bytes, full, policy_);
        }
        filled_.advance(memory.layout.pages);
        return true;
    }

    // Pages of a tile: columns [begin, begin + count) of the rows that lanes name, `page_columns` at a time.
    __device__ __forceinline__ bool fill_tile(int64_t row, int rows, int begin, int count, int page_columns) {
        const bf16* from = weight() + row * columns() + begin;
        for (int k = 0; k < count; k += page_columns) {
            if (!fill_page(from + k, rows, min(page_columns, count - k) * 2)) return false;
        }
        return true;
    }

    // A block must not end while copies into its memory are on their way. They land, whatever happened elsewhere.
    __device__ __forceinline__ void drain() {
        for (; in_flight_ > 0; --in_flight_) {
            while (!__all_sync(~0u, barrier_test(&shared().page_full[landed_.slot], landed_.parity))) {
            }
            landed_.advance(memory.layout.pages);
        }
    }

   private:
    Cursor filled_ = Cursor::filling();
    Cursor landed_;
    int in_flight_ = 0;
    const uint64_t policy_ = evict_first_policy();
};

}  // namespace north_jax::megakernel::pipeline
