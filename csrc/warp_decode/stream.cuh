// How the shared form gets its weights: each lane copies what it will multiply itself into a ring of its own in shared
// memory, several steps ahead. Nobody else reads it, so nobody is waited for; and what is on its way takes no registers.
//
// A job is four rows of one expert, two and two neighbours, with the tokens that chose it, at most kGroup at a time. A
// step is one chunk a lane of each of the four rows.
#pragma once

#include <cuda_runtime.h>

#include "csrc/warp_decode/format.cuh"
#include "csrc/warp_decode/memory.cuh"
#include "csrc/warp_decode/segments.cuh"
#include "csrc/warp_decode/warp.cuh"

namespace north_jax::warp_decode {

inline constexpr int kRows = 4;
inline constexpr int kGroup = 8;   // tokens that one pass over the rows serves
inline constexpr int kStages = 4;  // steps of the ring

struct Job {
    int segment;
    int first;   // row; the next one is the job's second
    int second;  // row; the next one is the job's fourth
};

template <Format format>
struct Ring {
    uint4 raw[kStages][kRows][32];
    uint32_t word[Code<format>::kWords ? kStages : 1][Code<format>::kWords ? kRows : 1][32];
};

// A warp's jobs: `count`, of which it gets `first`, `first + stride`, …
struct Share {
    int first;
    int stride;
    int count;
};

// The copies of a warp. Jobs: (number) -> Job.
template <Format format, class Jobs>
class Stream {
    using C = Code<format>;

   public:
    __device__ Stream(const Weights& weights, const Segments& segments, const Jobs& jobs, const Share& share,
                      Ring<format>* ring, int lane)
        : weights_(weights),
          segments_(segments),
          jobs_(jobs),
          share_(share),
          ring_(ring),
          lane_(lane),
          chunks_(weights.columns / C::kChunk),
          number_(share.first),
          policy_(evict_first()) {
        begin_job();
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) copy();
    }

    // The next step's chunk of each row; its place in the ring is filled with what comes kStages steps later.
    __device__ __forceinline__ void take(uint4 (&raw)[kRows], uint32_t (&word)[kRows]) {
        wait_for_copies<kStages - 1>();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            raw[r] = ring_->raw[stage_][r][lane_];
            if constexpr (C::kWords) word[r] = ring_->word[stage_][r][lane_];
        }
        copy();
    }

    __device__ int chunks() const { return chunks_; }

   private:
    __device__ __forceinline__ void begin_job() {
        if (number_ >= share_.count) return;
        const Job job = jobs_(number_);
        const Expert<format> expert(weights_, segments_.expert[job.segment]);
        values_[0] = expert.row(job.first);
        values_[1] = expert.row(job.second);
        words_[0] = expert.words(job.first);
        words_[1] = expert.words(job.second);
        groups_ = ceil_div(segments_.pairs_of(job.segment), kGroup);
        chunk_ = lane_;
    }

    // Fills the stage that was taken last with the next step, or with nothing after the last one.
    __device__ __forceinline__ void copy() {
        if (number_ < share_.count) {
            const bool inside = chunk_ < chunks_;
            const int at = inside ? chunk_ : 0;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const std::byte* row = values_[r / 2] + (r % 2 ? int64_t{weights_.columns} * value_bytes(format) : 0);
                copy_weights(&ring_->raw[stage_][r][lane_], row + 16 * int64_t{at}, inside, policy_);
                if constexpr (C::kWords) {
                    const uint32_t* words = words_[r / 2] + (r % 2 && C::kWordsOfRow ? scale_words(weights_) : 0);
                    copy_word(&ring_->word[stage_][r][lane_], words + at * C::kChunk / kScaleColumns, inside);
                }
            }
            advance();
        }
        commit_copies();
        stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }

    __device__ __forceinline__ void advance() {
        chunk_ += 32;
        if (chunk_ - lane_ < chunks_) return;
        chunk_ = lane_;
        if (--groups_ > 0) return;
        number_ += share_.stride;
        begin_job();
    }

    const Weights& weights_;
    const Segments& segments_;
    const Jobs& jobs_;
    const Share share_;
    Ring<format>* ring_;
    const int lane_, chunks_;
    int number_;  // the job that is copied
    int groups_ = 0;
    int chunk_ = 0;
    int stage_ = 0;
    const std::byte* values_[2] = {};
    const uint32_t* words_[2] = {};
    const uint64_t policy_;
};

// Adds to sums[r][m] what this lane's chunks of the four rows contribute to their product with input m, whose first
// value is inputs[place(m)].
template <int N, Format format, class Jobs, class GetPlace>
__device__ __forceinline__ void multiply(Stream<format, Jobs>& stream, const uint16_t* inputs, GetPlace place, int lane,
                                         float (&sums)[kRows][N]) {
    using C = Code<format>;
    uint32_t places[N];  // half the registers of pointers
#pragma unroll
    for (int m = 0; m < N; ++m) places[m] = static_cast<uint32_t>(place(m));
    for (int base = 0; base < stream.chunks(); base += 32) {
        uint4 raw[kRows];
        uint32_t word[kRows] = {};
        stream.take(raw, word);
        const int chunk = base + lane;
        if (chunk >= stream.chunks()) continue;
        float scales[kRows];
        if constexpr (C::kWords) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) scales[r] = C::scale(word[r], chunk);
        }
#pragma unroll
        for (int unit = 0; unit < C::kUnits; ++unit) {
            float rows[kRows][kUnit];
#pragma unroll
            for (int r = 0; r < kRows; ++r) C::unpack(raw[r], unit, rows[r]);
#pragma unroll
            for (int m = 0; m < N; ++m) {
                float x[kUnit];
                unpack_bfloat16(load_activations(inputs + places[m] + (chunk * C::kChunk + unit * kUnit)), x);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    float sum = C::kWords ? 0.0f : sums[r][m];
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) sum += rows[r][i] * x[i];
                    sums[r][m] = C::kWords ? sums[r][m] + sum * scales[r] : sum;
                }
            }
        }
    }
}

// Calls body(constant) with the least of 1, 2, 4 and 8 that is at least n.
template <int n>
struct Count {
    static constexpr int value = n;
};
template <class Body>
__device__ __forceinline__ void with_count(int n, Body body) {
    if (n == 1) {
        body(Count<1>());
    } else if (n == 2) {
        body(Count<2>());
    } else if (n <= 4) {
        body(Count<4>());
    } else {
        body(Count<8>());
    }
}

}  // namespace north_jax::warp_decode
