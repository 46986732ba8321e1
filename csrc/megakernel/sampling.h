// Sampling as C++ and CUDA compute it alike: what penalties make of a logit, the passes of the search for what a row
// keeps, and the order in which weights are summed. The same as north_jax/adjust.py and north_jax/sampling.py.
//
// A weight is exp((logit - largest) / temperature), a float32 in [0, 1], so that its bits order as it does. Kept are
// the first tokens by descending weight and then ascending id: those above a least weight, and the first few at it. The
// search goes through the 30 bits of the least weight in three passes of ten, by a histogram each: of tokens for top-k,
// of fixed-point weight for top-p. Both are integers, so any order of additions gives the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "csrc/host_device.h"
#include "csrc/megakernel/abi.h"

namespace north_jax::megakernel {

inline constexpr int32_t kBins = 1 << kPassBits;
inline constexpr int32_t kSearchPasses = kPasses / 2;  // of top-k, or of top-p
inline constexpr int32_t kGroups = 32;                 // of a sum: lanes of a warp
inline constexpr int32_t kAllTies = INT32_MAX;

HOST_DEVICE inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

HOST_DEVICE inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// A row's parameters [kRowFields] as questions.
struct RowSampling {
    const int32_t* row;
    int32_t vocabulary;

    HOST_DEVICE float real(Row which) const { return float_of(row[which]); }
    HOST_DEVICE bool live() const { return row[ROW_REMAINING] > 0; }
    HOST_DEVICE bool draws() const { return real(ROW_TEMPERATURE) > 0; }  // not greedy
    HOST_DEVICE bool has_top_k() const { return draws() && row[ROW_TOP_K] > 0 && row[ROW_TOP_K] < vocabulary; }
    HOST_DEVICE bool has_top_p() const { return draws() && real(ROW_TOP_P) < 1; }
    HOST_DEVICE bool reports() const { return row[ROW_LOGPROBS] > 0; }
    HOST_DEVICE int32_t alternatives() const { return row[ROW_LOGPROBS] - 1; }
    HOST_DEVICE int32_t passes() const { return kSearchPasses * (has_top_k() + has_top_p()); }

    // Whether the row takes part in SAMPLE_HISTOGRAM's pass, or in SAMPLE_MASS.
    HOST_DEVICE bool in_pass(int32_t pass) const { return live() && pass < passes(); }
    HOST_DEVICE bool in_mass() const { return live() && (draws() || reports()); }

    // Whether a pass measures weight: otherwise it counts tokens.
    HOST_DEVICE bool by_mass(int32_t pass) const { return pass >= kSearchPasses || !has_top_k(); }
};

HOST_DEVICE inline uint64_t fixed_point(float weight) { return static_cast<uint64_t>(weight * 0x1p40f); }

// Of `total` fixed-point weight, how much top_p asks for.
HOST_DEVICE inline uint64_t mass_target(float top_p, uint64_t total) {
    const auto target = static_cast<uint64_t>(static_cast<double>(top_p) * static_cast<double>(total));
    return target > 0 ? target : 1;
}

// The search of one row before a pass.
struct Search {
    uint32_t prefix;        // digits of the least weight found so far
    uint32_t top_k_weight;  // after the passes of top-k, the least weight that it keeps
    int32_t top_k_ties;     // and how many tokens at it
    int32_t unused;
    uint64_t above;   // measure of the tokens above all that begin with prefix
    uint64_t target;  // measure that is to be reached

    HOST_DEVICE static int32_t shift(int32_t pass) { return (kSearchPasses - 1 - pass % kSearchPasses) * kPassBits; }

    // The bin of a weight in a pass, -1 where it is in none.
    HOST_DEVICE int32_t bin(uint32_t weight, int32_t pass) const {
        const int32_t digits = shift(pass);
        if (pass % kSearchPasses > 0 && weight >> (digits + kPassBits) != prefix) return -1;
        return static_cast<int32_t>(weight >> digits & (kBins - 1));
    }
    // Likewise of a token. After top-k, the tokens at its least weight are not told apart: one range adds them
    // together.
    HOST_DEVICE int32_t bin_of_token(uint32_t weight, int32_t pass) const {
        return pass >= kSearchPasses && weight <= top_k_weight ? -1 : bin(weight, pass);
    }
};
static_assert(sizeof(Search) == kSearchWords * sizeof(int32_t));
static_assert(kSearchPasses * kPassBits == 30);

// What a row keeps.
struct Cut {
    uint32_t weight;  // bits of the least
    int32_t ties;     // tokens at it, the lowest ones
};

// The search before its first pass.
HOST_DEVICE inline Search first_search(const RowSampling& row) {
    return {0, 0, 0, 0, 0, row.by_mass(0) ? 0 : static_cast<uint64_t>(row.row[ROW_TOP_K])};
}

// The target of a pass, which for the first one by weight is a share of all that its histogram holds.
HOST_DEVICE inline uint64_t target_of(const RowSampling& row, const Search& search, int32_t pass, uint64_t total) {
    const bool share = pass % kSearchPasses == 0 && row.by_mass(pass);
    return share ? mass_target(row.real(ROW_TOP_P), total) : search.target;
}

// How many tokens at the weight `search.prefix` are kept after the last pass of top-k or of top-p: as many as it takes.
HOST_DEVICE inline int32_t ties_after(const RowSampling& row, const Search& search, int32_t pass) {
    const uint64_t each = row.by_mass(pass) ? fixed_point(float_of(static_cast<int32_t>(search.prefix))) : 1;
    const uint64_t missing = search.target > search.above ? search.target - search.above : 1;
    return each == 0 ? kAllTies : static_cast<int32_t>((missing + each - 1) / each);
}

// Takes what pass `pass` found: the digit at which the target is reached, from the top, and the measure above it.
HOST_DEVICE inline Search next_search(const RowSampling& row, Search search, int32_t pass, int32_t digit,
                                      uint64_t above, uint64_t target) {
    search.prefix = search.prefix << kPassBits | static_cast<uint32_t>(digit);
    search.above = above;
    search.target = target;
    if (pass == kSearchPasses - 1 && row.passes() > kSearchPasses) {  // from top-k to top-p
        search.top_k_ties = ties_after(row, search, pass);
        search.top_k_weight = search.prefix;
        search.prefix = 0;
        search.above = search.target = 0;
    }
    return search;
}

// What a row keeps, from the search after its last pass; `search` is not read where the row has none.
HOST_DEVICE inline Cut cut_of(const RowSampling& row, const Search& search) {
    Cut cut{0, kAllTies};
    if (row.passes() > 0) {
        cut = {search.prefix, ties_after(row, search, row.passes() - 1)};
        const bool both = row.passes() > kSearchPasses;
        if (both && cut.weight == search.top_k_weight && search.top_k_ties < cut.ties) cut.ties = search.top_k_ties;
    }
    const float min_p = row.real(ROW_MIN_P);
    if (row.draws() && min_p > 0 && bits_of(min_p) > cut.weight) cut = {bits_of(min_p), kAllTies};
    return cut;
}

// A row's part of SEARCH.
struct SearchBuffer {
    static constexpr int64_t kBytes = kPasses * (int64_t{kBins} * sizeof(uint64_t) + sizeof(Search));

    void* data;

    HOST_DEVICE uint64_t* histogram(int32_t pass) const { return static_cast<uint64_t*>(data) + pass * kBins; }
    HOST_DEVICE Search& state(int32_t pass) const { return reinterpret_cast<Search*>(histogram(kPasses))[pass]; }
};

// An entry of MASS.
struct BlockMass {
    float all;         // sum of the weights at or above the cut
    float above;       // of those above it
    int32_t ties;      // tokens at it
    float likelihood;  // sum of exp(logit - largest), where the row reports
    Cut cut;
    int32_t unused[2];
};
static_assert(sizeof(BlockMass) == kMassWords * sizeof(int32_t));

// A logit after the penalties of a row for a token with this entry of COUNTS.
HOST_DEVICE inline float penalised(float logit, int32_t count, float presence, float frequency, float repetition) {
    if (count > 0 && repetition != 1) logit = logit > 0 ? logit / repetition : logit * repetition;
    const int32_t generated = count & (kPromptSeen - 1);
    if (generated == 0 || (presence == 0 && frequency == 0)) return logit;
#ifdef __CUDA_ARCH__  // nothing is fused: the sum of a count and a penalty is the same everywhere
    return __fsub_rn(logit, __fadd_rn(__fmul_rn(static_cast<float>(generated), frequency), presence));
#else
    return logit - (static_cast<float>(generated) * frequency + presence);
#endif
}

}  // namespace north_jax::megakernel
