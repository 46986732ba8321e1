// SAMPLE_DRAW: a row's token, its log-probabilities, and what follows from it for the row. One warp draws, in the order
// of additions that sampling.py's _running_sums and _block_sums define.
#pragma once

#include "csrc/megakernel/operations/sample.cuh"
#include "csrc/megakernel/threefry.h"

namespace north_jax::megakernel {

// The sum of what the lanes before this one hold, added in order; `total` is that of all.
__device__ inline float sum_before(float own, int lane, float* total) {
    float before = 0, sum = 0;
#pragma unroll
    for (int l = 0; l < 32; ++l) {
        if (l == lane) before = sum;
        sum = __fadd_rn(sum, __shfl_sync(~0u, own, l));
    }
    *total = sum;
    return before;
}

// The sum of this lane's part of n values.
__device__ inline float group_sum(const float* values, int n, int lane) {
    const int each = (n + 31) / 32;
    float sum = 0;
    for (int i = lane * each; i < min((lane + 1) * each, n); ++i) sum = __fadd_rn(sum, values[i]);
    return sum;
}

// The first of n values at which the running sum exceeds `uniform` of the total; 0 where there is nothing.
__device__ inline int pick(const float* values, int n, float uniform, int lane) {
    const int each = (n + 31) / 32;
    float total;
    const float own = group_sum(values, n, lane), before = sum_before(own, lane, &total);
    const float beyond = __fmul_rn(uniform, total);
    const uint32_t reached = __ballot_sync(~0u, __fadd_rn(before, own) > beyond);
    const int group = reached == 0 ? 0 : __ffs(static_cast<int>(reached)) - 1;
    int picked = 0;
    if (lane == group && reached != 0) {
        float sum = 0;
        for (int i = lane * each; i < min((lane + 1) * each, n); ++i) {
            sum = __fadd_rn(sum, values[i]);
            picked = i;
            if (__fadd_rn(before, sum) > beyond) break;
        }
    }
    return __shfl_sync(~0u, picked, group);
}

// One row's draw, by one warp.
struct Draw {
    const Context& c;
    const RowSampling row;
    const Best best;
    const Weights weights;
    const BlockMass* mass;
    const int blocks;
    float* values;  // [kMostBlocks], shared memory
    const int lane;

    __device__ Draw(const Context& c, int b, float* values, int lane)
        : c(c),
          row(sampling_of(c, b)),
          best(likeliest(c, b, lane)),
          weights(weights_of(c, b, best.logit)),
          mass(c.buffer<const BlockMass>(FIELD_INPUT_3) +
               static_cast<int64_t>(b) * ((row.vocabulary + kSampleBlock - 1) / kSampleBlock)),
          blocks((row.vocabulary + kSampleBlock - 1) / kSampleBlock),
          values(values),
          lane(lane) {}

    // What the row keeps of a block's token 32 · r + lane, of which `seen` were at the cut before; counts those here.
    __device__ float kept(const Cut& cut, int ties, int token, int* seen) const {
        const bool there = token < row.vocabulary;
        const float weight = there ? weights.of(token) : 0;
        const bool tied = there && bits_of(weight) == cut.weight;
        const uint32_t ballot = __ballot_sync(~0u, tied);
        const int rank = *seen + __popc(ballot & ((1u << lane) - 1));
        *seen += __popc(ballot);
        return there && (bits_of(weight) > cut.weight || (tied && rank < ties)) ? weight : 0;
    }

    // The mass of each block, into `values`. A block keeps all that are at the cut, or none; one may keep some.
    __device__ void block_values(const Cut& cut) const {
        int before = 0, partial = -1, partial_ties = 0;
        for (int first = 0; first < blocks; first += 32) {
            const int i = first + lane;
            const BlockMass here = i < blocks ? mass[i] : BlockMass{};
            int until = here.ties;  // of the blocks up to this one, after the scan
            for (int o = 1; o < 32; o *= 2) {
                const int other = __shfl_up_sync(~0u, until, o);
                if (lane >= o) until += other;
            }
            const int ties = min(here.ties, max(cut.ties - (before + until - here.ties), 0));
            if (i < blocks) values[i] = ties == here.ties ? here.all : here.above;
            const uint32_t some = __ballot_sync(~0u, ties != 0 && ties != here.ties);
            if (some != 0) {
                const int at = __ffs(static_cast<int>(some)) - 1;
                partial = first + at;
                partial_ties = __shfl_sync(~0u, ties, at);
            }
            before += __shfl_sync(~0u, until, 31);
        }
        if (partial >= 0) {
            float sum = 0;
            int seen = 0;
            for (int i = lane; i < kSampleBlock; i += 32) {
                sum = __fadd_rn(sum, kept(cut, partial_ties, partial * kSampleBlock + i, &seen));
            }
            for (int o = 16; o > 0; o /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, o));
            __syncwarp();
            if (lane == 0) values[partial] = sum;
        }
        __syncwarp();
    }

    // How many tokens at the cut a block keeps.
    __device__ int ties_of(const Cut& cut, int block) const {
        int before = 0;
        for (int i = lane; i < block; i += 32) before += mass[i].ties;
        before = __reduce_add_sync(~0u, before);
        return max(cut.ties - before, 0);
    }

    // The row's logits are finite.
    __device__ int token() const {
        if (!row.draws()) return best.token;
        const Cut cut = mass[0].cut;
        const Words key{static_cast<uint32_t>(row.row[ROW_SEED_HIGH]), static_cast<uint32_t>(row.row[ROW_SEED_LOW])};
        const uint32_t position = static_cast<uint32_t>(row.row[ROW_POSITION]) + 1;
        block_values(cut);
        const int block = pick(values, blocks, uniform(key, position, 0), lane), first = block * kSampleBlock;
        const int ties = ties_of(cut, block);
        __syncwarp();
        int seen = 0;
        for (int i = lane; i < kSampleBlock; i += 32) values[i] = kept(cut, ties, first + i, &seen);
        __syncwarp();
        return first + pick(values, min(kSampleBlock, row.vocabulary - first), uniform(key, position, 1), lane);
    }

    // Writes the log-probabilities of `token` and of the likeliest ones to the row's parameters.
    __device__ void report(int token, int* parameters) const {
        __syncwarp();
        for (int i = lane; i < blocks; i += 32) values[i] = mass[i].likelihood;
        __syncwarp();
        float total;
        sum_before(group_sum(values, blocks, lane), lane, &total);
        total = logf(total);
        const auto logprob = [&](float logit) { return static_cast<int>(bits_of((logit - best.logit) - total)); };
        if (lane == 0) parameters[ROW_LOGPROB] = logprob(weights.logits[token]);
        const int ranges = c.field(FIELD_DEALERS), wanted = row.alternatives();
        const int64_t b = (parameters - c.batch.rows) / kRowFields;
        const Best* lists = c.buffer<const Best>(FIELD_INPUT_2) + b * ranges * kMaxLogprobs;
        Best last = best;
        for (int n = 0; n < kMaxLogprobs; ++n) {
            if (n > 0 && n < wanted) {
                Best next{-INFINITY, INT_MAX};
                for (int r = lane; r < ranges; r += 32) {
                    for (int i = 0; i < wanted; ++i) {  // in order: the first that ranks after the last one is the best
                        const Best other = lists[r * kMaxLogprobs + i];
                        if (!other.beaten_by(last)) continue;
                        if (next.beaten_by(other)) next = other;
                        break;
                    }
                }
                last = warp_best(next);
            }
            if (lane != 0) continue;
            const bool there = n < wanted && last.logit > -INFINITY;
            parameters[ROW_TOP_TOKEN + n] = there ? last.token : -1;
            parameters[ROW_TOP_LOGPROB + n] = there ? logprob(last.logit) : 0;
        }
        __syncwarp();
    }
};

// What follows from a drawn token for its row, -1 where the logits are not finite; by one thread.
__device__ inline void finish_row(const Context& c, int* row, int token, bool cancelled) {
    if (cancelled || token < 0) {
        row[ROW_FINISH] = cancelled ? FINISH_CANCELLED : FINISH_ERROR;
        row[ROW_REMAINING] = 0;
        return;
    }
    if (row[ROW_HISTORY] > 0) {
        c.batch.counts[(row[ROW_HISTORY] - 1) * static_cast<int64_t>(c.plan.geometry.vocabulary) + token] += 1;
    }
    bool stops = false;
    for (int i = 0; i < kStopTokens; ++i) stops |= row[ROW_STOP + i] == token;
    const int remaining = stops ? 0 : row[ROW_REMAINING] - 1;
    row[ROW_TOKEN] = token;
    row[ROW_POSITION] += 1;
    row[ROW_REMAINING] = remaining;
    row[ROW_FINISH] = stops ? FINISH_STOP : remaining == 0 ? FINISH_LENGTH : FINISH_NONE;
}

// Draws the token of each row by one warp, while the others clear what the row's search left in its histograms.
__device__ __noinline__ inline bool sample_draw(const Context& c, const Team& team, SampleScratch* s) {
    if (!wait_task(c, team)) return false;
    for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
        const bool live = c.live(b);
        const int passes = sampling_of(c, b).passes();
        team.sync();  // everybody knows before the row changes
        if (!live) continue;
        if (team.warp() > 0) {
            uint4* bins = reinterpret_cast<uint4*>(search_of(c, FIELD_OUTPUT, b).histogram(0));
            const int count = passes * kBins * static_cast<int>(sizeof(uint64_t) / 4) / 4;
            for (int i = team.thread - 32; i < count; i += team.threads - 32) bins[i] = make_uint4(0, 0, 0, 0);
            continue;
        }
        const Draw draw(c, b, s->values, team.lane());
        const int token = isfinite(draw.best.logit) ? draw.token() : -1;
        if (token >= 0 && draw.row.reports()) draw.report(token, c.row(b));
        __syncwarp();  // the row's parameters have been read
        if (team.leader()) {
            const bool cancelled = load_acquire_system(&c.channel->cancel[b]) == c.quantum.number;
            finish_row(c, c.row(b), token, cancelled);
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
