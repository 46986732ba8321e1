// What LM_HEAD does with the logits of a vocabulary range beside the product: adjust them, and list the largest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "csrc/reference/operations/sample.h"

namespace north_jax::megakernel {

// Penalties, biases and mask of a row, as north_jax/adjust.py: logits [count] are those of the tokens from `first` on.
inline void adjust(const Context& context, int32_t number, float* logits, int32_t first, int32_t count) {
    const RowSampling row = sampling_of(context, number);
    const int32_t* parameters = row.row;
    if (parameters[ROW_HISTORY] > 0) {
        const int32_t* counts = context.batch.counts + (parameters[ROW_HISTORY] - 1) * int64_t{row.vocabulary} + first;
        for (int32_t i = 0; i < count; ++i) {
            logits[i] = penalised(logits[i], counts[i], row.real(ROW_PRESENCE), row.real(ROW_FREQUENCY),
                                  row.real(ROW_REPETITION));
        }
    }
    const int32_t* bias = context.batch.biases + int64_t{number} * kMaxBiases * 2;
    for (int32_t i = 0; i < parameters[ROW_BIAS_COUNT]; ++i, bias += 2) {
        if (bias[0] >= first && bias[0] < first + count) logits[bias[0] - first] += float_of(bias[1]);
    }
    if (parameters[ROW_MASKED] == 0) return;
    const uint32_t* mask = context.batch.masks + int64_t{number} * ceil_div(row.vocabulary, 32);
    for (int32_t i = 0; i < count; ++i) {
        const bool allowed = mask[(first + i) / 32] >> (first + i) % 32 & 1;
        if (!allowed && logits[i] < std::numeric_limits<float>::infinity()) {  // a fault of the model is not hidden
            logits[i] = -std::numeric_limits<float>::infinity();
        }
    }
}

// Writes the `wanted` largest logits, the largest first and of equal ones the lowest token; NaN is larger than any.
inline void list_largest(const float* logits, int32_t first, int32_t count, int32_t wanted, Best* out) {
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    const auto larger_first = [&](int32_t a, int32_t b) {
        const bool nan_a = std::isnan(logits[a]), nan_b = std::isnan(logits[b]);
        if (nan_a || nan_b) return nan_a && (!nan_b || a < b);
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    std::partial_sort(order.begin(), order.begin() + std::min(wanted, count), order.end(), larger_first);
    for (int32_t i = 0; i < wanted; ++i) {
        out[i] = i < count ? Best{logits[order[i]], first + order[i]}
                           : Best{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
    }
}

}  // namespace north_jax::megakernel
