// The shared memory of a block of the pipelined kernel: what its roles hand to each other.
//
//   tasks    ring of descriptors, filled by the controller for everybody
//   pages    ring of weight rows and keys, filled by the producer for the consumers
//   input    the normalised input of a layer, from the loader for the consumers
//   stages   ring of other activations, filled by the loader for the consumers
//   sums     the consumers' sums of a tile, for the storers
//   routing  the experts of a layer, chosen by the router for everybody
//
// Each ring has a barrier "full" and a barrier "empty" a slot. Fixed parts come first (Shared), then pages, stages and
// sums, whose sizes depend on the batch (Layout).
#pragma once

#include "csrc/megakernel/device/barrier.cuh"
#include "csrc/megakernel/device/block.cuh"
#include "csrc/megakernel/device/context.cuh"
#include "csrc/megakernel/division.h"
#include "csrc/megakernel/operations/sample.cuh"
#include "csrc/megakernel/pipeline/limits.h"
#include "csrc/megakernel/pipeline/trace.cuh"

namespace north_jax::megakernel::pipeline {

constexpr int kStorerWarps = 2;  // tiles go to one and the other in turn
constexpr int kMaxSums = 4;      // slots of sums
// Sixteen: with more, a thread would have fewer than 128 registers, and what does not fit into them would wait for the
// L2.
constexpr int kWarps = kConsumerWarps + 2 + kStorerWarps + kLoaderWarps;
constexpr int kThreads = kWarps * 32;
// Warps of a block in order: consumers, controller, producer, storers, loader.
constexpr int kControllerWarp = kConsumerWarps, kProducerWarp = kControllerWarp + 1;
constexpr int kFirstStorer = kProducerWarp + 1, kFirstLoader = kFirstStorer + kStorerWarps;
__host__ __device__ constexpr Role role_of_warp(int warp) {
    return warp < kConsumerWarps     ? Role::kConsumer
           : warp == kControllerWarp ? Role::kController
           : warp == kProducerWarp   ? Role::kProducer
           : warp < kFirstLoader     ? Role::kStorer
                                     : Role::kLoader;
}
constexpr int kTaskReaders = kWarps - 1;  // all but the controller

constexpr int kPageBytes = kTileRows * kRowStride;
constexpr int kMaxPages = 7;
constexpr int kBytesInFlight = 72 * 1024;  // that have not landed: more are latency for everybody's loads
constexpr int kStages = 2;

constexpr int kScoreStride = 80;  // floats of a head's scores of a page: 64 keys, 4 unused after every 16
// Floats of a column of sums: 16 rows, and 4 against bank conflicts between columns.
__host__ __device__ constexpr int sums_stride(int batch) { return batch == 1 ? 16 : 20; }

// The experts of a layer. Ranks number the active ones in ascending order.
struct RoutingTable {
    int active;
    uint8_t expert[kMaxPipelineExperts];  // by rank
    uint8_t rows[kMaxPipelineExperts];    // by rank: bit b, row b goes there
    uint8_t choice[kMaxBatch][kMaxTopK];  // expert of each of a row's choices
    float weight[kMaxBatch][kMaxTopK];

    // Which of row b's choices is `expert`.
    __device__ __forceinline__ int choice_of(int b, int expert) const {
        int j = 0;
#pragma unroll 1
        while (choice[b][j] != expert) ++j;
        return j;
    }
    // The same for the row of each half of a warp; the whole warp calls it.
    __device__ __forceinline__ int choice_of_half(int b, int expert, int lane) const {
        const uint32_t found = __ballot_sync(~0u, choice[b][lane % 16] == expert);
        return __ffs(lane < 16 ? found & 0xffff : found >> 16) - 1;
    }
};

// One item of attention, and the pages that hold its earlier keys.
struct KeyRange {
    int row, head, split, splits;
    int begin, end;  // positions whose keys are in pages
    int first_page, pages;
    int first_entry;  // of the row's page table
    int has_self;     // the step's own key is this split's too
};

// What waits need wherever they are.
struct Patience {
    uint32_t* abort;
    DeviceFault* fault;
    const uint32_t* counters;
    uint64_t timeout_ns;
};

struct Shared {
    uint64_t page_full[kMaxPages], page_empty[kMaxPages];
    uint64_t stage_full[kStages], stage_empty[kStages];
    uint64_t staged;  // copies that the loader looks at first
    uint64_t input_full, input_empty;
    uint64_t sums_full[kMaxSums], sums_empty[kMaxSums];
    uint64_t routing_full[2], routing_empty[2];
    uint64_t consumers_met;  // of the consumers among themselves
    uint64_t scores_full[2], scores_empty[2];
    uint64_t head_stored;  // the second storer's part of the logits
    uint64_t step_begins;
    uint64_t tasks_full[kTaskSlots], tasks_empty[kTaskSlots];
    alignas(16) PipelineTask task[kTaskSlots][kTasksOfSlot];
    KeyRange keys[kWarps];  // of each warp
    Patience patience;
    const DeviceWords* words;
    int task_of_warp[kWarps];  // for reports; -1 between steps
    int step;
    uint32_t counter_origin;  // beside `step`: waits load both at once
    int first_task, end_task;
    alignas(16) float scores[2][kQueryHeads * kScoreStride];
    float self_score[2][kQueryHeads];  // of the key of this very step; scores are those of 2^x
    alignas(16) float norm_sums[2][kLoaderWarps];
    Best best[kStorerWarps][kMaxBatch];
    RoutingTable routing[2];
    alignas(16) float combined[kHeadDim];
    int attention_items[2];  // of the step's full layers, and of its sliding ones
    uint32_t live_rows;      // that the step began with: bit b, row b
    uint32_t decision;
    bool ended;
    volatile bool aborted;       // after a fault, here or in another block
    volatile bool input_copied;  // by a bulk copy, once at least
    TraceTarget trace;
};

__device__ __forceinline__ Shared& shared_of_block() { return *reinterpret_cast<Shared*>(block_memory()); }

// Of one row as a step begins: its parameters, cosine and sine of its position, the pages that it lies in.
constexpr int kRotationBytes = kHeadDim / 2 * static_cast<int>(sizeof(float2));
constexpr int kRowBytesOfStep = kRowFields * 4 + kRotationBytes + 2 * 4 + 2 * static_cast<int>(sizeof(Splits));

// Sizes that depend on the batch; equal on host and device.
struct Layout {
    int batch;
    int pages;
    int input_bytes;
    int stage_bytes;
    int sums_bytes;  // of one slot
    int sums;        // slots: both storers have as many
    int bytes;       // of all
};

__host__ __device__ constexpr int align(int bytes) { return (bytes + 15) / 16 * 16; }

// As many pages as fit into `total` bytes.
__host__ __device__ constexpr Layout layout(int batch, int hidden, int total) {
    Layout l{};
    l.batch = batch;
    l.input_bytes = (hidden + kPageColumns - 1) / kPageColumns * batch * kRowStride;
    l.stage_bytes = stage_bytes(batch);
    l.sums_bytes = kConsumerWarps * batch * sums_stride(batch) * 4;
    l.sums = batch <= 2 ? kMaxSums : kStorerWarps;
    const int fixed = align(sizeof(Shared)) + align(batch * kRowBytesOfStep) + align(l.input_bytes) +
                      align(kStages * l.stage_bytes) + align(l.sums * l.sums_bytes);
    l.pages = (total - fixed) / kPageBytes;
    if (l.pages > kMaxPages) l.pages = kMaxPages;
    l.bytes = fixed + l.pages * kPageBytes;
    return l;
}

// Where the parts of a block's shared memory begin.
struct Memory {
    int32_t* rows;           // [batch, kRowFields]
    float2* rotation;        // [batch, kHeadDim / 2]
    int32_t* pages_of_rows;  // [batch, 2]: full, sliding
    Splits* splits;          // [2, batch], of full and of sliding layers; count 0 in idle rows
    uint32_t pages;          // shared-memory addresses
    uint32_t input;
    uint32_t stages;
    unsigned char* input_generic;
    float* sums;
    Layout layout;

    __device__ __forceinline__ Memory(unsigned char* base, const Layout& l) : layout(l) {
        unsigned char* next = base + align(sizeof(Shared));
        rotation = reinterpret_cast<float2*>(next);
        rows = reinterpret_cast<int32_t*>(next + l.batch * kRotationBytes);
        pages_of_rows = rows + l.batch * kRowFields;
        splits = reinterpret_cast<Splits*>(pages_of_rows + 2 * l.batch);
        next += align(l.batch * kRowBytesOfStep);
        pages = shared_address(next);
        next += l.pages * kPageBytes;
        input = shared_address(next);
        input_generic = next;
        next += align(l.input_bytes);
        stages = shared_address(next);
        static_assert(sizeof(SampleScratch) <= kStages * kMinStageBytes, "sampling fits into the stages");
        next += align(kStages * l.stage_bytes);
        sums = reinterpret_cast<float*>(next);
    }

    // In place of stages, which nobody uses while tokens are drawn.
    __device__ __forceinline__ SampleScratch* sample() const {
        return reinterpret_cast<SampleScratch*>(input_generic + align(layout.input_bytes));
    }
};

}  // namespace north_jax::megakernel::pipeline
