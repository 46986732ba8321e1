// The decode kernel as its caller sees it: everything it reads, by value or in device memory, and one launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/megakernel/channel.h"
#include "csrc/megakernel/pipeline/tasks.h"
#include "csrc/megakernel/plan.h"
#include "csrc/megakernel/words.h"

namespace north_jax::megakernel {

inline constexpr int32_t kMaxLayers = 64;    // of a model: pools travel as kernel parameters
inline constexpr int32_t kMaxExperts = 512;  // of a layer
inline constexpr int32_t kMaxHeadDim = 256;

// Task lists and model in device memory. The owner keeps all of it until the kernels that were launched with it have
// ended.
struct DevicePlan {
    Geometry geometry;
    Type type;
    const WeightMatrix* weights;         // [(layers + 1) · kWeightCount]
    const float* frequencies;            // [d/2]
    const int32_t* tasks;                // [n, kDescriptorFields]: of the plain kernel
    const PipelineTask* pipeline_tasks;  // [n]: of the pipelined one
    const int32_t* begin;                // [sms + 1]
    BufferPlace buffers[kBufferCount];
    int32_t sms;
    int32_t batch;
    bool pipelined;  // by the pipelined kernel, not the plain one
    int32_t window;  // of sliding layers, for the pipelined kernel
};

// What the first wait that timed out was waiting for; kind 0: nothing went wrong. Pinned, mapped host memory.
struct DeviceFault {
    enum Kind : uint32_t {
        kNone = 0,
        kWait = 1,
        kSliceWait = 2,
        kStepEnd = 3,
        kRingFull = 4,
        kBadTask = 5,
        kBlocked = 6,
        kNoPage = 7,
        kUnseen = 8
    };
    uint32_t kind;
    int32_t sm;
    int32_t role;  // of the warp
    int32_t task;  // row in `tasks`, -1 for none
    int32_t counter;
    uint32_t needed;  // arrivals of this step, where it waited for a counter
    uint32_t seen;
    int32_t step;
};

// The buffers of one call; see Batch.
struct DeviceBatch {
    int32_t* rows;
    const int32_t* full_table;
    const int32_t* sliding_table;
    int32_t full_entries;
    int32_t sliding_entries;
    std::byte* workspace;
    int32_t* counts;
    const int32_t* biases;
    const uint32_t* masks;
    Pool pools[kMaxLayers];
};

struct Quantum {
    uint32_t number;
    int32_t steps;
    uint64_t timeout_ns;      // of one wait
    uint32_t counter_origin;  // what the counters begin with: they are compared by difference
};

// "" or why this device or model cannot run the kernel.
const char* unsupported(const Geometry& geometry, int32_t batch);

// Enqueues what makes the words ready for a launch: counters at `origin`, all else zero.
cudaError_t reset_words(uint32_t* words, const WordLayout& layout, uint32_t origin, cudaStream_t stream);

// Enqueue one quantum: a cooperative launch of plan.sms blocks. `channel` and `fault` are device addresses of mapped
// memory. The plain kernel runs any lists, in float32 too; the pipelined one is the fast one.
cudaError_t launch_plain(const DevicePlan& plan, const DeviceWords& words, const DeviceBatch& batch, Channel* channel,
                         DeviceFault* fault, const Quantum& quantum, cudaStream_t stream);
cudaError_t launch_pipelined(const DevicePlan& plan, const DeviceWords& words, const DeviceBatch& batch,
                             Channel* channel, DeviceFault* fault, const Quantum& quantum, cudaStream_t stream);

}  // namespace north_jax::megakernel
