// How the shared form gets its weights, and multiplies them.
//
// A job is sixteen rows of one expert, eight and eight neighbours. A warp copies them in steps of 128 bytes a row into
// a ring of its own in shared memory, several steps ahead, and feeds tensor cores from there: rows are A, the tokens of
// the expert, eight at a time, are B. No other warp reads the ring, so none is waited for.
#pragma once

#include <cuda_runtime.h>

#include "csrc/megakernel/device/tensor.cuh"
#include "csrc/warp_decode/format.cuh"
#include "csrc/warp_decode/memory.cuh"
#include "csrc/warp_decode/warp.cuh"

namespace north_jax::warp_decode {

inline constexpr int kRows = 16;
inline constexpr int kStages = 5;        // steps of the ring; one less is on its way
inline constexpr int kStepChunks = 8;    // of sixteen bytes, in a row of a step
inline constexpr int kColumnTokens = 8;  // columns of B

struct Job {
    int expert;
    int first;   // of the rows 0 to 7
    int second;  // of the rows 8 to 15
};

// Rows lie below one another; in odd ones the halves are swapped. Eight lanes that read four chunks of two neighbouring
// rows then meet all banks once.
template <Format format>
struct Ring {
    uint4 chunk[kStages][kRows][kStepChunks];
    uint32_t word[Code<format>::kWords ? kStages : 1][kRows];  // 128 columns of e4m3 are one step: a word a row

    __device__ static int place(int row, int chunk) { return chunk ^ row % 2 * 4; }
};

// What a warp does: the jobs `first`, `first + stride`, … below `count`, and of each the steps `step`, `step +
// step_stride`, …
struct Share {
    int first, stride, count;
    int step, step_stride;
};

// What a lane (g, t) = (lane / 4, lane % 4) multiplies in a step: chunks t and t + 4 of the rows g and g + 8.
struct Step {
    uint4 upper[2], lower[2];
    uint32_t upper_word, lower_word;
};

// The copies of a warp. Jobs: (number) -> Job.
template <Format format, class Jobs>
class Stream {
    using C = Code<format>;

   public:
    __device__ __forceinline__ Stream(const Weights& weights, const Jobs& jobs, const Share& share, Ring<format>* ring,
                                      int lane)
        : weights_(weights),
          jobs_(jobs),
          share_(share),
          ring_(ring),
          lane_(lane),
          chunks_(weights.columns / C::kChunk),
          policy_(evict_first()),
          number_(share.step < steps() ? share.first : share.count) {
        begin_job();
#pragma unroll
        for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    }

    // Steps of a job, all warps' together.
    __device__ int steps() const { return ceil_div(chunks_, kStepChunks); }
    __device__ int chunks() const { return chunks_; }
    __device__ const Share& share() const { return share_; }

    __device__ __forceinline__ Step take() {
        wait_for_copies<kStages - 2>();
        __syncwarp();  // all lanes' copies have landed, and all have read the step before
        copy(taken_ == 0 ? kStages - 1 : taken_ - 1);
        const int g = lane_ / 4, t = lane_ % 4;
        Step step;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int place = Ring<format>::place(g, t + 4 * h);
            step.upper[h] = ring_->chunk[taken_][g][place];
            step.lower[h] = ring_->chunk[taken_][g + 8][place];
        }
        if constexpr (C::kWords) {
            step.upper_word = ring_->word[taken_][g];
            step.lower_word = ring_->word[taken_][g + 8];
        }
        taken_ = taken_ + 1 == kStages ? 0 : taken_ + 1;
        return step;
    }

   private:
    __device__ __forceinline__ void begin_job() {
        if (number_ >= share_.count) return;
        const Job job = jobs_(number_);
        const Expert<format> expert(weights_, job.expert);
        values_[0] = expert.row(job.first + lane_ / 8);
        values_[1] = expert.row(job.second + lane_ / 8);
        if constexpr (C::kWords) words_ = expert.words(lane_ % 16 < 8 ? job.first + lane_ % 8 : job.second + lane_ % 8);
        step_ = share_.step;
    }

    // Starts the next step's copies to a stage: each row is the work of eight lanes. After the last one, none.
    __device__ __forceinline__ void copy(int stage) {
        if (number_ < share_.count) {
            const int chunk = step_ * kStepChunks + lane_ % 8;
            const bool inside = chunk < chunks_;
            const int64_t four_rows = int64_t{4} * weights_.columns * value_bytes(format);
            const int64_t at = inside ? 16 * int64_t{chunk} : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 4 * i + lane_ / 8;
                const std::byte* from = values_[i / 2] + (i % 2 ? four_rows : 0) + at;
                copy_weights(&ring_->chunk[stage][row][Ring<format>::place(row, lane_ % 8)], from, inside, policy_);
            }
            if constexpr (C::kWords) {
                if (lane_ < kRows) copy_word(&ring_->word[stage][lane_], words_ + step_);
            }
            step_ += share_.step_stride;
            if (step_ >= steps()) {
                number_ += share_.stride;
                begin_job();
            }
        }
        commit_copies();
    }

    const Weights& weights_;
    const Jobs& jobs_;
    const Share share_;
    Ring<format>* ring_;
    const int lane_, chunks_;
    const uint64_t policy_;
    int number_;  // the job that is copied
    int step_ = 0;
    int taken_ = 0;  // the stage that is multiplied next
    const std::byte* values_[2] = {};
    const uint32_t* words_ = nullptr;
};

// Sixteen bytes of a row as pairs of bfloat16.
template <Format format>
__device__ __forceinline__ void to_pairs(uint4 raw, uint32_t word, int chunk,
                                         uint32_t (&pairs)[4 * Code<format>::kUnits]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (format == Format::kBfloat16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = words[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            pairs[i] = bfloat16_pair(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2)));
            // A power of two: exact, where a scale of any other kind is left to the sums.
            if constexpr (format == Format::kMxfp8) pairs[i] = times_e8m0(pairs[i], word >> chunk / 2 % 4 * 8 & 0xff);
        }
    }
}

// The sums of a lane (g, t) for eight tokens: row g with tokens 2t and 2t + 1, then row g + 8.
using Sums = float[4];

// The products of a job's rows and kTiles times eight inputs, over the warp's steps. The lane's inputs begin at
// inputs + place(tile): it loads those of token g of each tile.
template <int kTiles, Format format, class Jobs, class GetPlace>
__device__ __forceinline__ void multiply(Stream<format, Jobs>& stream, const uint16_t* inputs, GetPlace place, int lane,
                                         Sums (&sums)[kTiles]) {
    using C = Code<format>;
    constexpr int kPairs = 4 * C::kUnits;  // of a chunk
    uint32_t places[kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) places[j] = static_cast<uint32_t>(place(j));
    for (int number = stream.share().step; number < stream.steps(); number += stream.share().step_stride) {
        const Step step = stream.take();
        Sums parts[kTiles] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int chunk = number * kStepChunks + lane % 4 + 4 * h;
            const bool inside = chunk < stream.chunks();
            uint32_t upper[kPairs], lower[kPairs];
            to_pairs<format>(step.upper[h], step.upper_word, chunk, upper);
            to_pairs<format>(step.lower[h], step.lower_word, chunk, lower);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int unit = 0; unit < C::kUnits; ++unit) {
                    uint4 x = make_uint4(0, 0, 0, 0);
                    if (inside) x = load_activations(inputs + places[j] + (chunk * C::kChunk + unit * kUnit));
                    const int p = 4 * unit;
                    Sums& to = C::kBlocks ? parts[j] : sums[j];
                    megakernel::multiply_add(to, {{upper[p], lower[p], upper[p + 1], lower[p + 1]}}, {{x.x, x.y}});
                    megakernel::multiply_add(to, {{upper[p + 2], lower[p + 2], upper[p + 3], lower[p + 3]}},
                                             {{x.z, x.w}});
                }
            }
        }
        if constexpr (C::kBlocks) {  // a step is within one block of each half of the rows
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[j][i] += parts[j][i] * __uint_as_float(i < 2 ? step.upper_word : step.lower_word);
                }
            }
        }
    }
}

}  // namespace north_jax::warp_decode
