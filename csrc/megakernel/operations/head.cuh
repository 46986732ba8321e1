// Logits, and the largest of each vocabulary range.
#pragma once

#include <climits>

#include "csrc/megakernel/operations/gemm.cuh"

namespace north_jax::megakernel {

// A logit and its token; NaN is larger than anything, and among equal logits the lowest token wins.
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

template <class T>
__device__ __noinline__ bool lm_head(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int begin = c.field(FIELD_ROW_BEGIN), count = c.field(FIELD_ROW_COUNT), ranges = c.field(FIELD_DEALERS);
    float* out = c.buffer<float>(FIELD_OUTPUT);
    int32_t* range_best = c.buffer<int32_t>(FIELD_OUTPUT_2);
    gemm_rows<T>(c, team, 0, c.columns(), [&](int row, int b, float sum) {
        out[static_cast<int64_t>(b) * g.vocabulary + row] = sum * g.logit_scale;
    });
    team.sync();
    for (int b = c.batch_begin() + team.warp(); b < c.batch_end(); b += team.warps()) {
        if (!c.live(b)) continue;
        Best best{-INFINITY, INT_MAX};
        for (int i = begin + team.lane(); i < begin + count; i += 32) {
            const Best other{out[static_cast<int64_t>(b) * g.vocabulary + i], i};
            if (best.beaten_by(other)) best = other;
        }
        best = warp_best(best);
        if (team.lane() == 0) {
            int32_t* to = range_best + (b * ranges + c.field(FIELD_DEALER)) * 2;
            to[0] = __float_as_int(best.logit);
            to[1] = best.token;
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
