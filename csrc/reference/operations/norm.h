// The stream between layers: EMBED and ADD_RMSNORM.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "csrc/reference/operations/rows.h"

namespace north_jax::megakernel {

// A token outside the vocabulary has the embedding NaN, as in layers.embed: its row alone ends with an error.
template <typename T>
void embed(Context& context, const Task& task) {
    const int64_t columns = context.geometry.hidden;
    for (const int32_t row : context.live_rows(task)) {
        const int32_t token = context.parameter(row, ROW_TOKEN);
        const bool known = token >= 0 && token < context.geometry.vocabulary;
        const T* from = context.weight<T>(task, known ? token : 0);
        float* to = context.buffer<float>(task, FIELD_OUTPUT) + row * columns;
        for (int64_t i = 0; i < columns; ++i) {
            to[i] = known ? to_float(from[i]) : std::numeric_limits<float>::quiet_NaN();
        }
    }
}

template <typename T>
void norm(const Geometry& g, std::vector<float>& x, const T* weight, T* out) {
    const float n = static_cast<float>(x.size());
    if (g.layer_norm) {
        float sum = 0;
        for (const float value : x) sum += value;
        for (float& value : x) value -= sum / n;
    }
    const float square = dot(x.data(), x.data(), static_cast<int64_t>(x.size()));
    const float scale = 1.0f / std::sqrt(square / n + g.norm_eps);
    for (size_t i = 0; i < x.size(); ++i) out[i] = from_float<T>(x[i] * scale * to_float(weight[i]));
}

template <typename T>
void add_rmsnorm(Context& context, const Task& task) {
    const Geometry& g = context.geometry;
    const int64_t columns = g.hidden, batch = context.lists.batch;
    const bool adds = task[FIELD_INPUT_2] != BUFFER_NONE;
    const int32_t layer = adds ? task[FIELD_LAYER] - 1 : task[FIELD_LAYER];
    const float* in = context.buffer<const float>(task, FIELD_INPUT, layer);
    std::vector<float> x;
    for (const int32_t row : context.live_rows(task)) {
        x.assign(in + row * columns, in + (row + 1) * columns);
        if (adds) {
            const auto add = [&](Field field, int32_t part) {
                const float* from = context.buffer<const float>(task, field, layer) + (part * batch + row) * columns;
                for (int64_t i = 0; i < columns; ++i) x[i] += from[i];
            };
            for (int32_t part = 0; part < task[FIELD_SPLIT]; ++part) add(FIELD_INPUT_2, part);
            add(FIELD_INPUT_3, 0);
            float* residual = context.buffer<float>(task, FIELD_OUTPUT_2) + row * columns;
            for (int64_t i = 0; i < columns; ++i) residual[i] = x[i];
        }
        norm(g, x, context.weight<T>(task, 0), context.buffer<T>(task, FIELD_OUTPUT) + row * columns);
    }
}

}  // namespace north_jax::megakernel
