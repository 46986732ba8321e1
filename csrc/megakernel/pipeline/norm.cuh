// EMBED and ADD_RMSNORM, by the loader. A thread has the values 4 t … 4 t + 3 of every 512 of a row.
//
// Where every SM norms for itself (the LOCAL buffers), the normalised input goes straight to the consumers; otherwise
// one SM a row does it, by way of global memory.
#pragma once

#include "csrc/megakernel/pipeline/exchange.cuh"
#include "csrc/megakernel/pipeline/loader.cuh"

namespace north_jax::megakernel::pipeline {

using Values = float[kResidualChunks][4];

struct ResidualNorm {
    // Columns of one chunk of all threads.
    static constexpr int kChunk = kLoaderWarps * 128;

    // Whether chunk j of a thread's values exists.
    __device__ __forceinline__ static bool exists(const Loader& r, int j) {
        return r.thread() * 4 + j * kChunk < r.c.plan.geometry.hidden;
    }

    __device__ __forceinline__ static bool embed(Loader& r) {
        const int hidden = r.c.plan.geometry.hidden;
        float* out = r.buffer<float>(FIELD_OUTPUT) + r.thread() * 4;
        if (!r.agreed(true)) return false;
#pragma unroll 1
        for (int b = r.c.batch_begin(); b < r.c.batch_end(); ++b) {
            if (!r.live(b)) continue;
            const bf16* from = r.weight() + static_cast<int64_t>(r.parameter(b, ROW_TOKEN)) * hidden + r.thread() * 4;
#pragma unroll 1
            for (int j = 0; exists(r, j); ++j) {
                float x[4];
                unpack(__ldg(reinterpret_cast<const uint2*>(from + j * kChunk)), x);
                *reinterpret_cast<float4*>(out + b * hidden + j * kChunk) = {x[0], x[1], x[2], x[3]};
            }
        }
        arrive(r);
        return true;
    }

    __device__ __forceinline__ static bool add_norm(Loader& r) {
        const Geometry& g = r.c.plan.geometry;
        const int hidden = g.hidden, batch = r.c.plan.batch, column = r.thread() * 4;
        const bool local = r.names_local(FIELD_OUTPUT), adds = r.c.field(FIELD_INPUT_2) != BUFFER_NONE;
        uint2 weight[kResidualChunks];
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (exists(r, j)) weight[j] = __ldg(reinterpret_cast<const uint2*>(r.weight() + column + j * kChunk));
        }
        if (!r.agreed(!r.stages() || (r.wait_task() && (!local || r.open_input())))) return false;
#pragma unroll 1
        for (int b = r.c.batch_begin(); b < r.c.batch_end(); ++b) {
            if (!r.live(b)) continue;
            const int at = b * hidden + column;
            const float* in = r.buffer<const float>(FIELD_INPUT) + at;
            Values x;
            add_published(r, in, at, adds ? r.c.field(FIELD_SPLIT) : 0, x);
            if (adds) {
                float* residual = r.buffer<float>(FIELD_OUTPUT_2) + at;
#pragma unroll
                for (int j = 0; j < kResidualChunks; ++j) {
                    if (!exists(r, j)) continue;
                    *reinterpret_cast<float4*>(residual + j * kChunk) = {x[j][0], x[j][1], x[j][2], x[j][3]};
                }
            }
            // The consumers' input has its rows in pieces of two chunks; OUTPUT has them whole.
            static_assert(kPageColumns == 2 * kChunk, "two chunks a piece");
            unsigned char* to = local ? r.memory.input_generic + b * kRowStride
                                      : reinterpret_cast<unsigned char*>(r.buffer<bf16>(FIELD_OUTPUT) + b * hidden);
            norm(r, g, x, weight, to + column * 2, local ? batch * kRowStride : kPageColumns * 2);
        }
        if (!local) {
            arrive(r);
            return true;
        }
        r.sync();
        if (r.thread() == 0) barrier_arrive(&r.shared().input_full);
        r.input_layer = r.c.field(FIELD_LAYER);
        return true;
    }

   private:
    // x = the residual `in` + all `parts` of the attention's output + the other one's; 0 parts: the residual alone.
    // After a fault x is anything: it has been reported, and the step ends at its next wait.
    __device__ __forceinline__ static void add_published(const Loader& r, const float* in, int at, int parts,
                                                         Values& x) {
        const float* first = r.exchanged<const float>(FIELD_INPUT_2) + at;
        const float* second = r.exchanged<const float>(FIELD_INPUT_3) + at;
        const int part = r.c.plan.batch * r.c.plan.geometry.hidden;
        for (uint64_t begin = 0;;) {
            float4 a[kResidualChunks], m[kResidualChunks];
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                assign(load_fresh(in + j * kChunk, exists(r, j)), x[j]);
                a[j] = load_fresh(first + j * kChunk, parts > 0 && exists(r, j));
                m[j] = load_fresh(second + j * kChunk, parts > 0 && exists(r, j));
            }
            uint32_t largest = 0;
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) {
                largest = max(largest, max(largest_word(a[j]), largest_word(m[j])));
                add(x[j], a[j]);
            }
#pragma unroll 1
            for (int p = 1; p < parts; ++p) {
#pragma unroll
                for (int j = 0; j < kResidualChunks; ++j) {
                    const float4 more = load_fresh(first + p * part + j * kChunk, exists(r, j));
                    largest = max(largest, largest_word(more));
                    add(x[j], more);
                }
            }
#pragma unroll
            for (int j = 0; j < kResidualChunks; ++j) add(x[j], m[j]);
            if (__all_sync(~0u, largest != kNothing)) return;
            begin = look_again(begin, r.c.field(FIELD_WAIT), r.c.field(FIELD_WAIT_NEED));
            if (begin == 0) return;
        }
    }

    __device__ __forceinline__ static void assign(const float4& from, float (&to)[4]) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }

    __device__ __forceinline__ static void unpack(const uint2& pairs, float (&to)[4]) {
        to[0] = low_half(pairs.x), to[1] = high_half(pairs.x), to[2] = low_half(pairs.y), to[3] = high_half(pairs.y);
    }

    // Keeps the compiler from unpacking weights before the loop over rows: they would take twice the registers.
    __device__ __forceinline__ static void keep_packed(uint2& pairs) {
        asm volatile("" : "+r"(pairs.x), "+r"(pairs.y));
    }

    __device__ __forceinline__ static void add(float (&to)[4], const float4& from) {
        to[0] += from.x, to[1] += from.y, to[2] += from.z, to[3] += from.w;
    }

    // The sum of a value of every thread, in a fixed order. Consecutive calls use one half of the scratch and the
    // other.
    __device__ __forceinline__ static float total(Loader& r, float value) {
#pragma unroll 1
        for (int o = 16; o > 0; o /= 2) value += __shfl_xor_sync(~0u, value, o);
        float* sums = r.shared().norm_sums[r.norm_turn];
        r.norm_turn ^= 1;
        if (r.lane == 0) sums[r.warp] = value;
        r.sync();
        static_assert(kLoaderWarps == 4, "four sums");
        const float4 four = *reinterpret_cast<const float4*>(sums);
        return four.x + four.y + four.z + four.w;
    }

    // norm(x) · weight. Chunk j goes to `to`, j / 2 pieces of `piece` bytes on, and to its second half where j is odd.
    // Values that do not exist are 0.
    __device__ __forceinline__ static void norm(Loader& r, const Geometry& g, Values& x,
                                                uint2 (&weight)[kResidualChunks], unsigned char* to, int piece) {
        const float each = __fdividef(1.0f, static_cast<float>(g.hidden));
        if (g.layer_norm) centre(r, x, each);
        float squares = 0;
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) squares += x[j][e] * x[j][e];
        }
        const float scale = rsqrtf(total(r, squares) * each + g.norm_eps);
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            if (!exists(r, j)) continue;
            float y[4];
            keep_packed(weight[j]);
            unpack(weight[j], y);
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] *= x[j][e] * scale;
            *reinterpret_cast<uint2*>(to + j / 2 * piece + j % 2 * kChunk * 2) = {pack(y[0], y[1]), pack(y[2], y[3])};
        }
    }

    // Takes the mean away.
    __device__ __forceinline__ static void centre(Loader& r, Values& x, float each) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) sum += x[j][0] + x[j][1] + x[j][2] + x[j][3];
        const float mean = total(r, sum) * each;
#pragma unroll
        for (int j = 0; j < kResidualChunks; ++j) {
            const float some = exists(r, j) ? mean : 0;
#pragma unroll
            for (int e = 0; e < 4; ++e) x[j][e] -= some;
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
