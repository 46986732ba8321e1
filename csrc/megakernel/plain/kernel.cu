// The persistent decode kernel: one block per SM walks the SM's task list, step after step.
//
// Two teams a block: one runs MATRIX and LOADER tasks in the order of the list, the other SIDE tasks. Tasks of the two
// teams meet at counters only.
#include "csrc/megakernel/launch.h"
#include "csrc/megakernel/operations/draw.cuh"
#include "csrc/megakernel/operations/sample.cuh"
#include "csrc/megakernel/operations/step.cuh"
#include "csrc/megakernel/plain/attention.cuh"
#include "csrc/megakernel/plain/experts.cuh"
#include "csrc/megakernel/plain/head.cuh"
#include "csrc/megakernel/plain/norm.cuh"

namespace north_jax::megakernel {
namespace {

constexpr int kMainThreads = 256, kSideThreads = 128, kThreads = kMainThreads + kSideThreads;
constexpr int kMainBarrier = 1, kSideBarrier = 2;

// Bit o: opcode o runs on the side team.
constexpr uint32_t side_opcodes() {
    uint32_t mask = 0;
    for (int o = 0; o < kOpcodeCount; ++o) mask |= static_cast<uint32_t>(kOperations[o].lane == LANE_SIDE) << o;
    return mask;
}
constexpr uint32_t kSideOpcodes = side_opcodes();

struct Shared {
    int32_t main_task[kDescriptorFields];
    int32_t side_task[kDescriptorFields];
    uint32_t main_word;
    uint32_t side_word;
    uint32_t live;
    int claimed;
    float sums[kMainThreads / 32];
    Routing routing;
    union {  // of the side team
        SampleScratch sample;
        Routing topk;
        int32_t chosen[kMaxRows * kMaxTopK];
    } side;
    float attention[attention_scratch_bytes(kMainThreads / 32) / sizeof(float)];
};

// One task of the main team; false after a fault.
template <class T>
__device__ bool run_main(const Context& c, const Team& team, Shared* s) {
    switch (c.field(FIELD_OPCODE)) {
        case EMBED:
            return embed<T>(c, team);
        case ADD_RMSNORM:
            return add_rmsnorm<T>(c, team, s->sums);
        case QKV_PROJ:
            return qkv_proj<T>(c, team);
        case ROUTER_GEMM:
            return router_gemm<T>(c, team);
        case ATTN_DECODE:
        case ATTN_DRAIN:
            return attention<T>(c, team, s->attention, &s->claimed);
        case O_PROJ:
        case FFN_DOWN:
            return residual_gemm<T>(c, team);
        case FFN_UPGATE_ACT:
            return ffn_upgate_act<T>(c, team);
        case MOE_UPGATE_ACT:
            return moe_upgate_act<T>(c, team, &s->routing);
        case MOE_DOWN:
            return moe_down<T>(c, team, &s->routing);
        case MOE_UPGATE_ACT_DRAIN:
            return moe_upgate_act_drain<T>(c, team, &s->claimed);
        case MOE_DOWN_DRAIN:
            return moe_down_drain<T>(c, team, &s->claimed);
        case LM_HEAD:
            return lm_head<T>(c, team);
        default:
            report(c, DeviceFault::kBadTask, -1, 0, c.field(FIELD_OPCODE));
            return false;
    }
}

// One task of the side team; false after a fault.
template <class T>
__device__ bool run_side(const Context& c, const Team& team, Shared* s) {
    switch (c.field(FIELD_OPCODE)) {
        case ATTN_COMBINE:
            return attn_combine<T>(c, team);
        case ROUTER_TOPK:
            return router_topk(c, team, &s->side.topk);
        case ROUTE_FINALIZE:
            return route_finalize(c, team, s->side.chosen);
        case MOE_GATHER:
            return moe_gather<T>(c, team);
        case MOE_COMBINE:
            return moe_combine(c, team);
        case SAMPLE_HISTOGRAM:
            return sample_histogram(c, team, &s->side.sample);
        case SAMPLE_MASS:
            return sample_mass(c, team);
        case SAMPLE_DRAW:
            return sample_draw(c, team, &s->side.sample);
        case END_STEP:
            return end_step(c, team, &s->live);
        default:
            report(c, DeviceFault::kBadTask, -1, 0, c.field(FIELD_OPCODE));
            return false;
    }
}

// Walks the block's list with one of its teams until the quantum ends.
template <class T, bool kSide>
__device__ void walk(Context c, const Team& team, Shared* s) {
    int32_t* task = kSide ? s->side_task : s->main_task;
    uint32_t* word = kSide ? &s->side_word : &s->main_word;
    c.fields = task;
    for (bool ended = false; !ended; ++c.step) {
        for (c.task = c.plan.begin[c.sm]; c.task < c.plan.begin[c.sm + 1]; ++c.task) {
            const int32_t* from = c.plan.tasks + static_cast<int64_t>(c.task) * kDescriptorFields;
            const uint32_t opcode = from[FIELD_OPCODE];
            if ((opcode < 32 && kSideOpcodes >> opcode & 1) != kSide) continue;
            team.sync();  // the last task has been read to its end
            if (team.thread < kDescriptorFields) task[team.thread] = from[team.thread];
            team.sync();
            if (!(kSide ? run_side<T>(c, team, s) : run_main<T>(c, team, s))) return;
        }
        c.task = -1;
        if (!await_decision(c, team, word, &ended)) return;
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ DevicePlan plan, const __grid_constant__ DeviceWords words,
                  const __grid_constant__ DeviceBatch batch, Channel* channel, DeviceFault* fault,
                  const __grid_constant__ Quantum quantum) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared* s = reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) s->live = live_rows(plan, batch);
    __syncthreads();
    const Context context{plan, words, batch, channel, fault, quantum, static_cast<int>(blockIdx.x)};
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kMainThreads) {
        walk<T, false>(context, {thread, kMainThreads, kMainBarrier}, s);
    } else {
        walk<T, true>(context, {thread - kMainThreads, kSideThreads, kSideBarrier}, s);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(words.exited, 1u) + 1 == gridDim.x) store_release_system(&channel->finished, quantum.number);
    }
}

}  // namespace

const char* unsupported(const Geometry& g, int32_t batch) {
    if (g.layers > kMaxLayers) return "more than 64 layers";
    if (g.experts > kMaxExperts) return "more than 512 experts";
    if (g.top_k > kMaxTopK) return "more than 16 experts a token";
    if (g.head_dim > kMaxHeadDim) return "a head of more than 256 values";
    if (batch > kMaxRows) return "more than 32 rows";
    if (g.vocabulary > kMostBlocks * kSampleBlock) return "more than 2^19 tokens";
    return "";
}

cudaError_t launch_plain(const DevicePlan& plan, const DeviceWords& words, const DeviceBatch& batch, Channel* channel,
                         DeviceFault* fault, const Quantum& quantum, cudaStream_t stream) {
    const void* kernel = plan.type == Type::kFloat32 ? reinterpret_cast<const void*>(decode_kernel<float>)
                                                     : reinterpret_cast<const void*>(decode_kernel<bf16>);
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (status != cudaSuccess) return status;
    const void* arguments[] = {&plan, &words, &batch, &channel, &fault, &quantum};
    return cudaLaunchCooperativeKernel(kernel, dim3(plan.sms), dim3(kThreads), const_cast<void**>(arguments),
                                       sizeof(Shared), stream);
}

}  // namespace north_jax::megakernel
