// A vocabulary range of one row after LM_HEAD's product: penalties, biases and mask, and the largest logits.
#pragma once

#include <climits>

#include "csrc/megakernel/device/context.cuh"
#include "csrc/megakernel/sampling.h"

namespace north_jax::megakernel {

// A logit and its token; NaN is larger than anything, and among equal logits the lowest token wins. An entry of
// RANGE_BEST.
struct Best {
    float logit;
    int token;

    __device__ bool beaten_by(const Best& other) const {
        if (isnan(logit) || isnan(other.logit)) return isnan(other.logit) && (!isnan(logit) || other.token < token);
        return other.logit > logit || (other.logit == logit && other.token < token);
    }
};

__device__ inline Best warp_best(Best best) {
    for (int o = 16; o > 0; o /= 2) {
        const Best other{__shfl_xor_sync(~0u, best.logit, o), __shfl_xor_sync(~0u, best.token, o)};
        if (best.beaten_by(other)) best = other;
    }
    return best;
}

__device__ inline RowSampling sampling_of(const Context& c, int b) { return {c.row(b), c.plan.geometry.vocabulary}; }

// What north_jax/adjust.py does to the logits of tokens [begin, begin + count), by one warp; `logits` is the row's.
__device__ inline void adjust_range(const Context& c, int b, float* logits, int begin, int count, int lane) {
    const RowSampling row = sampling_of(c, b);
    const int* parameters = row.row;
    const int end = begin + count;
    if (parameters[ROW_HISTORY] > 0) {
        const int32_t* counts = c.batch.counts + (parameters[ROW_HISTORY] - 1) * static_cast<int64_t>(row.vocabulary);
        const float presence = row.real(ROW_PRESENCE), frequency = row.real(ROW_FREQUENCY),
                    repetition = row.real(ROW_REPETITION);
        for (int t = begin + lane; t < end; t += 32) {
            const int said = counts[t];
            if (said > 0) logits[t] = penalised(logits[t], said, presence, frequency, repetition);
        }
        __syncwarp();
    }
    const int biases = parameters[ROW_BIAS_COUNT];
    if (biases > 0) {  // of different tokens
        const int32_t* bias = c.batch.biases + static_cast<int64_t>(b) * kMaxBiases * 2;
        for (int i = lane; i < biases; i += 32) {
            const int token = bias[2 * i];
            if (token >= begin && token < end) logits[token] += float_of(bias[2 * i + 1]);
        }
        __syncwarp();
    }
    if (parameters[ROW_MASKED] != 0) {
        const uint32_t* mask = c.batch.masks + static_cast<int64_t>(b) * ((row.vocabulary + 31) / 32);
        for (int t = begin + lane; t < end; t += 32) {
            const bool allowed = mask[t / 32] >> t % 32 & 1;
            if (!allowed && logits[t] < INFINITY) logits[t] = -INFINITY;  // a fault of the model is not hidden
        }
        __syncwarp();
    }
}

// The tail of LM_HEAD for one live row, by one warp: adjusts the range's logits, which are written and visible to the
// warp, and lists the largest in `out`, the range's entries of RANGE_BEST.
// Not inlined: it is no part of the product, whose registers it would take.
__device__ __noinline__ inline void finish_range(const Context& c, int b, float* logits, int begin, int count, Best* out, int lane) {
    adjust_range(c, b, logits, begin, count, lane);
    const int wanted = max(sampling_of(c, b).alternatives(), 1);
    Best last;
    for (int n = 0; n < wanted; ++n) {
        Best best{-INFINITY, INT_MAX};
        for (int t = begin + lane; t < begin + count; t += 32) {
            const Best other{logits[t], t};
            if (n > 0 && !other.beaten_by(last)) continue;  // listed already
            if (best.beaten_by(other)) best = other;
        }
        last = warp_best(best);
        if (lane == 0) out[n] = last;
    }
}

}  // namespace north_jax::megakernel
