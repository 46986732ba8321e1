// Logits, and the largest of each vocabulary range.
#pragma once

#include "csrc/megakernel/operations/range.cuh"
#include "csrc/megakernel/plain/gemm.cuh"

namespace north_jax::megakernel {

template <class T>
__device__ __noinline__ bool lm_head(const Context& c, const Team& team) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int begin = c.field(FIELD_ROW_BEGIN), count = c.field(FIELD_ROW_COUNT), ranges = c.field(FIELD_DEALERS);
    float* out = c.buffer<float>(FIELD_OUTPUT);
    Best* range_best = c.buffer<Best>(FIELD_OUTPUT_2);
    gemm_rows<T>(c, team, 0, c.columns(), [&](int row, int b, float sum) {
        out[static_cast<int64_t>(b) * g.vocabulary + row] = sum * g.logit_scale;
    });
    team.sync();
    for (int b = c.batch_begin() + team.warp(); b < c.batch_end(); b += team.warps()) {
        if (!c.live(b)) continue;
        Best* best = range_best + (b * ranges + c.field(FIELD_DEALER)) * kMaxLogprobs;
        finish_range(c, b, out + static_cast<int64_t>(b) * g.vocabulary, begin, count, best, team.lane());
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
