// The residual stream: embedding, and the sum and norm before a layer.
#pragma once

#include "csrc/megakernel/device/dot.cuh"

namespace north_jax::megakernel {

template <class T>
__device__ __noinline__ bool embed(const Context& c, const Team& team) {
    const int hidden = c.plan.geometry.hidden;
    float* out = c.buffer<float>(FIELD_OUTPUT);
    for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
        if (!c.live(b)) continue;
        const T* from = c.weight<T>() + static_cast<int64_t>(c.row(b)[ROW_TOKEN]) * hidden;
        for (int i = team.thread; i < hidden; i += team.threads) out[b * hidden + i] = to_float(from[i]);
    }
    arrive_task(c, team);
    return true;
}

// The sum of one value of every thread, in a fixed order, for all of them. `scratch` holds a float for each warp.
__device__ inline float team_sum(const Team& team, float value, float* scratch) {
    value = warp_sum(value);
    team.sync();  // nobody reads the last sum any more
    if (team.lane() == 0) scratch[team.warp()] = value;
    team.sync();
    float sum = 0;
    for (int w = 0; w < team.warps(); ++w) sum += scratch[w];
    return sum;
}

template <class T>
__device__ __noinline__ bool add_rmsnorm(const Context& c, const Team& team, float* scratch) {
    if (!wait_task(c, team)) return false;
    const Geometry& g = c.plan.geometry;
    const int hidden = g.hidden, layer = c.field(FIELD_LAYER);
    const bool adds = c.field(FIELD_INPUT_2) != BUFFER_NONE;
    const float* in = c.buffer<const float>(FIELD_INPUT, adds ? layer - 1 : layer);
    const float* first = adds ? c.buffer<const float>(FIELD_INPUT_2, layer - 1) : nullptr;
    const float* second = adds ? c.buffer<const float>(FIELD_INPUT_3, layer - 1) : nullptr;
    float* residual = adds ? c.buffer<float>(FIELD_OUTPUT_2) : const_cast<float*>(in);
    const T* weight = c.weight<T>();
    T* out = c.buffer<T>(FIELD_OUTPUT);
    for (int b = c.batch_begin(); b < c.batch_end(); ++b) {
        if (!c.live(b)) continue;
        float sum = 0, squares = 0;
        for (int i = team.thread; i < hidden; i += team.threads) {
            const int64_t at = static_cast<int64_t>(b) * hidden + i;
            float r = in[at];
            if (adds) {
                for (int s = 0; s < c.field(FIELD_SPLIT); ++s) {
                    r += first[at + static_cast<int64_t>(s) * c.plan.batch * hidden];
                }
                r += second[at];
                residual[at] = r;
            }
            sum += r;
            squares += r * r;
        }
        float mean = 0;
        if (g.layer_norm) {
            mean = team_sum(team, sum, scratch) / hidden;
            squares = 0;
            for (int i = team.thread; i < hidden; i += team.threads) {
                const float r = residual[static_cast<int64_t>(b) * hidden + i] - mean;
                squares += r * r;
            }
        }
        const float scale = 1.0f / sqrtf(team_sum(team, squares, scratch) / hidden + g.norm_eps);
        for (int i = team.thread; i < hidden; i += team.threads) {
            const int64_t at = static_cast<int64_t>(b) * hidden + i;
            out[at] = from_float<T>((residual[at] - mean) * scale * to_float(weight[i]));
        }
    }
    arrive_task(c, team);
    return true;
}

}  // namespace north_jax::megakernel
