// Hand-overs like those of the pipelined kernel in a program of their own, in order and with the reads before the wait:
// what racecheck says of the ones and of the others shows what its findings in the kernel are worth.
//
//   racecheck_control copies|sums|team ordered|unordered
//
//   copies  rows by bulk copies into a ring, for two warps: pages, stages and tasks
//   sums    what two warps write into a ring, for a third: sums and scores
//   team    a value of each of four warps, for all of them, across a named barrier: the norm
//
// The waits are the kernel's own. Ends with 0 where the sums that were read are right; out of order they may be.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "csrc/megakernel/device/barrier.cuh"
#include "csrc/megakernel/device/team.cuh"
#include "csrc/megakernel/device/tensor.cuh"

using namespace north_jax::megakernel;

namespace {

constexpr int kSlots = 2, kRounds = 8, kReaders = 2, kWriters = 2, kTeamWarps = 4;
constexpr int kRows = 4, kRowWords = 32;  // of a slot of copies: a word a lane
constexpr int kRowBytes = kRowWords * 4;

struct Ring {
    alignas(16) uint32_t words[kSlots][kRows * kRowWords];
    uint64_t full[kSlots], empty[kSlots];
};

__device__ void init(Ring& ring, int fills, int empties) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(&ring.full[i], fills);
            barrier_init(&ring.empty[i], empties);
        }
        fence_shared_for_bulk_copies();
    }
    __syncthreads();
}

// As the roles of the pipelined kernel wait.
__device__ void wait(uint64_t* barrier, int parity) {
    while (!__all_sync(~0u, barrier_test(barrier, parity))) {
    }
}

__device__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

template <bool kOrdered>
__global__ void copies(const uint32_t* from, uint32_t* sums) {
    __shared__ Ring ring;
    init(ring, 1, kReaders);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
        const int slot = i % kSlots, parity = i / kSlots % 2;
        if (warp == 0) {
            wait(&ring.empty[slot], parity ^ 1);
            if (lane == 0) barrier_arrive_expect(&ring.full[slot], kRows * kRowBytes);
            __syncwarp();
            const uint32_t to = shared_address(ring.words[slot]) + lane * kRowBytes;
            if (lane < kRows) bulk_copy(to, from + (i * kRows + lane) * kRowWords, kRowBytes, &ring.full[slot]);
        } else {
            if (kOrdered) wait(&ring.full[slot], parity);
            const uint32_t at = shared_address(ring.words[slot]) + lane * 4;
            for (int row = warp - 1; row < kRows; row += kReaders) sum += load_shared(at + row * kRowBytes);
            if (!kOrdered) wait(&ring.full[slot], parity);
            arrive(&ring.empty[slot]);
        }
    }
    atomicAdd(sums, sum);
}

template <bool kOrdered>
__global__ void sums(const uint32_t* from, uint32_t* sums) {
    __shared__ Ring ring;
    init(ring, kWriters, 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
        const int slot = i % kSlots, parity = i / kSlots % 2;
        if (warp < kWriters) {
            wait(&ring.empty[slot], parity ^ 1);
            for (int row = warp; row < kRows; row += kWriters) {
                const int word = row * kRowWords + lane;
                ring.words[slot][word] = from[i * kRows * kRowWords + word];
            }
            arrive(&ring.full[slot]);
        } else {
            if (kOrdered) wait(&ring.full[slot], parity);
            for (int row = 0; row < kRows; ++row) sum += ring.words[slot][row * kRowWords + lane];
            if (!kOrdered) wait(&ring.full[slot], parity);
            arrive(&ring.empty[slot]);
        }
    }
    atomicAdd(sums, sum);
}

template <bool kOrdered>
__global__ void team(const uint32_t* from, uint32_t* sums) {
    __shared__ alignas(16) uint32_t words[2][kTeamWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Team all{static_cast<int>(threadIdx.x), kTeamWarps * 32, 1};
    const Team half{static_cast<int>(threadIdx.x) % 64, 64, 2};
    __syncthreads();
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
        // Half of the team meets alone meanwhile, as the folders of splits do.
        if (warp >= kTeamWarps / 2) half.sync();
        uint32_t* own = words[i % 2];
        if (lane == 0) own[warp] = from[i * kTeamWarps + warp];
        if (kOrdered) all.sync();
        const uint4 four = *reinterpret_cast<const uint4*>(own);
        if (!kOrdered) all.sync();
        sum += four.x + four.y + four.z + four.w;
    }
    atomicAdd(sums, sum);
}

struct Case {
    const char* name;
    void (*ordered)(const uint32_t*, uint32_t*);
    void (*unordered)(const uint32_t*, uint32_t*);
    int threads, words;
    uint32_t readers;  // of each word
};
const Case kCases[] = {
    {"copies", copies<true>, copies<false>, (1 + kReaders) * 32, kRounds * kRows * kRowWords, 1},
    {"sums", sums<true>, sums<false>, (kWriters + 1) * 32, kRounds * kRows * kRowWords, 1},
    {"team", team<true>, team<false>, kTeamWarps * 32, kRounds * kTeamWarps, kTeamWarps * 32},
};

void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
    std::exit(5);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const bool ordered = std::string(argv[2]) == "ordered";
    for (const Case& c : kCases) {
        if (argv[1] != std::string(c.name)) continue;
        uint32_t host[kRounds * kRows * kRowWords], expected = 0, sum = 0;
        for (int i = 0; i < c.words; ++i) expected += host[i] = i * i + 1;
        uint32_t *from, *to;
        check(cudaMalloc(&from, sizeof host));
        check(cudaMalloc(&to, sizeof sum));
        check(cudaMemcpy(from, host, sizeof host, cudaMemcpyHostToDevice));
        check(cudaMemset(to, 0, sizeof sum));
        (ordered ? c.ordered : c.unordered)<<<1, c.threads>>>(from, to);
        check(cudaDeviceSynchronize());
        check(cudaMemcpy(&sum, to, sizeof sum, cudaMemcpyDeviceToHost));
        return ordered && sum != expected * c.readers ? 1 : 0;
    }
    return 2;
}
