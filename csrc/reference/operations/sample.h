// Sampling, as north_jax/sampling.py does it: SAMPLE_HISTOGRAM, SAMPLE_MASS, SAMPLE_DRAW. See
// csrc/megakernel/sampling.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "csrc/megakernel/sampling.h"
#include "csrc/reference/context.h"

namespace north_jax::megakernel {

void sample_histogram(Context& context, const Task& task);
void sample_mass(Context& context, const Task& task);

inline RowSampling sampling_of(const Context& context, int32_t row) {
    return {context.batch.rows + int64_t{row} * kRowFields, context.geometry.vocabulary};
}

// An entry of RANGE_BEST.
struct Best {
    float logit;
    int32_t token;
};

// The entries of a row in the RANGE_BEST that the task's INPUT_2 names: kMaxLogprobs for each of its DEALERS.
inline const Best* range_best(const Context& context, const Task& task, int32_t row) {
    return context.buffer<const Best>(task, FIELD_INPUT_2) + int64_t{row} * task[FIELD_DEALERS] * kMaxLogprobs;
}

// The row's largest logit and the lowest token that has it; NaN where there is one.
Best likeliest(const Context& context, const Task& task, int32_t row);

// The tokens of a row by weight.
struct Distribution {
    const float* logits;
    float largest;
    float temperature;

    Distribution(const Context& context, const Task& task, int32_t row, float largest)
        : logits(context.buffer<const float>(task, FIELD_INPUT) + int64_t{row} * context.geometry.vocabulary),
          largest(largest),
          temperature(sampling_of(context, row).real(ROW_TEMPERATURE)) {}

    float weight(int32_t token) const { return std::exp((logits[token] - largest) / temperature); }
    float likelihood(int32_t token) const { return std::exp(logits[token] - largest); }
};

// The sum of a block's weights, in the order of sampling.py's _block_sums.
template <typename WeightOf>
float block_sum(WeightOf weight_of, int32_t count) {
    float lanes[kGroups] = {};
    for (int32_t i = 0; i < count; ++i) lanes[i % kGroups] += weight_of(i);
    for (int32_t half = kGroups / 2; half > 0; half /= 2) {
        for (int32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

}  // namespace north_jax::megakernel
