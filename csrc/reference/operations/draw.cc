// SAMPLE_DRAW: a row's token, its log-probabilities, and what follows from it for the row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "csrc/megakernel/threefry.h"
#include "csrc/reference/operations/operation.h"
#include "csrc/reference/operations/sample.h"
#include "csrc/reference/text.h"

namespace north_jax::megakernel {
namespace {

// Running sums of values in the order of sampling.py's _running_sums.
std::vector<float> running_sums(const std::vector<float>& values) {
    const auto n = static_cast<int32_t>(values.size()), each = ceil_div(n, kGroups);
    std::vector<float> sums(values.size());
    float before = 0;
    for (int32_t first = 0; first < n; first += each) {
        float sum = 0;
        for (int32_t i = first; i < smaller(first + each, n); ++i) sums[i] = before + (sum += values[i]);
        before += sum;
    }
    return sums;
}

// The first entry at which the running sum exceeds `uniform` of the total; -1 where nothing has weight.
int32_t pick(const std::vector<float>& weights, float uniform) {
    const std::vector<float> sums = running_sums(weights);
    for (size_t i = 0; i < sums.size(); ++i) {
        if (weights[i] > 0 && sums[i] > uniform * sums.back()) return static_cast<int32_t>(i);
    }
    return -1;
}

// One row's draw.
class Draw {
   public:
    Draw(const Context& context, const Task& task, int32_t row)
        : context_(context),
          task_(task),
          row_(sampling_of(context, row)),
          best_(likeliest(context, task, row)),
          distribution_(context, task, row, best_.logit),
          ranges_(range_best(context, task, row)),
          blocks_(ceil_div(context.geometry.vocabulary, kSampleBlock)),
          mass_(context.buffer<const BlockMass>(task, FIELD_INPUT_3) + int64_t{row} * blocks_),
          cut_(mass_[0].cut) {}

    // -1 where the logits are not finite.
    int32_t token() const {
        if (!std::isfinite(best_.logit)) return -1;
        if (!row_.draws()) return best_.token;
        const Words seed{static_cast<uint32_t>(row_.row[ROW_SEED_HIGH]), static_cast<uint32_t>(row_.row[ROW_SEED_LOW])};
        const uint32_t position = static_cast<uint32_t>(row_.row[ROW_POSITION]) + 1;

        std::vector<float> masses(blocks_);
        std::vector<int32_t> ties(blocks_);  // that a block keeps
        int32_t left = cut_.ties;
        for (int32_t block = 0; block < blocks_; ++block) {
            const BlockMass& mass = mass_[block];
            ties[block] = smaller(mass.ties, left);
            left -= left == kAllTies ? 0 : ties[block];
            masses[block] = ties[block] == mass.ties ? mass.all
                            : ties[block] == 0       ? mass.above
                                                     : partial_mass(block, ties[block]);
        }
        const int32_t block = pick(masses, uniform(seed, position, 0));
        if (block < 0) unwritten();
        const int32_t within = pick(kept(block, ties[block]), uniform(seed, position, 1));
        if (within < 0) unwritten();
        return block * kSampleBlock + within;
    }

    // Writes the log-probabilities of `token` and of the likeliest ones to the row's parameters.
    void report(int32_t token, int32_t* row) const {
        std::vector<float> likelihoods(blocks_);
        for (int32_t block = 0; block < blocks_; ++block) likelihoods[block] = mass_[block].likelihood;
        const float total = std::log(running_sums(likelihoods).back());
        const auto logprob = [&](float logit) { return static_cast<int32_t>(bits_of((logit - best_.logit) - total)); };
        row[ROW_LOGPROB] = logprob(distribution_.logits[token]);

        std::vector<Best> all;
        for (int32_t range = 0; range < task_[FIELD_DEALERS]; ++range) {
            const Best* own = ranges_ + int64_t{range} * kMaxLogprobs;
            all.insert(all.end(), own, own + larger(row_.alternatives(), 1));
        }
        std::sort(all.begin(), all.end(), [](const Best& a, const Best& b) {
            return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
        });
        for (int32_t i = 0; i < kMaxLogprobs; ++i) {
            const bool there = i < row_.alternatives() && i < static_cast<int32_t>(all.size()) &&
                               all[i].logit > -std::numeric_limits<float>::infinity();
            row[ROW_TOP_TOKEN + i] = there ? all[i].token : -1;
            row[ROW_TOP_LOGPROB + i] = there ? logprob(all[i].logit) : 0;
        }
    }

   private:
    // The block's weights: those above the cut, and the first `ties` at it.
    std::vector<float> kept(int32_t block, int32_t ties) const {
        const int32_t first = block * kSampleBlock;
        std::vector<float> weights(smaller(kSampleBlock, row_.vocabulary - first));
        for (size_t i = 0; i < weights.size(); ++i) {
            const float weight = distribution_.weight(first + static_cast<int32_t>(i));
            const bool tied = bits_of(weight) == cut_.weight;
            if (bits_of(weight) > cut_.weight || (tied && ties > 0)) weights[i] = weight;
            ties -= tied;
        }
        return weights;
    }

    float partial_mass(int32_t block, int32_t ties) const {
        const std::vector<float> weights = kept(block, ties);
        return block_sum([&](int32_t i) { return weights[i]; }, static_cast<int32_t>(weights.size()));
    }

    // The likeliest token has weight.
    [[noreturn]] void unwritten() const { context_.fail(task_, "MASS was read before it was written"); }

    const Context& context_;
    const Task& task_;
    const RowSampling row_;
    const Best best_;
    const Distribution distribution_;
    const Best* ranges_;
    const int32_t blocks_;
    const BlockMass* mass_;
    const Cut cut_;
};

}  // namespace

bool draw_row(Context& context, const Task& task, int32_t row) {
    const bool cancelled = context.cancelled(row);
    int32_t* parameters = &context.parameter(row, ROW_TOKEN);
    int32_t token = -1;
    if (!cancelled) {
        const Draw draw(context, task, row);
        token = draw.token();
        if (token < -1 || token >= context.geometry.vocabulary) {
            context.fail(task, text("row ", row, ": RANGE_BEST was read before it was written"));
        }
        if (token >= 0 && parameters[ROW_LOGPROBS] > 0) draw.report(token, parameters);
    }
    const int32_t remaining = parameters[ROW_REMAINING] - 1;
    const int32_t* stops = parameters + ROW_STOP;
    Finish finish = FINISH_NONE;
    if (token < 0) {
        finish = cancelled ? FINISH_CANCELLED : FINISH_ERROR;
    } else if (std::find(stops, stops + kStopTokens, token) != stops + kStopTokens) {
        finish = FINISH_STOP;
    } else if (remaining == 0) {
        finish = FINISH_LENGTH;
    }
    if (!context.publish(task.step, row, token, finish)) return false;
    const SearchBuffer search{context.buffer<std::byte>(task, FIELD_OUTPUT) + row * SearchBuffer::kBytes};
    std::fill_n(search.histogram(0), kPasses * kBins, uint64_t{0});
    if (token >= 0) {
        if (parameters[ROW_HISTORY] > 0) {
            ++context.batch.counts[(parameters[ROW_HISTORY] - 1) * int64_t{context.geometry.vocabulary} + token];
        }
        parameters[ROW_TOKEN] = token;
        ++parameters[ROW_POSITION];
    }
    parameters[ROW_FINISH] = finish;
    parameters[ROW_REMAINING] = finish == FINISH_NONE ? remaining : 0;
    return true;
}

}  // namespace north_jax::megakernel
