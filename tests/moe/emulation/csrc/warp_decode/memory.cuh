// In place of csrc/warp_decode/memory.cuh. Copies land when they are waited for, not before; until then their place
// reads as NaN. What the previous kernel writes is there once somebody has waited for it.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "cuda_runtime.h"

namespace emulation {

struct Copy {
    void* to;
    const void* from;  // nullptr: zeros
    int bytes;
};
inline std::unordered_map<fibers::Fiber*, std::deque<std::vector<Copy>>> groups;  // the last one is open
inline std::function<void()> previous_kernel_ends;

inline void copy(void* to, const void* from, int bytes) {
    auto* place = static_cast<unsigned char*>(to);
    const fibers::Block& block = *fibers::current->warp->block;
    fibers::require(place >= block.memory && place + bytes <= block.memory + block.bytes,
                    "a copy beyond the block's memory");
    const auto misaligned = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    fibers::require(misaligned % bytes == 0, "a copy that is not aligned");
    std::memset(to, 0xff, bytes);
    auto& own = groups[fibers::current];
    if (own.empty()) own.emplace_back();
    own.back().push_back({to, from, bytes});
}

inline void wait(size_t pending) {
    auto& own = groups[fibers::current];
    while (own.size() > pending + 1) {
        for (const Copy& copy : own.front()) {
            if (copy.from == nullptr) {
                std::memset(copy.to, 0, copy.bytes);
            } else {
                std::memcpy(copy.to, copy.from, copy.bytes);
            }
        }
        own.pop_front();
    }
}

// After a kernel: whether every copy was waited for.
inline bool all_landed() {
    for (const auto& [fiber, own] : groups) {
        for (const auto& group : own) {
            if (!group.empty()) return false;
        }
    }
    groups.clear();
    return true;
}

}  // namespace emulation

namespace north_jax::warp_decode {

inline uint64_t evict_first() { return 0; }
inline uint4 load_weights(const void* p, uint64_t) {
    fibers::require(reinterpret_cast<uintptr_t>(p) % 16 == 0, "a load that is not aligned");
    return *static_cast<const uint4*>(p);
}
inline uint32_t load_word(const uint32_t* p) { return *p; }
inline uint4 load_activations(const void* p) { return load_weights(p, 0); }
inline void copy_weights(void* to, const void* from, bool inside, uint64_t) {
    emulation::copy(to, inside ? from : nullptr, 16);
}
inline void copy_word(void* to, const void* from) { emulation::copy(to, from, 4); }
inline void commit_copies() {
    auto& own = emulation::groups[fibers::current];
    if (own.empty()) own.emplace_back();
    own.emplace_back();
}
template <int pending>
void wait_for_copies() {
    emulation::wait(pending);
}
inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() { emulation::previous_kernel_ends(); }

}  // namespace north_jax::warp_decode
