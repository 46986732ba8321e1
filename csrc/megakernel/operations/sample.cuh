// Sampling as north_jax/sampling.py describes it: what is kept, the mass of each block of tokens, the draw.
#pragma once

#include "csrc/megakernel/operations/head.cuh"
#include "csrc/megakernel/threefry.h"

namespace north_jax::megakernel {

// Shared memory of the team that samples.
struct SampleScratch {
    uint64_t mass[256];  // of a radix digit: fixed-point weight, or a number of tokens
    float chunk[kSampleBlock];
    uint64_t result[3];
    Best best;
    int picked;
};

// The tokens that a row keeps: those of weight above `weight`, and those that equal it up to token `last`.
struct Kept {
    uint32_t weight;  // bits of a float >= 0, which order as the floats do
    int last;

    __device__ bool has(uint32_t w, int token) const { return w > weight || (w == weight && token <= last); }
};

// One row's weights, the largest 1.
struct Weights {
    const float* logits;
    float largest;
    float temperature;

    __device__ float of(int token) const { return expf((logits[token] - largest) / temperature); }
};

__device__ inline uint64_t fixed_point(float weight) { return static_cast<uint64_t>(weight * 0x1p40f); }

// Of the kept tokens, ranked by weight, the shortest prefix whose measure reaches `target`; a token measures 1, or with
// `by_mass` its weight. Radix digits from the top: the counts of a digit are exact integers, so any order gives the
// same.
__device__ inline Kept shortest_prefix(const Team& team, const Weights& weights, int tokens, const Kept& kept,
                                       bool by_mass, uint64_t target, SampleScratch* s) {
    uint32_t prefix = 0;
    uint64_t above = 0;  // measure of the tokens above all that begin with `prefix`
    for (int shift = 24; shift >= 0; shift -= 8) {
        team.sync();
        for (int i = team.thread; i < 256; i += team.threads) s->mass[i] = 0;
        team.sync();
        for (int t = team.thread; t < tokens; t += team.threads) {
            const float weight = weights.of(t);
            const uint32_t bits = __float_as_uint(weight);
            if (!kept.has(bits, t) || (shift < 24 && bits >> (shift + 8) != prefix)) continue;
            atomicAdd(reinterpret_cast<unsigned long long*>(&s->mass[bits >> shift & 255]),
                      by_mass ? fixed_point(weight) : 1ull);
        }
        team.sync();
        if (team.leader()) {
            int digit = 255;
            while (digit > 0 && above + s->mass[digit] < target) above += s->mass[digit--];
            s->result[0] = digit;
            s->result[1] = above;
        }
        team.sync();
        prefix = prefix << 8 | static_cast<uint32_t>(s->result[0]);
        above = s->result[1];
    }
    // Of the tokens that weigh exactly `prefix`, the lowest few: as many as it takes to reach the target.
    const uint64_t each = by_mass ? fixed_point(__uint_as_float(prefix)) : 1;
    const uint64_t missing = target > above ? target - above : 1;
    uint64_t ties = each > 0 ? (missing + each - 1) / each : tokens;
    if (ties == 0) ties = 1;
    team.sync();
    if (team.warp() == 0) {
        int last = tokens - 1;
        uint64_t seen = 0;
        for (int first = 0; first < tokens; first += 32) {
            const int t = first + team.lane();
            const bool tie = t < tokens && __float_as_uint(weights.of(t)) == prefix && kept.has(prefix, t);
            uint32_t ballot = __ballot_sync(~0u, tie);
            if (seen + __popc(ballot) >= ties) {
                for (uint64_t n = seen + 1; n < ties; ++n) ballot &= ballot - 1;
                last = first + __ffs(ballot) - 1;
                break;
            }
            seen += __popc(ballot);
        }
        if (team.lane() == 0) s->picked = last;
    }
    team.sync();
    return {prefix, s->picked};
}

// Fixed-point weight of all kept tokens.
__device__ inline uint64_t kept_mass(const Team& team, const Weights& weights, int tokens, const Kept& kept,
                                     SampleScratch* s) {
    team.sync();
    if (team.leader()) s->mass[0] = 0;
    team.sync();
    uint64_t sum = 0;
    for (int t = team.thread; t < tokens; t += team.threads) {
        const float weight = weights.of(t);
        if (kept.has(__float_as_uint(weight), t)) sum += fixed_point(weight);
    }
    atomicAdd(reinterpret_cast<unsigned long long*>(&s->mass[0]), sum);
    team.sync();
    return s->mass[0];
}

__device__ __noinline__ inline bool sample_cutoff(const Context& c, const Team& team, SampleScratch* s) {
    if (!wait_task(c, team)) return false;
    const int tokens = c.plan.geometry.vocabulary, ranges = c.field(FIELD_DEALERS);
    const float* logits = c.buffer<const float>(FIELD_INPUT);
    const int32_t* range_best = c.buffer<const int32_t>(FIELD_INPUT_2);
    int32_t* out = c.buffer<int32_t>(FIELD_OUTPUT);
    for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
        if (!c.live(b)) continue;
        if (team.warp() == 0) {
            Best best{-INFINITY, INT_MAX};
            for (int r = team.lane(); r < ranges; r += 32) {
                const int32_t* from = range_best + (b * ranges + r) * 2;
                const Best other{__int_as_float(from[0]), from[1]};
                if (best.beaten_by(other)) best = other;
            }
            best = warp_best(best);
            if (team.lane() == 0) s->best = best;
        }
        team.sync();
        const Best best = s->best;
        const int* row = c.row(b);
        const float temperature = __int_as_float(row[ROW_TEMPERATURE]);
        Kept kept{0, tokens - 1};
        if (temperature > 0 && isfinite(best.logit)) {
            const Weights weights{logits + static_cast<int64_t>(b) * tokens, best.logit, temperature};
            const int top_k = row[ROW_TOP_K];
            const float top_p = __int_as_float(row[ROW_TOP_P]), min_p = __int_as_float(row[ROW_MIN_P]);
            if (top_k > 0 && top_k < tokens) {
                kept = shortest_prefix(team, weights, tokens, kept, false, top_k, s);
            }
            if (top_p < 1) {
                const uint64_t mass = kept_mass(team, weights, tokens, kept, s);
                const uint64_t target = static_cast<uint64_t>(static_cast<double>(top_p) * static_cast<double>(mass));
                kept = shortest_prefix(team, weights, tokens, kept, true, max(target, uint64_t{1}), s);
            }
            if (__float_as_uint(min_p) > kept.weight) kept = {__float_as_uint(min_p), tokens - 1};
        }
        if (team.leader()) {
            int32_t* to = out + b * 4;
            to[0] = __float_as_int(best.logit);
            to[1] = best.token;
            to[2] = static_cast<int32_t>(kept.weight);
            to[3] = kept.last;
        }
        team.sync();
    }
    arrive_task(c, team);
    return true;
}

// What CUTOFF says of a row.
struct RowCutoff {
    Best best;
    Kept kept;
    Weights weights;
    bool draws;  // neither greedy nor without a finite maximum

    __device__ RowCutoff(const Context& c, int b, const float* logits, const int32_t* cutoff) {
        const int32_t* from = cutoff + b * 4;
        best = {__int_as_float(from[0]), from[1]};
        kept = {static_cast<uint32_t>(from[2]), from[3]};
        const float temperature = __int_as_float(c.row(b)[ROW_TEMPERATURE]);
        weights = {logits + static_cast<int64_t>(b) * c.plan.geometry.vocabulary, best.logit, temperature};
        draws = temperature > 0 && isfinite(best.logit);
    }
    __device__ float weight(int token) const {
        const float w = weights.of(token);
        return kept.has(__float_as_uint(w), token) ? w : 0;
    }
};

__device__ __noinline__ inline bool sample_mass(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const int tokens = c.plan.geometry.vocabulary, blocks = (tokens + kSampleBlock - 1) / kSampleBlock;
    const int begin = c.field(FIELD_ROW_BEGIN) / kSampleBlock;
    const int end = (c.field(FIELD_ROW_BEGIN) + c.field(FIELD_ROW_COUNT) + kSampleBlock - 1) / kSampleBlock;
    const float* logits = c.buffer<const float>(FIELD_INPUT);
    const int32_t* cutoff = c.buffer<const int32_t>(FIELD_INPUT_2);
    float* out = c.buffer<float>(FIELD_OUTPUT);
    for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
        if (!c.live(b)) continue;
        const RowCutoff row(c, b, logits, cutoff);
        if (!row.draws) continue;
        for (int block = begin + team.warp(); block < end; block += team.warps()) {
            float sum = 0;
            for (int i = team.lane(); i < kSampleBlock && block * kSampleBlock + i < tokens; i += 32) {
                sum += row.weight(block * kSampleBlock + i);
            }
            sum = warp_sum(sum);
            if (team.lane() == 0) out[b * blocks + block] = sum;
        }
    }
    arrive_task(c, team);
    return true;
}

// The first of `count` entries at which the running sum exceeds `uniform` of the total, among those above 0.
template <class Weight>
__device__ int pick(const Team& team, int count, float uniform, Weight weight, SampleScratch* s) {
    float total = 0, sum = 0;
    int picked = -1, last = 0;
    for (int pass = 0; pass < 2; ++pass) {
        for (int first = 0; first < count; first += kSampleBlock) {
            const int some = min(kSampleBlock, count - first);
            team.sync();
            for (int i = team.thread; i < some; i += team.threads) s->chunk[i] = weight(first + i);
            team.sync();
            if (!team.leader()) continue;
            for (int i = 0; i < some; ++i) {
                const float w = s->chunk[i];
                if (pass == 0) {
                    total += w;
                    continue;
                }
                sum += w;
                if (w > 0) last = first + i;
                if (picked < 0 && w > 0 && sum > uniform * total) picked = first + i;
            }
        }
    }
    if (team.leader()) s->picked = picked < 0 ? last : picked;
    team.sync();
    return s->picked;
}

// Draws the token of each row, and what follows from it for the row.
__device__ __noinline__ inline bool sample_draw(const Context& c, const Team& team, SampleScratch* s) {
    if (!wait_task(c, team)) return false;
    const int tokens = c.plan.geometry.vocabulary, blocks = (tokens + kSampleBlock - 1) / kSampleBlock;
    const float* logits = c.buffer<const float>(FIELD_INPUT);
    const int32_t* cutoff = c.buffer<const int32_t>(FIELD_INPUT_2);
    const float* mass = c.buffer<const float>(FIELD_INPUT_3);
    for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
        const bool live = c.live(b);
        team.sync();  // everybody knows before the leader changes it
        if (!live) continue;
        int* row = c.row(b);
        const RowCutoff kept(c, b, logits, cutoff);
        int token = kept.best.token;
        if (kept.draws) {
            const Words key{static_cast<uint32_t>(row[ROW_SEED_HIGH]), static_cast<uint32_t>(row[ROW_SEED_LOW])};
            const uint32_t position = static_cast<uint32_t>(row[ROW_POSITION]) + 1;
            const float* of_row = mass + b * blocks;
            const int block = pick(team, blocks, uniform(key, position, 0), [&](int i) { return of_row[i]; }, s);
            const int first = block * kSampleBlock, some = min(kSampleBlock, tokens - first);
            token =
                first + pick(team, some, uniform(key, position, 1), [&](int i) { return kept.weight(first + i); }, s);
        }
        if (!team.leader()) continue;
        if (load_acquire_system(&c.channel->cancel[b]) == c.quantum.number) {
            row[ROW_FINISH] = FINISH_CANCELLED;
            row[ROW_REMAINING] = 0;
        } else if (!isfinite(kept.best.logit)) {
            row[ROW_FINISH] = FINISH_ERROR;
            row[ROW_REMAINING] = 0;
        } else {
            bool stops = false;
            for (int i = 0; i < kStopTokens; ++i) stops |= row[ROW_STOP + i] == token;
            const int remaining = stops ? 0 : row[ROW_REMAINING] - 1;
            row[ROW_TOKEN] = token;
            row[ROW_POSITION] += 1;
            row[ROW_REMAINING] = remaining;
            row[ROW_FINISH] = stops ? FINISH_STOP : remaining == 0 ? FINISH_LENGTH : FINISH_NONE;
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
