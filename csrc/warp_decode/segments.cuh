// Which tokens share an expert: every block finds it out from the expert ids alone, and all find the same.
//
// The pairs (token, slot) of an expert that some token chose are a run; a segment is up to kGroup pairs of one run.
// Runs ascend by expert, their pairs by number, whatever runs first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/warp_decode/operands.h"
#include "csrc/warp_decode/warp.cuh"

namespace north_jax::warp_decode {

inline constexpr int kGroup = 16;  // pairs of a segment at most

struct Segments {
    int32_t* expert;      // [segments]
    int32_t* begin;       // [segments + 1]: first of the segment's pairs
    int32_t* run_expert;  // [runs], scratch, as all that follow but `pair` and `of`
    int32_t* run_begin;   // [runs + 1]
    int32_t* next;        // [runs]: pairs of the run, then where the next one goes
    uint32_t* chosen;     // [words]: which experts are chosen, one bit each
    uint32_t* before;     // [words]: how many are chosen in the words before
    uint16_t* pair;       // [pairs], by segment
    uint16_t* of;         // [pairs]: the run of a pair, kNone for none
    int32_t* count;       // of segments
    int32_t* runs;

    static constexpr uint16_t kNone = 0xffff;

    HOST_DEVICE static int words(int experts) { return ceil_div(experts, 32); }

    // Shared memory that they take, a multiple of 16.
    HOST_DEVICE static int bytes(int pairs, int experts) {
        return ceil_div(4 * (5 * pairs + 4 + 2 * words(experts)) + 2 * 2 * pairs, 16) * 16;
    }

    __device__ Segments(unsigned char* memory, int pairs, int experts) {
        expert = reinterpret_cast<int32_t*>(memory);
        begin = expert + pairs;
        run_expert = begin + pairs + 1;
        run_begin = run_expert + pairs;
        next = run_begin + pairs + 1;
        count = next + pairs;
        runs = count + 1;
        chosen = reinterpret_cast<uint32_t*>(runs + 1);
        before = chosen + words(experts);
        pair = reinterpret_cast<uint16_t*>(before + words(experts));
        of = pair + pairs;
    }

    __device__ int pairs_of(int segment) const { return begin[segment + 1] - begin[segment]; }
};

// For one warp. Writes before each of n numbers the sum of those before it; gives the sum of all.
template <class T, class Read>
__device__ T scan(int n, T* out, Read read, int lane) {
    T total = 0;
    for (int base = 0; base < n; base += 32) {
        const int i = base + lane;
        const T own = i < n ? read(i) : T{0};
        T up_to = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const T other = __shfl_up_sync(~0u, up_to, offset);
            if (lane >= offset) up_to += other;
        }
        if (i < n) out[i] = total + up_to - own;
        total += __shfl_sync(~0u, up_to, 31);
    }
    return total;
}

// For one warp, after `next` has the number of pairs of each run: the pairs in order, and their segments.
__device__ inline void sort_pairs(int pairs, const Segments& out, int lane) {
    const int runs = *out.runs;
    const int placed = scan(runs, out.run_begin, [&](int i) { return out.next[i]; }, lane);
    if (lane == 0) out.run_begin[runs] = placed;
    __syncwarp();
    for (int i = lane; i < runs; i += 32) out.next[i] = out.run_begin[i];
    __syncwarp();
    for (int base = 0; base < pairs; base += 32) {
        const int p = base + lane;
        const int run = p < pairs ? out.of[p] : Segments::kNone;
        const unsigned same = __match_any_sync(~0u, run);
        const int rank = __popc(same & ((1u << lane) - 1));
        const bool valid = run != Segments::kNone;
        if (valid) out.pair[out.next[run] + rank] = static_cast<uint16_t>(p);
        __syncwarp();
        if (valid && rank == 0) out.next[run] += __popc(same);
        __syncwarp();
    }
    // `next` now has each run's first segment.
    const auto segments_of = [&](int run) { return ceil_div(out.run_begin[run + 1] - out.run_begin[run], kGroup); };
    const int segments = scan(runs, out.next, segments_of, lane);
    __syncwarp();
    for (int run = lane; run < runs; run += 32) {
        for (int i = 0; i < segments_of(run); ++i) {
            out.expert[out.next[run] + i] = out.run_expert[run];
            out.begin[out.next[run] + i] = out.run_begin[run] + i * kGroup;
        }
    }
    if (lane == 0) {
        out.begin[segments] = placed;
        *out.count = segments;
    }
}

// For all threads of a block, which see the result when it returns. ids: [pairs], in global memory.
__device__ inline void find_segments(const int32_t* ids, int pairs, int experts, const Segments& out) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, words = Segments::words(experts);
    for (int i = thread; i < words; i += kThreads) out.chosen[i] = 0;
    for (int i = thread; i < pairs; i += kThreads) out.next[i] = 0;
    __syncthreads();
    for (int p = thread; p < pairs; p += kThreads) {
        const int id = __ldg(ids + p);
        if (id >= 0 && id < experts) atomicOr(out.chosen + id / 32, 1u << id % 32);
    }
    __syncthreads();
    if (thread < 32) {
        const auto chosen = [&](int i) { return static_cast<uint32_t>(__popc(out.chosen[i])); };
        const uint32_t total = scan(words, out.before, chosen, lane);
        if (lane == 0) *out.runs = static_cast<int32_t>(total);
    }
    __syncthreads();
    for (int p = thread; p < pairs; p += kThreads) {
        const int id = __ldg(ids + p);
        out.of[p] = Segments::kNone;
        if (id < 0 || id >= experts) continue;
        const uint32_t lower = out.chosen[id / 32] & ((1u << id % 32) - 1);
        const int run = static_cast<int>(out.before[id / 32]) + __popc(lower);
        out.of[p] = static_cast<uint16_t>(run);
        out.run_expert[run] = id;  // all of its pairs write the same
        atomicAdd(out.next + run, 1);
    }
    __syncthreads();
    if (thread < 32) sort_pairs(pairs, out, lane);
    __syncthreads();
}

}  // namespace north_jax::warp_decode
