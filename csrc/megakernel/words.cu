#include "csrc/megakernel/launch.h"

namespace north_jax::megakernel {
namespace {

constexpr int kThreads = 256;

__global__ void fill(uint32_t* words, int64_t counter_words, int64_t count, uint32_t origin) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i < count) words[i] = i < counter_words ? origin : 0;
}

}  // namespace

cudaError_t reset_words(uint32_t* words, const WordLayout& layout, uint32_t origin, cudaStream_t stream) {
    const int64_t count = layout.words();
    fill<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        words, layout.counter_words(), count, origin);
    return cudaGetLastError();
}

}  // namespace north_jax::megakernel
