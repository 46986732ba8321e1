#include "csrc/reference/operations/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "csrc/megakernel/threefry.h"
#include "csrc/reference/operations/operation.h"
#include "csrc/reference/text.h"

namespace north_jax::megakernel {
namespace {

// One row's distribution.
class Distribution {
   public:
    Distribution(const Context& context, const float* logits, int32_t row, float largest)
        : logits_(logits), largest_(largest), temperature_(real(context, row, ROW_TEMPERATURE)) {}

    static float real(const Context& context, int32_t row, Row which) {
        return std::bit_cast<float>(context.parameter(row, which));
    }

    // A row without a temperature takes the likeliest token.
    bool draws() const { return temperature_ > 0; }

    float weight(int32_t token) const { return std::exp((logits_[token] - largest_) / temperature_); }

   private:
    const float* logits_;
    float largest_;
    float temperature_;
};

struct Ranked {
    float weight;
    int32_t token;

    bool operator<(const Ranked& other) const {  // less likely
        return weight < other.weight || (weight == other.weight && token > other.token);
    }
};

// An entry of CUTOFF.
struct Cutoff {
    float largest;
    int32_t token;  // that has it
    float least;    // weight that is kept
    int32_t last;   // token that is kept at it

    float kept(float weight, int32_t id) const {
        return weight > least || (weight == least && id <= last) ? weight : 0.0f;
    }
};

// The last token, by rank, that the row's filters keep.
Ranked last_kept(const Context& context, int32_t row, const Distribution& distribution) {
    const int32_t vocabulary = context.geometry.vocabulary;
    const int32_t top_k = context.parameter(row, ROW_TOP_K);
    const float top_p = Distribution::real(context, row, ROW_TOP_P),
                min_p = Distribution::real(context, row, ROW_MIN_P);
    if (top_k <= 0 && top_p >= 1 && !(min_p > 0)) return {0.0f, vocabulary - 1};
    std::vector<Ranked> tokens(vocabulary);
    for (int32_t token = 0; token < vocabulary; ++token) tokens[token] = {distribution.weight(token), token};
    if (top_k > 0 && top_k < vocabulary) {
        const auto likelier = [](const Ranked& a, const Ranked& b) { return b < a; };
        std::partial_sort(tokens.begin(), tokens.begin() + top_k, tokens.end(), likelier);
        tokens.resize(top_k);
    }
    double total = 0;
    for (const Ranked& one : tokens) total += one.weight;
    // Few are kept as a rule: a heap gives them in order without sorting the others.
    std::make_heap(tokens.begin(), tokens.end());
    double before = 0;
    Ranked last = tokens.front();  // always kept
    const float best = last.weight;
    while (!tokens.empty()) {
        const Ranked next = tokens.front();
        const bool kept = (top_p >= 1 || before < top_p * total) && next.weight >= min_p * best;
        if (!kept && before > 0) break;
        last = next;
        before += next.weight;
        std::pop_heap(tokens.begin(), tokens.end());
        tokens.pop_back();
    }
    return last;
}

Cutoff read_cutoff(const Context& context, const Task& task, int32_t row) {
    const int32_t* entry = context.buffer<const int32_t>(task, FIELD_INPUT_2) + int64_t{row} * 4;
    return {std::bit_cast<float>(entry[0]), entry[1], std::bit_cast<float>(entry[2]), entry[3]};
}

// The first of n entries at which the sum of weights exceeds `uniform` of the total, as sampling._pick; -1 where
// nothing has weight.
template <typename WeightOf>
int32_t pick(int32_t n, float uniform, WeightOf weight_of) {
    double total = 0;
    for (int32_t i = 0; i < n; ++i) total += weight_of(i);
    if (!(total > 0)) return -1;
    double sum = 0;
    int32_t last = 0;  // where rounding leads past the end
    for (int32_t i = 0; i < n; ++i) {
        const float weight = weight_of(i);
        if (!(weight > 0)) continue;
        sum += weight;
        last = i;
        if (sum > uniform * total) break;
    }
    return last;
}

// The row's token, -1 where its logits are not finite.
int32_t draw(const Context& context, const Task& task, int32_t row) {
    const Cutoff cutoff = read_cutoff(context, task, row);
    if (!std::isfinite(cutoff.largest)) return -1;
    const int32_t vocabulary = context.geometry.vocabulary;
    const float* logits = context.buffer<const float>(task, FIELD_INPUT) + int64_t{row} * vocabulary;
    const Distribution distribution(context, logits, row, cutoff.largest);
    if (!distribution.draws()) return cutoff.token;

    const int32_t blocks = ceil_div(vocabulary, kSampleBlock);
    const float* mass = context.buffer<const float>(task, FIELD_INPUT_3) + int64_t{row} * blocks;
    const Words seed{static_cast<uint32_t>(context.parameter(row, ROW_SEED_HIGH)),
                     static_cast<uint32_t>(context.parameter(row, ROW_SEED_LOW))};
    const uint32_t position = static_cast<uint32_t>(context.parameter(row, ROW_POSITION)) + 1;
    const int32_t block = pick(blocks, uniform(seed, position, 0), [&](int32_t i) { return mass[i]; });
    const int32_t first = larger(block, 0) * kSampleBlock, count = smaller(kSampleBlock, vocabulary - first);
    const int32_t within = pick(count, uniform(seed, position, 1),
                                [&](int32_t i) { return cutoff.kept(distribution.weight(first + i), first + i); });
    // The likeliest token has weight.
    if (block < 0 || within < 0)
        context.fail(task, text("row ", row, ": MASS or CUTOFF was read before it was written"));
    return first + within;
}

}  // namespace

void sample_cutoff(Context& context, const Task& task) {
    const Geometry& g = context.geometry;
    for (const int32_t row : context.live_rows(task)) {
        const int32_t* ranges =
            context.buffer<const int32_t>(task, FIELD_INPUT_2) + int64_t{row} * task[FIELD_DEALERS] * 2;
        float largest = -std::numeric_limits<float>::infinity();
        int32_t token = -1;
        for (int32_t range = 0; range < task[FIELD_DEALERS]; ++range) {
            const float best = std::bit_cast<float>(ranges[2 * range]);
            if (std::isnan(largest) || best < largest) continue;
            if (best == largest && (token >= 0 && token < ranges[2 * range + 1])) continue;
            largest = best;
            token = ranges[2 * range + 1];
        }
        Ranked last{1.0f, token};
        if (std::isfinite(largest)) {
            const float* logits = context.buffer<const float>(task, FIELD_INPUT) + int64_t{row} * g.vocabulary;
            const Distribution distribution(context, logits, row, largest);
            if (distribution.draws()) last = last_kept(context, row, distribution);
        }
        int32_t* out = context.buffer<int32_t>(task, FIELD_OUTPUT) + int64_t{row} * 4;
        out[0] = std::bit_cast<int32_t>(largest);
        out[1] = token;
        out[2] = std::bit_cast<int32_t>(last.weight);
        out[3] = last.token;
    }
}

void sample_mass(Context& context, const Task& task) {
    const int32_t vocabulary = context.geometry.vocabulary, blocks = ceil_div(vocabulary, kSampleBlock);
    const int32_t begin = task[FIELD_ROW_BEGIN], end = begin + task[FIELD_ROW_COUNT];
    for (const int32_t row : context.live_rows(task)) {
        const Cutoff cutoff = read_cutoff(context, task, row);
        const float* logits = context.buffer<const float>(task, FIELD_INPUT) + int64_t{row} * vocabulary;
        const Distribution distribution(context, logits, row, cutoff.largest);
        if (!distribution.draws() || !std::isfinite(cutoff.largest)) continue;  // nobody will ask
        float* out = context.buffer<float>(task, FIELD_OUTPUT) + int64_t{row} * blocks;
        for (int32_t first = begin; first < end; first += kSampleBlock) {
            double sum = 0;
            for (int32_t token = first; token < smaller(end, first + kSampleBlock); ++token) {
                sum += cutoff.kept(distribution.weight(token), token);
            }
            out[first / kSampleBlock] = static_cast<float>(sum);
        }
    }
}

bool draw_row(Context& context, const Task& task, int32_t row) {
    const bool cancelled = context.cancelled(row);
    const int32_t token = cancelled ? -1 : draw(context, task, row);
    if (!cancelled && (token < -1 || token >= context.geometry.vocabulary)) {
        context.fail(task, text("row ", row, ": CUTOFF was read before it was written"));
    }
    const int32_t remaining = context.parameter(row, ROW_REMAINING) - 1;
    const int32_t* stops = &context.parameter(row, ROW_STOP);
    Finish finish = FINISH_NONE;
    if (token < 0) {
        finish = cancelled ? FINISH_CANCELLED : FINISH_ERROR;
    } else if (std::find(stops, stops + kStopTokens, token) != stops + kStopTokens) {
        finish = FINISH_STOP;
    } else if (remaining == 0) {
        finish = FINISH_LENGTH;
    }
    if (!context.publish(task.step, row, token, finish)) return false;
    if (token >= 0) {
        context.parameter(row, ROW_TOKEN) = token;
        ++context.parameter(row, ROW_POSITION);
    }
    context.parameter(row, ROW_FINISH) = finish;
    context.parameter(row, ROW_REMAINING) = finish == FINISH_NONE ? remaining : 0;
    return true;
}

}  // namespace north_jax::megakernel
