// What the kernel's sampling needs of CUDA, on a CPU: threads of a block are fibers that take turns, so that a warp's
// exchange is a meeting of 32 of them. A meeting that somebody does not come to ends the program.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __host__
#define __device__
#define __noinline__ __attribute__((noinline))

using cudaError_t = int;
using cudaStream_t = void*;
using std::isfinite;
using std::isnan;
using std::max;
using std::min;

struct ulonglong2 {
    unsigned long long x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace fibers {

inline constexpr size_t kStack = 1 << 18;

struct Meeting {
    int arrived = 0;
    int64_t number = 0;
};

// The fibers of a block.
struct Block {
    ucontext_t scheduler;
    std::vector<ucontext_t> contexts;
    std::vector<std::vector<char>> stacks;
    std::vector<char> ended;
    std::vector<Meeting> warps;
    Meeting team;
    std::vector<uint64_t> slots;  // what a fiber gives to its warp
    int running = 0;
    int64_t events = 0;  // meetings that took place, fibers that ended
    std::function<void(int)> body;
};
inline Block* block = nullptr;

inline void yield() { swapcontext(&block->contexts[block->running], &block->scheduler); }

inline void meet(Meeting& meeting, int count) {
    const int64_t number = meeting.number;
    if (++meeting.arrived == count) {
        meeting.arrived = 0;
        ++meeting.number;
        ++block->events;
    }
    while (meeting.number == number) yield();
}

inline void enter() {
    block->body(block->running);
    block->ended[block->running] = 1;
    ++block->events;
    yield();
}

// Runs body(thread) for all threads of a block.
inline void run(int threads, std::function<void(int)> body) {
    Block own;
    block = &own;
    own.body = std::move(body);
    own.contexts.resize(threads);
    own.stacks.assign(threads, std::vector<char>(kStack));
    own.ended.assign(threads, 0);
    own.warps.resize(threads / 32);
    own.slots.resize(threads);
    for (int i = 0; i < threads; ++i) {
        getcontext(&own.contexts[i]);
        own.contexts[i].uc_stack.ss_sp = own.stacks[i].data();
        own.contexts[i].uc_stack.ss_size = kStack;
        makecontext(&own.contexts[i], enter, 0);
    }
    for (int64_t before = -1; before != own.events;) {
        before = own.events;
        for (int i = 0; i < threads; ++i) {
            if (own.ended[i]) continue;
            own.running = i;
            swapcontext(&own.scheduler, &own.contexts[i]);
        }
    }
    if (std::count(own.ended.begin(), own.ended.end(), 1) == threads) return;
    std::fprintf(stderr, "threads wait for others that do not come\n");
    std::exit(3);
}

inline int lane() { return block->running % 32; }
inline void meet_warp() { meet(block->warps[block->running / 32], 32); }

// Every lane gives a value; each then sees all of them.
template <class T, class Use>
auto exchange(T value, Use use) {
    const int first = block->running / 32 * 32;
    block->slots[block->running] = 0;
    std::memcpy(&block->slots[block->running], &value, sizeof(T));
    meet_warp();
    const auto result = use([&](int from) {
        T other;
        std::memcpy(&other, &block->slots[first + from], sizeof(T));
        return other;
    });
    meet_warp();
    return result;
}

}  // namespace fibers

inline void __syncwarp() { fibers::meet_warp(); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return fibers::exchange(value, [&](auto of) { return of(from % 32); });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
    return fibers::exchange(value, [&](auto of) { return of(fibers::lane() ^ by); });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
    return fibers::exchange(value,
                            [&](auto of) { return of(fibers::lane() < by ? fibers::lane() : fibers::lane() - by); });
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
    return fibers::exchange(
        value, [&](auto of) { return of(fibers::lane() + by > 31 ? fibers::lane() : fibers::lane() + by); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
    return fibers::exchange(value, [](auto of) {
        unsigned bits = 0;
        for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(of(i)) << i;
        return bits;
    });
}
inline int __reduce_add_sync(unsigned, int value) {
    return fibers::exchange(value, [](auto of) {
        int sum = 0;
        for (int i = 0; i < 32; ++i) sum += of(i);
        return sum;
    });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __float_as_int(float x) { return static_cast<int>(reinterpret_cast<const int&>(x)); }
inline float __int_as_float(int x) { return reinterpret_cast<const float&>(x); }
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { fibers::yield(); }

// Fibers take turns at meetings alone.
template <class T, class U>
T atomicAdd(T* p, U value) {
    const T before = *p;
    *p += static_cast<T>(value);
    return before;
}
template <class T>
T atomicCAS(T* p, T expected, T value) {
    const T before = *p;
    if (before == expected) *p = value;
    return before;
}
