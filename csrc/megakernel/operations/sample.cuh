// Sampling before the draw: the passes of the search for what a row keeps, and the mass of each block of tokens. Every
// SM does its own vocabulary range; csrc/megakernel/sampling.h says what a pass is.
#pragma once

#include "csrc/megakernel/operations/range.cuh"

namespace north_jax::megakernel {

// Shared memory of the team that samples.
struct SampleScratch {
    union {
        uint32_t bins[kBins];  // of a range's histogram; zero between its uses
        float values[kBins];   // of a draw
    };
    Best best;
};
inline constexpr int kMostBlocks = kBins;  // of a vocabulary: a draw keeps a float for each

// The tokens of a row by weight, the largest 1.
struct Weights {
    const float* logits;
    float largest;
    float temperature;

    __device__ float of(int token) const { return expf((logits[token] - largest) / temperature); }
    __device__ float likelihood(int token) const { return expf(logits[token] - largest); }
};

__device__ inline Weights weights_of(const Context& c, int b, float largest) {
    const int64_t offset = static_cast<int64_t>(b) * c.plan.geometry.vocabulary;
    return {c.buffer<const float>(FIELD_INPUT) + offset, largest, sampling_of(c, b).real(ROW_TEMPERATURE)};
}

__device__ inline SearchBuffer search_of(const Context& c, Field field, int b) {
    return {c.buffer<std::byte>(field) + b * SearchBuffer::kBytes};
}

// The row's largest logit, from INPUT_2 (RANGE_BEST), by one warp.
__device__ inline Best likeliest(const Context& c, int b, int lane) {
    const int ranges = c.field(FIELD_DEALERS);
    const Best* from = c.buffer<const Best>(FIELD_INPUT_2) + static_cast<int64_t>(b) * ranges * kMaxLogprobs;
    Best best{-INFINITY, INT_MAX};
    for (int r = lane; r < ranges; r += 32) {
        const Best other = from[r * kMaxLogprobs];
        if (best.beaten_by(other)) best = other;
    }
    return warp_best(best);
}

// The sum of the values of this lane and of those above it.
__device__ inline uint64_t sum_from_top(uint64_t x, int lane) {
    for (int o = 1; o < 32; o *= 2) {
        const uint64_t other = __shfl_down_sync(~0u, static_cast<unsigned long long>(x), o);
        if (lane + o < 32) x += other;
    }
    return x;
}

// The search after `pass`, from its state before it and its complete histogram, by one warp.
__device__ inline Search fold(const RowSampling& row, const SearchBuffer& buffer, int pass, int lane) {
    const Search search = buffer.state(pass);
    const ulonglong2* bins = reinterpret_cast<const ulonglong2*>(buffer.histogram(pass));  // 32 bins a lane
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kBins / 64; ++i) {
        const ulonglong2 two = bins[lane * (kBins / 64) + i];
        own += two.x + two.y;
    }
    const uint64_t suffix = sum_from_top(own, lane);
    const uint64_t total = __shfl_sync(~0u, static_cast<unsigned long long>(suffix), 0);
    const uint64_t target = target_of(row, search, pass, total);
    // The highest lane at which the target is reached, and then the highest of its bins; the lowest where none does.
    const uint32_t reached = __ballot_sync(~0u, search.above + suffix >= target);
    const int chunk = reached == 0 ? 0 : 31 - __clz(static_cast<int>(reached));
    const uint64_t before = search.above + __shfl_sync(~0u, static_cast<unsigned long long>(suffix - own), chunk);
    const uint64_t bin = buffer.histogram(pass)[chunk * 32 + lane];
    const uint64_t to_bin = sum_from_top(bin, lane);
    const uint32_t here = __ballot_sync(~0u, before + to_bin >= target);
    const int last = here == 0 ? 0 : 31 - __clz(static_cast<int>(here));
    const uint64_t above = before + __shfl_sync(~0u, static_cast<unsigned long long>(to_bin - bin), last);
    return next_search(row, search, pass, chunk * 32 + last, above, target);
}
static_assert(kBins == 32 * 32);

__device__ inline void add(uint64_t* bins, int bin, uint64_t measure) {
    if (bin >= 0 && measure > 0) atomicAdd(reinterpret_cast<unsigned long long*>(bins + bin), measure);
}

// Bit i: row BATCH_BEGIN + i is one that `asks` holds of. The same for all threads of the task, and on all SMs.
template <class Asks>
__device__ uint32_t rows_that(const Context& c, int lane, Asks asks) {
    const bool mine = lane < c.field(FIELD_BATCH_COUNT) && asks(sampling_of(c, c.batch_begin() + lane));
    return __ballot_sync(~0u, mine);
}

// The first pass of a row, by the whole team: nearly all tokens count, so they are gathered in shared memory first, of
// fixed-point weights of 41 bits the lower 20 and then the upper ones. A chunk is as many tokens as cannot overflow.
__device__ inline void first_pass(const Context& c, const Team& team, int b, SampleScratch* s) {
    constexpr int kChunk = 2048, kLower = 20;
    const RowSampling row = sampling_of(c, b);
    if (team.warp() == 0) {
        const Best best = likeliest(c, b, team.lane());
        if (team.lane() == 0) s->best = best;
    }
    team.sync();
    const float largest = s->best.logit;
    team.sync();
    if (!isfinite(largest)) return;
    const Weights weights = weights_of(c, b, largest);
    const SearchBuffer buffer = search_of(c, FIELD_OUTPUT, b);
    const Search search = first_search(row);
    if (c.field(FIELD_DEALER) == 0 && team.leader()) buffer.state(0) = search;
    const bool by_mass = row.by_mass(0);
    uint64_t* bins = buffer.histogram(0);
    const int end = c.field(FIELD_ROW_BEGIN) + c.field(FIELD_ROW_COUNT);
    for (int first = c.field(FIELD_ROW_BEGIN); first < end; first += kChunk) {
        for (int part = 0; part <= by_mass; ++part) {
            for (int t = first + team.thread; t < min(first + kChunk, end); t += team.threads) {
                const float weight = weights.of(t);
                const uint64_t fixed = fixed_point(weight);
                const uint64_t measure = !by_mass ? 1 : part == 0 ? fixed & ((1u << kLower) - 1) : fixed >> kLower;
                if (measure > 0) atomicAdd(&s->bins[search.bin(bits_of(weight), 0)], static_cast<uint32_t>(measure));
            }
            team.sync();
            for (int i = team.thread; i < kBins; i += team.threads) {
                add(bins, i, static_cast<uint64_t>(s->bins[i]) << (part * kLower));
                s->bins[i] = 0;
            }
            team.sync();
        }
    }
}

// A later pass of a row, by one warp: few tokens share the digits that are known.
__device__ inline void later_pass(const Context& c, int b, int pass, int lane) {
    const RowSampling row = sampling_of(c, b);
    const Best best = likeliest(c, b, lane);
    if (!isfinite(best.logit)) return;
    const Weights weights = weights_of(c, b, best.logit);
    const SearchBuffer buffer = search_of(c, FIELD_OUTPUT, b);
    const Search search = fold(row, buffer, pass - 1, lane);
    const bool by_mass = row.by_mass(pass);
    uint64_t* bins = buffer.histogram(pass);
    const int end = c.field(FIELD_ROW_BEGIN) + c.field(FIELD_ROW_COUNT);
    for (int t = c.field(FIELD_ROW_BEGIN) + lane; t < end; t += 32) {
        const float weight = weights.of(t);
        add(bins, search.bin_of_token(bits_of(weight), pass), by_mass ? fixed_point(weight) : 1);
    }
    if (c.field(FIELD_DEALER) != 0 || lane != 0) return;
    buffer.state(pass) = search;
    if (pass < kSearchPasses) return;
    const float tied = float_of(static_cast<int32_t>(search.top_k_weight));
    add(bins, search.bin(search.top_k_weight, pass), fixed_point(tied) * search.top_k_ties);
}

__device__ __noinline__ inline bool sample_histogram(const Context& c, const Team& team, SampleScratch* s) {
    const int pass = c.field(FIELD_SPLIT);
    const uint32_t rows = rows_that(c, team.lane(), [&](const RowSampling& row) { return row.in_pass(pass); });
    if (rows != 0) {
        if (!wait_task(c, team)) return false;
        if (pass == 0) {
            for (int i = team.thread; i < kBins; i += team.threads) s->bins[i] = 0;
            team.sync();
        }
        int number = 0;
        for (uint32_t left = rows; left != 0; left &= left - 1, ++number) {
            const int b = c.batch_begin() + __ffs(static_cast<int>(left)) - 1;
            if (pass == 0) {
                first_pass(c, team, b, s);
            } else if (number % team.warps() == team.warp()) {
                later_pass(c, b, pass, team.lane());
            }
        }
    }
    arrive_task(c, team);
    return true;
}

// The blocks of the range for one row, by one warp. Sums are in the order of sampling.py's _block_sums.
__device__ inline void block_masses(const Context& c, int b, int lane) {
    const RowSampling row = sampling_of(c, b);
    const Best best = likeliest(c, b, lane);
    if (!isfinite(best.logit)) return;
    const Weights weights = weights_of(c, b, best.logit);
    const SearchBuffer buffer = search_of(c, FIELD_INPUT_3, b);
    const int passes = row.passes(), tokens = row.vocabulary, blocks = (tokens + kSampleBlock - 1) / kSampleBlock;
    const Cut cut = cut_of(row, passes > 0 ? fold(row, buffer, passes - 1, lane) : Search{});
    const bool draws = row.draws(), reports = row.reports();
    BlockMass* out = c.buffer<BlockMass>(FIELD_OUTPUT) + static_cast<int64_t>(b) * blocks;
    const int end = c.field(FIELD_ROW_BEGIN) + c.field(FIELD_ROW_COUNT);
    for (int first = c.field(FIELD_ROW_BEGIN); first < end; first += kSampleBlock) {
        BlockMass mass{};
        mass.cut = cut;
        for (int t = first + lane; t < min(first + kSampleBlock, end); t += 32) {
            if (draws) {
                const float weight = weights.of(t);
                if (bits_of(weight) >= cut.weight) mass.all = __fadd_rn(mass.all, weight);
                if (bits_of(weight) > cut.weight) mass.above = __fadd_rn(mass.above, weight);
                mass.ties += bits_of(weight) == cut.weight;
            }
            if (reports) mass.likelihood = __fadd_rn(mass.likelihood, weights.likelihood(t));
        }
        for (int o = 16; o > 0; o /= 2) {
            mass.all = __fadd_rn(mass.all, __shfl_xor_sync(~0u, mass.all, o));
            mass.above = __fadd_rn(mass.above, __shfl_xor_sync(~0u, mass.above, o));
            mass.ties += __shfl_xor_sync(~0u, mass.ties, o);
            mass.likelihood = __fadd_rn(mass.likelihood, __shfl_xor_sync(~0u, mass.likelihood, o));
        }
        if (lane == 0) out[first / kSampleBlock] = mass;
    }
}

__device__ __noinline__ inline bool sample_mass(const Context& c, const Team& team) {
    const uint32_t rows = rows_that(c, team.lane(), [](const RowSampling& row) { return row.in_mass(); });
    if (rows != 0) {
        if (!wait_task(c, team)) return false;
        int number = 0;
        for (uint32_t left = rows; left != 0; left &= left - 1, ++number) {
            if (number % team.warps() != team.warp()) continue;
            block_masses(c, c.batch_begin() + __ffs(static_cast<int>(left)) - 1, team.lane());
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
