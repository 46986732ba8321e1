#include "csrc/warp_decode/grouped.cuh"
#include "csrc/warp_decode/launch.h"
#include "csrc/warp_decode/plain.cuh"
#include "csrc/warp_decode/shared.cuh"

namespace north_jax::warp_decode {
namespace {

// A kernel and what it is launched with.
template <class Op>
struct Launch {
    void (*kernel)(Op);
    int shared_bytes;  // of a block; 0: as many blocks as there are outputs, else as many as fit the GPU
};

template <Format format>
Launch<GateUp> gate_up(const GateUp& op, Form form) {
    if (form == Form::kPlain) return {gate_up_plain<format>, 0};
    return {gate_up_shared<format>, gate_up_bytes<format>(op)};
}

template <Format format>
Launch<Down> down(const Down& op, Form form) {
    if (form == Form::kPlain) return {down_plain<format>, 0};
    return {down_shared<format>, down_bytes<format>(op)};
}

// Blocks that are resident at once.
cudaError_t resident_blocks(const void* kernel, int shared_bytes, int& blocks) {
    int device = 0, multiprocessors = 0, each = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (status == cudaSuccess) {
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    if (status == cudaSuccess) {
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, shared_bytes);
    }
    blocks = multiprocessors * each;
    return status;
}

// work: blocks of the plain form, and the most that the other one has something to do for.
template <class Op>
cudaError_t enqueue(const Launch<Op>& launch, const Op& op, int work, bool early, cudaStream_t stream) {
    int blocks = work;
    if (launch.shared_bytes > 0) {
        int resident = 0;
        const auto* kernel = reinterpret_cast<const void*>(launch.kernel);
        const cudaError_t status = resident_blocks(kernel, launch.shared_bytes, resident);
        if (status != cudaSuccess) return status;
        blocks = resident < work ? resident : work;
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, launch.kernel, op);
}

}  // namespace

cudaError_t launch_gate_up(const GateUp& op, Form form, cudaStream_t stream) {
    const auto launch = [&] {
        switch (op.weights.format) {
            case Format::kBfloat16:
                return gate_up<Format::kBfloat16>(op, form);
            case Format::kFp8Channel:
                return gate_up<Format::kFp8Channel>(op, form);
            case Format::kFp8Block:
                return gate_up<Format::kFp8Block>(op, form);
            default:
                return gate_up<Format::kMxfp8>(op, form);
        }
    }();
    return enqueue(launch, op, op.pairs() * (op.width() / kWarps), false, stream);
}

cudaError_t launch_down(const Down& op, Form form, bool follows, cudaStream_t stream) {
    const auto launch = [&] {
        switch (op.weights.format) {
            case Format::kBfloat16:
                return down<Format::kBfloat16>(op, form);
            case Format::kFp8Channel:
                return down<Format::kFp8Channel>(op, form);
            case Format::kFp8Block:
                return down<Format::kFp8Block>(op, form);
            default:
                return down<Format::kMxfp8>(op, form);
        }
    }();
    const int work = form == Form::kPlain ? op.tokens * (op.weights.rows / kWarps) : op.weights.rows / kRows;
    return enqueue(launch, op, work, follows, stream);
}

cudaError_t launch_grouped_matmul(const GroupedMatmul& op, cudaStream_t stream) {
    const Launch<GroupedMatmul> launch{grouped_matmul, grouped_bytes()};
    return enqueue(launch, op, op.tiles * (op.weights.rows / kRows), false, stream);
}

}  // namespace north_jax::warp_decode
