// The pipelined decode kernel: one block per SM, resident for a quantum, whose warps have fixed roles.
//
//   controller descriptors into the task ring                 (one warp)
//   producer   weight rows and keys into the page ring        (one warp)
//   consumers  products on tensor cores                       (eight warps)
//   storers    sums folded, finished and stored; arrivals     (two warps)
//   loader     activations into stages; routing; splits folded; and, by all of its warps, the norm, sampling and the
//              ends of steps                                  (four warps)
//
// Every role walks the SM's list by itself, and does of each task what is its part. Roles of a block meet at barriers
// in shared memory, blocks at counters in global memory.
#include "csrc/megakernel/launch.h"
#include "csrc/megakernel/pipeline/attention.cuh"
#include "csrc/megakernel/pipeline/combine.cuh"
#include "csrc/megakernel/pipeline/controller.cuh"
#include "csrc/megakernel/pipeline/epilogue.cuh"
#include "csrc/megakernel/pipeline/experts.cuh"
#include "csrc/megakernel/pipeline/names.cuh"
#include "csrc/megakernel/pipeline/norm.cuh"
#include "csrc/megakernel/pipeline/steps.cuh"
#include "csrc/megakernel/pipeline/tiles.cuh"

namespace north_jax::megakernel {
namespace pipeline {
namespace {

// What a role does of a task; false after a fault. Roles treat operations alike where they can: the fewer copies of a
// loop, the more of the code stays in the instruction cache.

__device__ __forceinline__ bool run(Producer& r) {
    const int opcode = r.c.field(FIELD_OPCODE);
    if (is_product(opcode)) return stream_weights(r);
    return opcode != ATTN_DECODE || Attention::run(r);
}

__device__ __forceinline__ bool run(Loader& r) {
    const int opcode = r.c.field(FIELD_OPCODE);
    if (opcode == EMBED) return ResidualNorm::embed(r);
    if (opcode == ADD_RMSNORM) return ResidualNorm::add_norm(r);
    if (StepEnd::takes(opcode)) return StepEnd::run(r);
    if (r.folds()) return opcode != ATTN_COMBINE || SplitsFold::run(r);
    if (takes_input(opcode) && !stage_input(r)) return false;
    if (r.routes()) return !is_routed(opcode) || Router::choose(r, r.routing);
    if (!r.stages()) return true;
    switch (opcode) {
        case ATTN_DECODE:
            return Attention::run(r);
        case O_PROJ:
        case FFN_DOWN:
            return SlicedProduct::run(r);
        case MOE_DOWN:
            return ExpertDown::run(r);
        case MOE_UPGATE_ACT:
            return r.routing.of_task(r) != nullptr;  // keeps pace with the router
        default:
            return true;
    }
}

__device__ __forceinline__ bool run(Consumer& r) {
    const int opcode = r.c.field(FIELD_OPCODE);
    if (is_product(opcode)) return multiply_tiles(r);
    return opcode != ATTN_DECODE || Attention::run(r);
}

__device__ __forceinline__ bool run(Storer& r) {
    const int opcode = r.c.field(FIELD_OPCODE);
    if (opcode == LM_HEAD) return HeadProduct::run(r);
    if (is_product(opcode)) return store_products(r);
    return opcode != ATTN_DECODE || Attention::run(r);
}

__device__ __forceinline__ void end_step(Producer& r) { r.routing.end_step(r); }
__device__ __forceinline__ void end_step(Consumer& r) { r.end_step(); }
__device__ __forceinline__ void end_step(Storer& r) { r.routing.end_step(r); }

// One step's tasks; false after a fault.
template <class R>
__device__ __forceinline__ bool run_list(R& r) {
    for (bool ended = false;;) {
        if (!r.next_task(r.part(), &ended)) return false;
        if (ended) return true;
        if (!run(r)) return false;
    }
}

// Walks the list step after step until the quantum ends; false if something failed.
template <class R>
__device__ __forceinline__ bool walk(R& r) {
    for (;; ++r.c.step) {
        bool ended;
        if (!r.begin_step(&ended)) return false;
        if (ended) return true;
        // What other blocks wrote in the last step is there for this one's bulk copies too.
        fence_bulk_copies();
        if (!run_list(r)) return false;
        end_step(r);
    }
}

__device__ __forceinline__ bool walk(Controller& r) {
    for (;; ++r.c.step) {
        bool ended;
        if (!r.begin_step(&ended)) return false;
        if (ended) return true;
        if (!r.fetch_list()) return false;
    }
}

// The loader begins and ends the steps of its block.
__device__ __forceinline__ bool walk(Loader& r) {
    for (bool ended = false; !ended; ++r.c.step) {
        StepEnd::open(r, false);
        fence_bulk_copies();
        if (!run_list(r)) return false;
        r.end_step();
        if (!r.agreed(true)) return false;
        if (!StepEnd::await(r, &ended)) return false;
    }
    StepEnd::open(r, true);
    return true;
}

// All that a warp does in a quantum. Whoever leaves before its end takes the block with it.
template <class R>
__device__ __forceinline__ void work(R& r) {
    if (!walk(r)) r.shared().aborted = true;
}

__device__ void init_barriers(Shared& s) {
    for (int i = 0; i < kMaxPages; ++i) {
        barrier_init(&s.page_full[i], 1);
        barrier_init(&s.page_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kStages; ++i) {
        barrier_init(&s.stage_full[i], 1);
        barrier_init(&s.stage_empty[i], kConsumerWarps);
    }
    barrier_init(&s.staged, 1);
    barrier_init(&s.input_full, 1);
    barrier_init(&s.input_empty, kConsumerWarps);
    for (int i = 0; i < kMaxSums; ++i) {
        barrier_init(&s.sums_full[i], kConsumerWarps);
        barrier_init(&s.sums_empty[i], 1);
    }
    for (int i = 0; i < 2; ++i) {
        barrier_init(&s.routing_full[i], 1);
        barrier_init(&s.routing_empty[i], kRoutingReaders);
    }
    barrier_init(&s.consumers_met, kConsumerWarps);
    for (int i = 0; i < 2; ++i) {
        barrier_init(&s.scores_full[i], kConsumerWarps / 2);
        barrier_init(&s.scores_empty[i], kConsumerWarps);
    }
    barrier_init(&s.head_stored, 1);
    barrier_init(&s.step_begins, 1);
    for (int i = 0; i < kTaskSlots; ++i) {
        barrier_init(&s.tasks_full[i], 1);
        barrier_init(&s.tasks_empty[i], kTaskReaders);
    }
    fence_shared_for_bulk_copies();
}

__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ DevicePlan plan, const __grid_constant__ DeviceWords words,
                  const __grid_constant__ DeviceBatch batch, Channel* channel, DeviceFault* fault,
                  const __grid_constant__ Quantum quantum, const __grid_constant__ Layout layout) {
    const Memory memory(block_memory(), layout);
    if (threadIdx.x == 0) {
        Shared& s = shared_of_block();
        init_barriers(s);
        s.live_rows = live_rows(plan, batch);
        s.patience = {words.abort, fault, words.counters, quantum.timeout_ns};
        s.words = &words;
        s.step = 0;
        s.counter_origin = quantum.counter_origin;
        s.aborted = false;
        s.input_copied = false;
#ifdef NORTH_JAX_TRACE
        s.trace = trace_target;
#endif
        for (int& task : s.task_of_warp) task = -1;
        s.first_task = plan.begin[blockIdx.x];
        s.end_task = plan.begin[blockIdx.x + 1];
    }
    __syncthreads();
    const Context context{plan, words, batch, channel, fault, quantum, static_cast<int>(blockIdx.x)};
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (warp < kConsumerWarps) {
        Consumer role(context, memory, Role::kConsumer, warp, lane);
        work(role);
    } else if (warp < kFirstLoader) {
        if (warp == kControllerWarp) {
            Controller role(context, memory, Role::kController, 0, lane);
            work(role);
            role.drain();
        } else if (warp == kProducerWarp) {
            Producer role(context, memory, Role::kProducer, 0, lane);
            work(role);
            role.drain();
        } else {
            Storer role(context, memory, Role::kStorer, warp - kFirstStorer, lane);
            work(role);
        }
    } else {
        Loader role(context, memory, Role::kLoader, warp - kFirstLoader, lane);
        if (role.routes()) role.routing.cursor = Cursor::filling();
        work(role);
        role.leave();
        role.drain();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(words.exited, 1u) + 1 == gridDim.x) store_release_system(&channel->finished, quantum.number);
    }
}

}  // namespace
}  // namespace pipeline

cudaError_t launch_pipelined(const DevicePlan& plan, const DeviceWords& words, const DeviceBatch& batch,
                             Channel* channel, DeviceFault* fault, const Quantum& quantum, cudaStream_t stream) {
    int device = 0, total = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&total, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (status != cudaSuccess) return status;
    const pipeline::Layout layout = pipeline::layout(plan.batch, plan.geometry.hidden, total);
    if (layout.pages < 3) return cudaErrorInvalidConfiguration;  // as many as may be on their way at once
    const void* kernel = reinterpret_cast<const void*>(pipeline::decode_kernel);
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes);
    if (status != cudaSuccess) return status;
    for (int i = 0; i < pipeline::kExchanged; ++i) {
        const BufferPlace& place = plan.buffers[pipeline::exchanged_buffer(i)];
        if (place.plane_bytes == 0) continue;
        status = cudaMemsetAsync(batch.workspace + place.offset, 0xff, place.planes * place.plane_bytes, stream);
        if (status != cudaSuccess) return status;
    }
    const void* arguments[] = {&plan, &words, &batch, &channel, &fault, &quantum, &layout};
    return cudaLaunchCooperativeKernel(kernel, dim3(plan.sms), dim3(pipeline::kThreads), const_cast<void**>(arguments),
                                       layout.bytes, stream);
}

#ifdef NORTH_JAX_TRACE

cudaError_t trace_begin(int step, int events) {
    int device = 0, sms = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    pipeline::TraceTarget target{nullptr, events, step};
    const size_t bytes = sizeof(TraceEvent) * events * pipeline::kWarps * sms;
    status = cudaMalloc(&target.events, bytes);
    if (status == cudaSuccess) status = cudaMemset(target.events, 0, bytes);
    return status == cudaSuccess ? cudaMemcpyToSymbol(pipeline::trace_target, &target, sizeof target) : status;
}

cudaError_t trace_end(int sms, int events, std::vector<TraceEvent>* recorded) {
    pipeline::TraceTarget target{};
    const pipeline::TraceTarget none{};
    cudaError_t status = cudaMemcpyFromSymbol(&target, pipeline::trace_target, sizeof target);
    if (status == cudaSuccess) status = cudaMemcpyToSymbol(pipeline::trace_target, &none, sizeof none);
    if (status != cudaSuccess) return status;
    recorded->resize(static_cast<size_t>(sms) * pipeline::kWarps * events);
    status = cudaMemcpy(recorded->data(), target.events, recorded->size() * sizeof(TraceEvent), cudaMemcpyDeviceToHost);
    cudaFree(target.events);
    return status;
}

std::vector<std::string> trace_warps() {
    std::vector<std::string> names;
    for (int warp = 0; warp < pipeline::kWarps; ++warp) names.emplace_back(pipeline::role_name(warp));
    return names;
}

std::vector<std::string> trace_barriers() {
    alignas(pipeline::Shared) static const unsigned char some[sizeof(pipeline::Shared)] = {};
    const auto& s = *reinterpret_cast<const pipeline::Shared*>(some);
    const auto* first = reinterpret_cast<const uint64_t*>(some);
    std::vector<std::string> names;
    for (size_t i = 0; i < sizeof some / 8; ++i) names.push_back(pipeline::barrier_name(s, first + i));
    while (!names.empty() && names.back().empty()) names.pop_back();
    return names;
}

#endif

}  // namespace north_jax::megakernel
