// EMBED and ADD_RMSNORM, by the loader. A thread has the values 4 t … 4 t + 3 of every 512 of a row.
//
// Where every SM norms for itself (the LOCAL buffers), the residual stream stays in the loader's registers and the
// normalised input goes straight to the consumers; otherwise one SM a row does it, by way of global memory.
#pragma once

#include "csrc/megakernel/pipeline/loader.cuh"

namespace north_jax::megakernel::pipeline {

using Values = float[kResidualChunks][4];
using Pairs = uint2[kResidualChunks];  // the same as bfloat16

// Reads past the L1, which may hold what was there before.
__device__ __forceinline__ float4 load_fresh(const float* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

struct ResidualNorm {
    // Chunk j of a thread's values begins here.
    __device__ __forceinline__ static int column(const Loader& r, int j) { return j * kLoaderWarps * 128 + r.thread() * 4; }

    __device__ __forceinline__ static bool is_local(const Loader& r, Field f) {
        return r.c.field(f) == BUFFER_LOCAL_RESIDUAL || r.c.field(f) == BUFFER_LOCAL_HIDDEN;
    }

    __device__ __forceinline__ static bool embed(Loader& r) {
        const int hidden = r.c.plan.geometry.hidden;
        const bool local = is_local(r, FIELD_OUTPUT);
#pragma unroll
        for (int i = 0; i < kLocalRows; ++i) {  // rows in registers need names that are known when this is compiled
            if (local && i < r.c.plan.batch && r.live(i)) read_embedding(r, i, hidden, r.residual[i]);
        }
        if (!local) {
            for (int b = r.c.batch_begin(); b < r.c.batch_end(); ++b) {
                if (!r.live(b)) continue;
                Values x;
                read_embedding(r, b, hidden, x);
                store_residual(r.c.buffer<float>(FIELD_OUTPUT) + b * hidden, r, hidden, x);
            }
        }
        arrive(r);
        return true;
    }

    __device__ __forceinline__ static bool add_norm(Loader& r) {
        const Geometry& g = r.c.plan.geometry;
        const int hidden = g.hidden, layer = r.c.field(FIELD_LAYER);
        Pairs weight;
        read_pairs(r.c.weight<bf16>(), r, hidden, weight);
        const bool local = is_local(r, FIELD_OUTPUT);
        if (!r.agreed(!r.stages() || (r.wait_task() && (!local || r.open_input())))) return false;
        if (local) {
            const int batch = r.c.plan.batch;
#pragma unroll
            for (int b = 0; b < kLocalRows; ++b) {
                if (b >= batch) break;
                add_outputs(r, b, hidden, layer, r.residual[b]);
                norm(r, b, g, r.residual[b], weight, [&](int at, uint2 values) {
                    unsigned char* to = r.memory.input_generic + (at / kPageColumns * batch + b) * kRowStride;
                    *reinterpret_cast<uint2*>(to + at % kPageColumns * 2) = values;
                });
            }
            r.sync();
            if (r.thread() == 0) barrier_arrive(&r.shared().input_full);
            r.input_layer = layer;
            return true;
        }
        for (int b = r.c.batch_begin(); b < r.c.batch_end(); ++b) {
            if (!r.live(b)) continue;
            Values& x = r.residual[0];  // free where nothing is local
            const bool adds = r.c.field(FIELD_INPUT_2) != BUFFER_NONE;
            const float* in = r.c.buffer<const float>(FIELD_INPUT, adds ? layer - 1 : layer) + b * hidden;
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                if (column(r, j) < hidden) assign(load_fresh(in + column(r, j)), x[j]);
            }
            add_outputs(r, b, hidden, layer, x);
            if (adds) store_residual(r.c.buffer<float>(FIELD_OUTPUT_2) + b * hidden, r, hidden, x);
            bf16* out = r.c.buffer<bf16>(FIELD_OUTPUT) + b * hidden;
            norm(r, b, g, x, weight, [&](int at, uint2 values) { *reinterpret_cast<uint2*>(out + at) = values; });
        }
        arrive(r);
        return true;
    }

   private:
    __device__ __forceinline__ static void assign(const float4& from, float (&to)[4]) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }

    __device__ __forceinline__ static void read_pairs(const bf16* from, const Loader& r, int hidden, Pairs& to) {
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) < hidden) to[j] = __ldg(reinterpret_cast<const uint2*>(from + column(r, j)));
        }
    }
    __device__ __forceinline__ static void unpack(const uint2& pairs, float (&to)[4]) {
        to[0] = low_half(pairs.x), to[1] = high_half(pairs.x), to[2] = low_half(pairs.y), to[3] = high_half(pairs.y);
    }

    __device__ __forceinline__ static void read_embedding(const Loader& r, int b, int hidden, Values& to) {
        const int64_t token = r.parameter(b, ROW_TOKEN);
        Pairs raw;
        read_pairs(r.c.weight<bf16>() + token * hidden, r, hidden, raw);
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) unpack(raw[j], to[j]);
    }

    __device__ __forceinline__ static void store_residual(float* to, const Loader& r, int hidden, const Values& x) {
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) >= hidden) continue;
            *reinterpret_cast<float4*>(to + column(r, j)) = {x[j][0], x[j][1], x[j][2], x[j][3]};
        }
    }

    // x += the parts of INPUT_2, then INPUT_3, of the layer before.
    __device__ __forceinline__ static void add_outputs(const Loader& r, int b, int hidden, int layer, Values& x) {
        if (r.c.field(FIELD_INPUT_2) == BUFFER_NONE) return;
        const float* first = r.c.buffer<const float>(FIELD_INPUT_2, layer - 1) + b * hidden;
        const float* second = r.c.buffer<const float>(FIELD_INPUT_3, layer - 1) + b * hidden;
        const int parts = r.c.field(FIELD_SPLIT), batch = r.c.plan.batch;
        float4 a[kResidualChunks], m[kResidualChunks];
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) >= hidden) continue;
            a[j] = load_fresh(first + column(r, j));
            m[j] = load_fresh(second + column(r, j));
        }
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) add(x[j], a[j]);
        for (int part = 1; part < parts; ++part) {
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                if (column(r, j) < hidden) add(x[j], load_fresh(first + part * batch * hidden + column(r, j)));
            }
        }
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) add(x[j], m[j]);
    }
    __device__ __forceinline__ static void add(float (&to)[4], const float4& from) {
        to[0] += from.x, to[1] += from.y, to[2] += from.z, to[3] += from.w;
    }

    // The sum of a value of every thread, in a fixed order. Consecutive calls use one half of the scratch and the other.
    __device__ __forceinline__ static float total(const Loader& r, float value, int half) {
        value = warp_sum(value);
        float* sums = r.shared().norm_sums[half];
        if (r.lane == 0) sums[r.warp] = value;
        r.sync();
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kLoaderWarps; ++w) sum += sums[w];
        return sum;
    }

    // store(column, norm(x) · weight, as four values), chunk by chunk.
    template <class Store>
    __device__ __forceinline__ static void norm(const Loader& r, int b, const Geometry& g, const Values& x,
                                                const Pairs& weight, Store store) {
        float mean = 0, squares = 0;
        if (g.layer_norm) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                if (column(r, j) < g.hidden) sum += x[j][0] + x[j][1] + x[j][2] + x[j][3];
            }
            r.sync();  // both halves of the scratch are free
            mean = total(r, sum, 0) / g.hidden;
            r.sync();
        }
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) >= g.hidden) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) squares += (x[j][e] - mean) * (x[j][e] - mean);
        }
        const float scale = 1.0f / sqrtf(total(r, squares, b % 2) / g.hidden + g.norm_eps);
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (column(r, j) >= g.hidden) continue;
            float y[4];
            unpack(weight[j], y);
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] *= (x[j][e] - mean) * scale;
            store(column(r, j), uint2{pack(y[0], y[1]), pack(y[2], y[3])});
        }
    }

    // What all of the loader's warps have stored is there for whoever sees the arrival.
    __device__ __forceinline__ static void arrive(const Loader& r) {
        const int count = r.c.field(FIELD_ARRIVE_COUNT);
        if (count == 0) return;
        r.sync();
        if (r.thread() == 0) add_release(r.c.words.counters + r.c.field(FIELD_ARRIVE), count);
    }
};

}  // namespace north_jax::megakernel::pipeline
