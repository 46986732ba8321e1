// What the kernels need of CUDA, on a CPU: threads are fibers (fibers.h).
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "fibers.h"

#define __host__
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct dim3 {
    unsigned x;
};

#define threadIdx (dim3{static_cast<unsigned>(fibers::current->warp->number * 32 + fibers::current->lane)})
#define blockIdx (dim3{static_cast<unsigned>(fibers::current->warp->block->number)})
#define gridDim (dim3{static_cast<unsigned>(fibers::machine->blocks.size())})

// The host's side: a launch runs the kernel until it ends. `invoke` calls it with what the arguments point at.
using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidConfiguration = 9;
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaFuncAttributeMaxDynamicSharedMemorySize };
namespace fibers {
inline std::function<void(void**)> invoke;
inline int shared_memory = 227 * 1024;  // of an SM
inline uint64_t took_ns = 0;
}  // namespace fibers
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
    *value = fibers::shared_memory;
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t size, cudaStream_t) {
    std::memset(to, byte, size);
    return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
inline cudaError_t cudaLaunchCooperativeKernel(const void*, dim3 blocks, dim3 threads, void** arguments, size_t bytes,
                                               cudaStream_t) {
    fibers::took_ns = fibers::run(blocks.x, threads.x, bytes, [=] { fibers::invoke(arguments); });
    return cudaSuccess;
}

inline void __syncthreads() {
    fibers::meet_team(0, static_cast<int>(fibers::current->warp->block->warps.size()) * 32, true);
}
inline void __syncwarp() { fibers::meet_warp(fibers::kSyncWarp); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return fibers::exchange("shfl", value, [&](auto of) { return of(from % 32); });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
    return fibers::exchange("shfl_xor", value, [&](auto of) { return of(fibers::lane() ^ by); });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
    return fibers::exchange("shfl_up", value,
                            [&](auto of) { return of(fibers::lane() < by ? fibers::lane() : fibers::lane() - by); });
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
    return fibers::exchange("shfl_down", value, [&](auto of) {
        return of(fibers::lane() + by > 31 ? fibers::lane() : fibers::lane() + by);
    });
}
inline unsigned __ballot_sync(unsigned, bool value) {
    return fibers::exchange("ballot", value, [](auto of) {
        unsigned bits = 0;
        for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(of(i)) << i;
        return bits;
    });
}
template <class T>
unsigned __match_any_sync(unsigned, T value) {
    return fibers::exchange("match_any", value, [&](auto of) {
        unsigned bits = 0;
        for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(of(i) == value) << i;
        return bits;
    });
}
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __reduce_add_sync(unsigned, int value) {
    return fibers::exchange("reduce_add", value, [](auto of) {
        int sum = 0;
        for (int i = 0; i < 32; ++i) sum += of(i);
        return sum;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return fibers::exchange("reduce_max", value, [](auto of) {
        unsigned most = 0;
        for (int i = 0; i < 32; ++i) most = max(most, of(i));
        return most;
    });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf expf  // the C library has a declaration of that name
template <class To, class From>
To bits_as(From x) {
    To y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
}
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned ns) { fibers::sleep(ns); }

// Fibers take turns where they wait.
template <class T, class Change>
T atomically(T* p, Change change) {
    fibers::in_atomic = true;
    const T before = *p;
    *p = change(before);
    fibers::in_atomic = false;
    return before;
}
template <class T, class U>
T atomicAdd(T* p, U value) {
    return atomically(p, [=](T before) { return static_cast<T>(before + static_cast<T>(value)); });
}
template <class T, class U>
T atomicOr(T* p, U value) {
    return atomically(p, [=](T before) { return static_cast<T>(before | static_cast<T>(value)); });
}
template <class T>
T atomicCAS(T* p, T expected, T value) {
    return atomically(p, [=](T before) { return before == expected ? value : before; });
}
