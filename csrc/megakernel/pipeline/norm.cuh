// EMBED and ADD_RMSNORM, by the loader. A thread has the values 4 t … 4 t + 3 of every 512 of a row.
//
// Where every SM norms for itself (the LOCAL buffers), the normalised input goes straight to the consumers; otherwise
// one SM a row does it, by way of global memory.
#pragma once

#include "csrc/megakernel/pipeline/loader.cuh"

namespace north_jax::megakernel::pipeline {

using Values = float[kResidualChunks][4];

struct ResidualNorm {
    // Chunk j of a thread's values begins here.
    __device__ __forceinline__ static int column(const Loader& r, int j) {
        return j * kLoaderWarps * 128 + r.thread() * 4;
    }

    __device__ __forceinline__ static bool embed(Loader& r) {
        const int hidden = r.c.plan.geometry.hidden;
        float* out = r.buffer<float>(FIELD_OUTPUT);
        if (!r.agreed(true)) return false;
#pragma unroll 1
        for (int b = r.c.batch_begin(); b < r.c.batch_end(); ++b) {
            if (!r.live(b)) continue;
            const bf16* from = r.weight() + static_cast<int64_t>(r.parameter(b, ROW_TOKEN)) * hidden;
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                if (column(r, j) >= hidden) continue;
                float x[4];
                unpack(__ldg(reinterpret_cast<const uint2*>(from + column(r, j))), x);
                *reinterpret_cast<float4*>(out + b * hidden + column(r, j)) = {x[0], x[1], x[2], x[3]};
            }
        }
        arrive(r);
        return true;
    }

    __device__ __forceinline__ static bool add_norm(Loader& r) {
        const Geometry& g = r.c.plan.geometry;
        const int hidden = g.hidden, layer = r.c.field(FIELD_LAYER), batch = r.c.plan.batch;
        const bool local = r.names_local(FIELD_OUTPUT), adds = r.c.field(FIELD_INPUT_2) != BUFFER_NONE;
        uint2 weight[kResidualChunks];
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) < hidden) weight[j] = __ldg(reinterpret_cast<const uint2*>(r.weight() + column(r, j)));
        }
        if (!r.agreed(!r.stages() || (r.wait_task() && (!local || r.open_input())))) return false;
#pragma unroll 1
        for (int b = r.c.batch_begin(); b < r.c.batch_end(); ++b) {
            if (!r.live(b)) continue;
            const float* in = r.buffer<const float>(FIELD_INPUT) + b * hidden;
            const float* first = r.buffer<const float>(FIELD_INPUT_2) + b * hidden;
            const float* second = r.buffer<const float>(FIELD_INPUT_3) + b * hidden;
            Values x;
            float4 a[kResidualChunks], m[kResidualChunks];
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                if (column(r, j) >= hidden) continue;
                assign(load_fresh(in + column(r, j)), x[j]);
                if (!adds) continue;
                a[j] = load_fresh(first + column(r, j));
                m[j] = load_fresh(second + column(r, j));
            }
            if (adds) {
#pragma unroll
                for (int j = 0; j < kResidualChunks; ++j) add(x[j], a[j]);
#pragma unroll 1
                for (int part = 1; part < r.c.field(FIELD_SPLIT); ++part) {
#pragma unroll
                    for (int j = 0; j < kResidualChunks; ++j) {
                        if (column(r, j) < hidden) add(x[j], load_fresh(first + part * batch * hidden + column(r, j)));
                    }
                }
                float* residual = r.buffer<float>(FIELD_OUTPUT_2) + b * hidden;
#pragma unroll
                for (int j = 0; j < kResidualChunks; ++j) {
                    if (column(r, j) >= hidden) continue;
                    add(x[j], m[j]);
                    *reinterpret_cast<float4*>(residual + column(r, j)) = {x[j][0], x[j][1], x[j][2], x[j][3]};
                }
            }
            norm(r, b, g, x, weight, local);
        }
        if (!local) {
            arrive(r);
            return true;
        }
        r.sync();
        if (r.thread() == 0) barrier_arrive(&r.shared().input_full);
        r.input_layer = layer;
        return true;
    }

   private:
    __device__ __forceinline__ static void assign(const float4& from, float (&to)[4]) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }

    __device__ __forceinline__ static void unpack(const uint2& pairs, float (&to)[4]) {
        to[0] = low_half(pairs.x), to[1] = high_half(pairs.x), to[2] = low_half(pairs.y), to[3] = high_half(pairs.y);
    }

    __device__ __forceinline__ static void add(float (&to)[4], const float4& from) {
        to[0] += from.x, to[1] += from.y, to[2] += from.z, to[3] += from.w;
    }

    // The sum of a value of every thread, in a fixed order. Consecutive calls use one half of the scratch and the
    // other.
    __device__ __forceinline__ static float total(Loader& r, float value) {
        value = warp_sum(value);
        float* sums = r.shared().norm_sums[r.norm_turn];
        r.norm_turn ^= 1;
        if (r.lane == 0) sums[r.warp] = value;
        r.sync();
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kLoaderWarps; ++w) sum += sums[w];
        return sum;
    }

    // norm(x) · weight, to the consumers or to OUTPUT.
    __device__ __forceinline__ static void norm(Loader& r, int b, const Geometry& g, const Values& x,
                                                const uint2 (&weight)[kResidualChunks], bool local) {
        const float each = 1.0f / static_cast<float>(g.hidden);
        float mean = 0, squares = 0;
        if (g.layer_norm) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                if (column(r, j) < g.hidden) sum += x[j][0] + x[j][1] + x[j][2] + x[j][3];
            }
            mean = total(r, sum) * each;
        }
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) >= g.hidden) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) squares += (x[j][e] - mean) * (x[j][e] - mean);
        }
        const float scale = rsqrtf(total(r, squares) * each + g.norm_eps);
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) >= g.hidden) continue;
            float y[4];
            unpack(weight[j], y);
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] *= (x[j][e] - mean) * scale;
            const int at = column(r, j);
            bf16* to = local ? reinterpret_cast<bf16*>(r.memory.input_generic +
                                                       (at / kPageColumns * r.c.plan.batch + b) * kRowStride) +
                                   at % kPageColumns
                             : r.buffer<bf16>(FIELD_OUTPUT) + b * g.hidden + at;
            *reinterpret_cast<uint2*>(to) = {pack(y[0], y[1]), pack(y[2], y[3])};
        }
    }

    // What all of the loader's warps have stored is there for whoever sees the arrival.
    __device__ __forceinline__ static void arrive(const Loader& r) {
        const int count = r.c.field(FIELD_ARRIVE_COUNT);
        if (count == 0) return;
        r.sync();
        if (r.thread() == 0) add_release(counter_at(r.c.words.counters, r.c.field(FIELD_ARRIVE)), count);
    }
};

}  // namespace north_jax::megakernel::pipeline
