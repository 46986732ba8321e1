// Routing: each layer's experts from the router's logits, as soon as these are there. By one warp of the loader.
#pragma once

#include "csrc/megakernel/device/activation.cuh"
#include "csrc/megakernel/pipeline/exchange.cuh"

namespace north_jax::megakernel::pipeline {

struct Router {
    // At the first task of a layer that needs its experts: chooses them. `turn` is that of who fills.
    __device__ __forceinline__ static bool choose(const Common& r, RoutingTurn& turn) {
        if (r.c.field(FIELD_LAYER) == turn.layer) return true;
        turn.layer = r.c.field(FIELD_LAYER);
        if (!r.wait(&r.shared().routing_empty[turn.cursor.slot], turn.cursor.parity)) return false;
        if (!r.wait_task()) return false;
        RoutingTable& table = r.shared().routing[turn.cursor.slot];
        const int batch = r.c.plan.batch;
        uint32_t chosen = 0;  // bit 8 i + b: row b goes to this lane's expert i
#pragma unroll 1
        for (int b = 0; b < batch; ++b) {
            if (r.live(b) && !choose_row(r, b, table, &chosen)) return false;
        }
        list_active(r.lane, chosen, table);
        __syncwarp();
        if (r.lane == 0) barrier_arrive(&r.shared().routing_full[turn.cursor.slot]);
        turn.cursor.advance(2);
        return true;
    }

   private:
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

    // The choices of one row, and their weights; false after a fault.
    __device__ __forceinline__ static bool choose_row(const Common& role, int b, RoutingTable& table,
                                                      uint32_t* chosen) {
        const Geometry& g = role.c.plan.geometry;
        const int lane = role.lane, first = lane * kOfLane;
        const bool exist = first < g.experts;
        const float* logits = role.exchanged<const float>(FIELD_INPUT_2) + b * g.experts + first;
        float4 four;
        for (uint64_t begin = 0;;) {
            four = load_fresh(logits, exist);
            if (__all_sync(~0u, largest_word(four) != kNothing)) break;
            begin = look_again(begin, role.c.field(FIELD_WAIT), role.c.field(FIELD_WAIT_NEED));
            if (begin == 0) return false;
        }
        uint32_t key[kOfLane] = {key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w)};
#pragma unroll
        for (uint32_t& k : key) k = exist ? k : 0;
        const uint32_t lanes_before = (1u << lane) - 1;
        uint8_t* choices = table.choice[b];
        float* weights = table.weight[b];
#pragma unroll 1
        for (int j = 0; j < g.top_k; ++j) {
            const uint32_t mine = max(max(key[0], key[1]), max(key[2], key[3]));
            const uint32_t most = __reduce_max_sync(~0u, mine);
            // The first lane that has it, and there the first key.
            const uint32_t lanes = __ballot_sync(~0u, mine == most);
            bool wanted = mine == most && (lanes & lanes_before) == 0;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                const bool taken = wanted && key[i] == most;
                if (taken) choices[j] = static_cast<uint8_t>(first + i), weights[j] = logit_of(most);
                *chosen |= taken ? 1u << (8 * i + b) : 0;
                key[i] = taken ? 0 : key[i];
                wanted = wanted && !taken;
            }
        }
        __syncwarp();
        const float logit = lane < g.top_k ? weights[lane] : -INFINITY;
        float weight = g.softmax_router ? __expf(logit - __shfl_sync(~0u, logit, 0)) : fast_sigmoid(logit);
        if (g.softmax_router || g.renormalise) {
            float sum = lane < g.top_k ? weight : 0;
#pragma unroll 1
            for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
            weight = __fdividef(weight, sum);
        }
        if (lane < g.top_k) weights[lane] = weight;
        return true;
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
};

}  // namespace north_jax::megakernel::pipeline
