// What several SMs do for a row's draw: the passes of the search, and the mass of each block of tokens.
#include "csrc/reference/operations/sample.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "csrc/reference/operations/operation.h"

namespace north_jax::megakernel {
namespace {

SearchBuffer search_of(const Context& context, const Task& task, Field field, int32_t row) {
    return {context.buffer<std::byte>(task, field) + row * SearchBuffer::kBytes};
}

// The search after `pass`, from its state before it and its complete histogram.
Search fold(const RowSampling& row, const SearchBuffer& buffer, int32_t pass) {
    const Search& search = buffer.state(pass);
    const uint64_t* bins = buffer.histogram(pass);
    uint64_t total = 0;
    for (int32_t bin = 0; bin < kBins; ++bin) total += bins[bin];
    const uint64_t target = target_of(row, search, pass, total);
    uint64_t above = search.above;
    int32_t digit = kBins - 1;
    while (digit > 0 && above + bins[digit] < target) above += bins[digit--];
    return next_search(row, search, pass, digit, above, target);
}

void add(uint64_t* bins, int32_t bin, uint64_t measure) {
    if (bin >= 0) std::atomic_ref(bins[bin]).fetch_add(measure, std::memory_order_relaxed);
}

}  // namespace

Best likeliest(const Context& context, const Task& task, int32_t row) {
    const Best* ranges = range_best(context, task, row);
    Best best{-std::numeric_limits<float>::infinity(), -1};
    for (int32_t range = 0; range < task[FIELD_DEALERS]; ++range) {
        const Best& other = ranges[range * kMaxLogprobs];
        if (std::isnan(best.logit) || other.logit < best.logit) continue;
        if (other.logit == best.logit && best.token >= 0 && best.token < other.token) continue;
        best = other;
    }
    return best;
}

void sample_histogram(Context& context, const Task& task) {
    const int32_t pass = task[FIELD_SPLIT], range = task[FIELD_DEALER];
    const int32_t begin = task[FIELD_ROW_BEGIN], end = begin + task[FIELD_ROW_COUNT];
    for (const int32_t number : context.live_rows(task)) {
        const RowSampling row = sampling_of(context, number);
        const Best best = likeliest(context, task, number);
        if (!row.in_pass(pass) || !std::isfinite(best.logit)) continue;
        const SearchBuffer buffer = search_of(context, task, FIELD_OUTPUT, number);
        const Search search = pass == 0 ? first_search(row) : fold(row, buffer, pass - 1);
        if (range == 0) buffer.state(pass) = search;
        uint64_t* bins = buffer.histogram(pass);
        const bool by_mass = row.by_mass(pass);
        const Distribution distribution(context, task, number, best.logit);
        for (int32_t token = begin; token < end; ++token) {
            const float weight = distribution.weight(token);
            add(bins, search.bin_of_token(bits_of(weight), pass), by_mass ? fixed_point(weight) : 1);
        }
        if (range != 0 || pass < kSearchPasses) continue;
        const float tied = float_of(static_cast<int32_t>(search.top_k_weight));
        add(bins, search.bin(search.top_k_weight, pass), fixed_point(tied) * search.top_k_ties);
    }
}

void sample_mass(Context& context, const Task& task) {
    const int32_t vocabulary = context.geometry.vocabulary, blocks = ceil_div(vocabulary, kSampleBlock);
    const int32_t begin = task[FIELD_ROW_BEGIN], end = begin + task[FIELD_ROW_COUNT];
    for (const int32_t number : context.live_rows(task)) {
        const RowSampling row = sampling_of(context, number);
        const Best best = likeliest(context, task, number);
        if (!row.in_mass() || !std::isfinite(best.logit)) continue;
        const SearchBuffer buffer = search_of(context, task, FIELD_INPUT_3, number);
        const Cut cut = cut_of(row, row.passes() > 0 ? fold(row, buffer, row.passes() - 1) : Search{});
        const Distribution distribution(context, task, number, best.logit);
        BlockMass* out = context.buffer<BlockMass>(task, FIELD_OUTPUT) + int64_t{number} * blocks;
        for (int32_t first = begin; first < end; first += kSampleBlock) {
            const int32_t count = smaller(kSampleBlock, end - first);
            BlockMass& mass = out[first / kSampleBlock] = {0, 0, 0, 0, cut, {}};
            if (row.draws()) {
                const auto weight = [&](int32_t i) { return distribution.weight(first + i); };
                const auto from = [&](uint32_t least) {
                    return block_sum([&](int32_t i) { return bits_of(weight(i)) >= least ? weight(i) : 0.0f; }, count);
                };
                mass.all = from(cut.weight);
                mass.above = from(cut.weight + 1);
                for (int32_t i = 0; i < count; ++i) mass.ties += bits_of(weight(i)) == cut.weight;
            }
            if (row.reports()) {
                mass.likelihood = block_sum([&](int32_t i) { return distribution.likelihood(first + i); }, count);
            }
        }
    }
}

}  // namespace north_jax::megakernel
