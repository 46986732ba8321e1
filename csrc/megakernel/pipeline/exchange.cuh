// What SMs publish for all others in every layer: queries, keys and values, router logits, and the outputs that the
// next norm adds.
//
// To order such data before an arrival takes a fence, 1.6 to 2.2 µs of every hop while weights stream. So the data says
// itself whether it is there: before a step every word of these buffers holds kNothing, which no sum and no pair of
// bfloat16 is, and who reads looks again until none of its words does. Arrivals only say when to begin.
//
// A buffer has a plane for each layer, and as many again for every other step: while one half is in use, the other is
// cleared. Between the two lies the end of a step, which orders them. The launch clears both.
#pragma once

#include "csrc/megakernel/pipeline/role.cuh"

namespace north_jax::megakernel::pipeline {

constexpr uint32_t kNothing = ~0u;  // in exchanged words that are not there yet: a NaN that arithmetic does not make

// Whether a warp goes on looking for words that others publish: `begin` is 0 at first, and then what this gave. 0 after
// a fault. The arrivals at `counter` have been seen.
__device__ __noinline__ inline uint64_t look_again(uint64_t begin, int counter, int need) {
    const Shared& s = shared_of_block();
    __nanosleep(20);
    const uint64_t now = nanoseconds();
    if (begin == 0) return now;
    if (__any_sync(~0u, load_relaxed(s.patience.abort) != 0)) return 0;
    if (!__any_sync(~0u, now - begin > s.patience.timeout_ns)) return begin;
    if (threadIdx.x % 32 == 0) report_waiter(DeviceFault::kUnseen, counter, need, need);
    __syncwarp();
    return 0;
}

// kNothing if one of the words is.
__device__ __forceinline__ uint32_t largest_word(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)); }
__device__ __forceinline__ uint32_t largest_word(const float4& v) {
    return largest_word(uint4{__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)});
}

// As step c.step begins: clears the half of the one after it. This SM's share, by all threads of a team.
__device__ __forceinline__ void clear_exchanged(const Context& c, const Team& team) {
    const DevicePlan& plan = c.plan;
#pragma unroll 1
    for (int b = 0; b < kExchanged; ++b) {
        const BufferPlace& place = plan.buffers[exchanged_buffer(b)];
        const int count = static_cast<int>(place.plane_bytes / 16 * (place.planes / 2));
        auto* to = reinterpret_cast<uint4*>(c.batch.workspace + place.offset) + (c.step + 1) % 2 * count;
#pragma unroll 1
        for (int i = c.sm * team.threads + team.thread; i < count; i += plan.sms * team.threads) {
            store_relaxed(to + i, uint4{kNothing, kNothing, kNothing, kNothing});
        }
    }
}

}  // namespace north_jax::megakernel::pipeline
