// Sizes of the pipelined kernel, and which models and task lists it runs; also for hosts without CUDA.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/host_device.h"
#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel::pipeline {

enum class Role : int { kController, kProducer, kStorer, kLoader, kConsumer };
inline constexpr const char* kRoleNames[] = {"controller", "producer", "storer", "loader", "consumer"};

constexpr int kMaxBatch = 8;  // rows: the columns of a tensor-core product
constexpr int kMaxPipelineExperts = 128;
constexpr int kConsumerWarps = 8;
constexpr int kLoaderWarps = 4;
constexpr int kTileRows = 16;                      // weight rows of a page: those of a product
constexpr int kPageColumns = 1024;                 // of a weight row: copies of 2 KB reach the memory's full bandwidth
constexpr int kStepColumns = kConsumerWarps * 16;  // that one product of all consumer warps takes
constexpr int kTasksOfSlot = 2;                    // of the task ring
constexpr int kTaskSlots = 4;
constexpr int kRowBytes = kPageColumns * 2;
constexpr int kRowStride = kRowBytes + 16;  // so that the rows of a fragment lie in different banks
constexpr int kMinStageBytes = 4 * kRowStride;
constexpr int kHeadDim = 128;
constexpr int kQueryHeads = 8;                                   // of a KV head, at most
constexpr int kResidualChunks = 2048 / (kLoaderWarps * 32 * 4);  // of four values of a row, of a loader's thread

// What SMs publish for all others in every layer, see exchange.cuh.
constexpr int kExchanged = 5;
HOST_DEVICE constexpr Buffer exchanged_buffer(int i) {
    return i == 0   ? BUFFER_QKV
           : i == 1 ? BUFFER_ROUTER_LOGITS
           : i == 2 ? BUFFER_EXPERT_HIDDEN
           : i == 3 ? BUFFER_ATTENTION_OUT
                    : BUFFER_MLP_OUT;
}

// Bytes of a stage, and of a row of activations in it.
HOST_DEVICE constexpr int stage_bytes(int batch) {
    return batch * kRowStride > kMinStageBytes ? batch * kRowStride : kMinStageBytes;
}
HOST_DEVICE constexpr int staged_row_stride(int columns) { return columns * 2 + 16; }

// Products of a layer's normalised input, and of what is staged slice by slice or expert by expert.
HOST_DEVICE inline bool takes_input(int32_t opcode) {
    return opcode == QKV_PROJ || opcode == ROUTER_GEMM || opcode == FFN_UPGATE_ACT || opcode == MOE_UPGATE_ACT ||
           opcode == LM_HEAD;
}
HOST_DEVICE inline bool takes_stages(int32_t opcode) {
    return opcode == O_PROJ || opcode == FFN_DOWN || opcode == MOE_DOWN;
}
HOST_DEVICE inline bool is_routed(int32_t opcode) { return opcode == MOE_UPGATE_ACT || opcode == MOE_DOWN; }
HOST_DEVICE inline bool is_product(int32_t opcode) { return takes_input(opcode) || takes_stages(opcode); }

// "" or why the kernel does not run these lists.
std::string refuse(const Geometry& geometry, Type type, const TaskLists& lists);

// The window of sliding layers; 0 where there is none.
int32_t window_of(const TaskLists& lists);

}  // namespace north_jax::megakernel::pipeline
