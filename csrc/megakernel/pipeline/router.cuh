// Routing: each layer's experts from the router's logits, as soon as these are there. By one warp of the loader.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

class Router {
   public:
    // At the first task of a layer that needs its experts: chooses them.
    __device__ __forceinline__ bool choose(const Common& r) {
        if (r.c.field(FIELD_LAYER) == layer_) return true;
        layer_ = r.c.field(FIELD_LAYER);
        if (!r.wait(&r.shared().routing_empty[cursor_.slot], cursor_.parity)) return false;
        if (!r.wait_task()) return false;
        RoutingTable& table = r.shared().routing[cursor_.slot];
        const int batch = r.c.plan.batch;
        uint32_t chosen = 0;  // bit 8 i + b: row b goes to this lane's expert i
#pragma unroll 1
        for (int b = 0; b < batch; b += kTogether) {
            choose_rows(r, b, table, &chosen);
            weigh_rows(r, b, table);
        }
        list_active(r.lane, chosen, table);
        __syncwarp();
        if (r.lane == 0) barrier_arrive(&r.shared().routing_full[cursor_.slot]);
        cursor_.advance(2);
        return true;
    }

    __device__ __forceinline__ void end_step() { layer_ = -1; }

   private:
    static constexpr int kTogether = 2;                       // rows, whose steps hide each other's latency
    static constexpr int kOfLane = kMaxPipelineExperts / 32;  // experts 4 l … 4 l + 3 are lane l's

    // A number that orders logits as jax.lax.top_k does, NaN first; never 0.
    __device__ __forceinline__ static uint32_t key_of(float logit) {
        if (isnan(logit)) return ~0u;
        const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 is 0
        return bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    __device__ __forceinline__ static float logit_of(uint32_t key) {
        return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
    }

    // The choices of rows `first` and `first + 1`, with their logits for weights. A row that is idle, or that does not
    // exist, chooses too, and nobody looks at what.
    __device__ __forceinline__ static void choose_rows(const Common& role, int first, RoutingTable& table,
                                                       uint32_t* chosen) {
        const Geometry& g = role.c.plan.geometry;
        const int lane = role.lane, last = role.c.plan.batch - 1;
        const float* logits = role.buffer<const float>(FIELD_INPUT_2) + lane * kOfLane;
        uint32_t key[kTogether][kOfLane];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
            float4 four{0, 0, 0, 0};
            const bool exist = lane * kOfLane < g.experts;
            if (exist) four = load_fresh(logits + min(first + r, last) * g.experts);
            key[r][0] = exist ? key_of(four.x) : 0, key[r][1] = exist ? key_of(four.y) : 0;
            key[r][2] = exist ? key_of(four.z) : 0, key[r][3] = exist ? key_of(four.w) : 0;
        }
#pragma unroll 1
        for (int j = 0; j < g.top_k; ++j) {
#pragma unroll
            for (int r = 0; r < kTogether; ++r) {
                uint32_t (&k)[kOfLane] = key[r];
                const uint32_t mine = max(max(k[0], k[1]), max(k[2], k[3]));
                const uint32_t most = __reduce_max_sync(~0u, mine);
                const int owner = __ffs(__ballot_sync(~0u, mine == most)) - 1;
                if (lane != owner) continue;
                const int which = k[0] == most ? 0 : k[1] == most ? 1 : k[2] == most ? 2 : 3;
#pragma unroll
                for (int i = 0; i < kOfLane; ++i) k[i] = which == i ? 0 : k[i];
                if (first + r > last || !role.live(first + r)) continue;
                *chosen |= 1u << (8 * which + first + r);
                table.choice[first + r][j] = static_cast<uint8_t>(lane * kOfLane + which);
                table.weight[first + r][j] = logit_of(most);
            }
        }
        __syncwarp();
    }

    // From logits to weights: row `first` by lanes 0 … 15, the next one by the others, a lane a choice.
    __device__ __forceinline__ static void weigh_rows(const Common& role, int first, RoutingTable& table) {
        static_assert(kTogether == 2 && kMaxTopK == 16, "a half warp a row, a lane a choice");
        const Geometry& g = role.c.plan.geometry;
        float* weights = table.weight[min(first + role.lane / 16, kMaxBatch - 1)];
        const int j = role.lane % 16;
        const float logit = j < g.top_k ? weights[j] : -INFINITY;
        float weight = g.softmax_router ? __expf(logit - __shfl_sync(~0u, logit, role.lane & 16)) : fast_sigmoid(logit);
        if (g.softmax_router || g.renormalise) {
            float sum = j < g.top_k ? weight : 0;
#pragma unroll 1
            for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
            weight = __fdividef(weight, sum);
        }
        if (j < g.top_k) weights[j] = weight;
        __syncwarp();
    }

    // The active experts in ascending order, with their rows.
    __device__ __forceinline__ static void list_active(int lane, uint32_t chosen, RoutingTable& table) {
        uint32_t used[kOfLane];
        int before = 0, active = 0;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            used[i] = __ballot_sync(~0u, (chosen >> (8 * i) & 0xff) != 0);
            before += __popc(used[i] & ((1u << lane) - 1));
            active += __popc(used[i]);
        }
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const uint32_t rows = chosen >> (8 * i) & 0xff;
            if (rows == 0) continue;
            table.expert[before] = static_cast<uint8_t>(lane * kOfLane + i);
            table.rows[before++] = static_cast<uint8_t>(rows);
        }
        if (lane == 0) table.active = active;
    }

    int layer_ = -1;
    Cursor cursor_ = Cursor::filling();
};

}  // namespace north_jax::megakernel::pipeline
