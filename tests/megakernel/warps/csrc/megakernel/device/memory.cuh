// In place of csrc/megakernel/device/memory.cuh: fibers share one memory. Relaxed accesses order nothing.
#pragma once

#include "cuda_runtime.h"

namespace north_jax::megakernel {

template <class T>
T load_acquire(const T* p) {
    if (fibers::observer != nullptr) fibers::observer->acquire(p);
    return *p;
}
template <class T>
T load_relaxed(const T* p) {
    return *p;
}
template <class T>
void store_release(T* p, T value) {
    fibers::release();
    if (fibers::observer != nullptr) fibers::observer->release(p);
    *p = value;
}
template <class T>
void add_release(T* p, int value) {
    store_release(p, *p + static_cast<T>(value));
}
template <class T>
void add_relaxed(T* p, int value) {
    *p += value;
}
inline void store_relaxed(uint32_t* p, uint32_t value) { fibers::store_late(p, {value}); }
inline void store_relaxed(uint4* p, const uint4& v) {
    fibers::store_late(reinterpret_cast<uint32_t*>(p), {v.x, v.y, v.z, v.w});
}
template <class T>
T load_acquire_system(const T* p) {
    return load_acquire(p);
}
template <class T>
void store_release_system(T* p, T value) {
    store_release(p, value);
}
inline float4 load_fresh(const float* p, bool exists = true) {
    return exists ? *reinterpret_cast<const float4*>(p) : float4{0, 0, 0, 0};
}
inline uint4 load_fresh_words(const void* p) { return *static_cast<const uint4*>(p); }
inline float2 load_fresh_two(const float* p) { return *reinterpret_cast<const float2*>(p); }
inline uint64_t nanoseconds() { return fibers::machine->now; }

}  // namespace north_jax::megakernel
