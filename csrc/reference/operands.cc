#include "csrc/reference/operands.h"

namespace north_jax::megakernel {
namespace {

constexpr uint32_t bit(int32_t number) { return 1u << number; }

constexpr uint32_t kNone = bit(BUFFER_NONE);
constexpr uint32_t kResidual = bit(BUFFER_RESIDUAL) | bit(BUFFER_LOCAL_RESIDUAL);
constexpr uint32_t kHidden = bit(BUFFER_HIDDEN) | bit(BUFFER_LOCAL_HIDDEN);

}  // namespace

Operands operands_of(int32_t opcode) {
    switch (opcode) {
        case EMBED:
            return {kNone, kNone, kNone, kResidual, kNone};
        case ADD_RMSNORM:
            return {kResidual, kNone | bit(BUFFER_ATTENTION_OUT), kNone | bit(BUFFER_MLP_OUT), kHidden,
                    kNone | kResidual};
        case QKV_PROJ:
            return {kHidden, kNone, kNone, bit(BUFFER_QKV), kNone};
        case ROUTER_GEMM:
            return {kHidden, kNone, kNone, bit(BUFFER_ROUTER_LOGITS), kNone};
        case ATTN_DECODE:
        case ATTN_DRAIN:
            return {bit(BUFFER_QKV), kNone, kNone, bit(BUFFER_PARTIAL), bit(BUFFER_PARTIAL_STATS)};
        case ATTN_COMBINE:
            return {bit(BUFFER_PARTIAL), bit(BUFFER_PARTIAL_STATS), kNone, bit(BUFFER_ATTENTION), kNone};
        case O_PROJ:
            return {bit(BUFFER_ATTENTION), kNone, kNone, bit(BUFFER_ATTENTION_OUT), kNone};
        case FFN_UPGATE_ACT:
            return {kHidden, kNone, kNone, bit(BUFFER_DENSE_HIDDEN), kNone};
        case FFN_DOWN:
            return {bit(BUFFER_DENSE_HIDDEN), kNone, kNone, bit(BUFFER_MLP_OUT), kNone};
        case ROUTER_TOPK:
            return {bit(BUFFER_ROUTER_LOGITS), kNone, kNone, bit(BUFFER_TOPK), kNone};
        case ROUTE_FINALIZE:
            return {bit(BUFFER_TOPK), kNone, kNone, bit(BUFFER_ROUTES), kNone};
        case MOE_GATHER:
            return {bit(BUFFER_HIDDEN), bit(BUFFER_ROUTES), kNone, bit(BUFFER_GATHERED), kNone};
        case MOE_UPGATE_ACT:
            return {kHidden, bit(BUFFER_ROUTER_LOGITS), kNone, bit(BUFFER_EXPERT_HIDDEN), kNone};
        case MOE_DOWN:
            return {bit(BUFFER_EXPERT_HIDDEN), bit(BUFFER_ROUTER_LOGITS), kNone, bit(BUFFER_MLP_OUT), kNone};
        case MOE_UPGATE_ACT_DRAIN:
            return {bit(BUFFER_GATHERED), bit(BUFFER_ROUTES), kNone, bit(BUFFER_EXPERT_HIDDEN), kNone};
        case MOE_DOWN_DRAIN:
            return {bit(BUFFER_EXPERT_HIDDEN), bit(BUFFER_ROUTES), kNone, bit(BUFFER_EXPERT_OUT), kNone};
        case MOE_COMBINE:
            return {bit(BUFFER_EXPERT_OUT), bit(BUFFER_TOPK), bit(BUFFER_ROUTES), bit(BUFFER_MLP_OUT), kNone};
        case LM_HEAD:
            return {kHidden, kNone, kNone, bit(BUFFER_LOGITS), bit(BUFFER_RANGE_BEST)};
        case SAMPLE_HISTOGRAM:
            return {bit(BUFFER_LOGITS), bit(BUFFER_RANGE_BEST), kNone, bit(BUFFER_SEARCH), kNone};
        case SAMPLE_MASS:
            return {bit(BUFFER_LOGITS), bit(BUFFER_RANGE_BEST), bit(BUFFER_SEARCH), bit(BUFFER_MASS), kNone};
        case SAMPLE_DRAW:
            return {bit(BUFFER_LOGITS), bit(BUFFER_RANGE_BEST), bit(BUFFER_MASS), bit(BUFFER_SEARCH), kNone};
        default:
            return {kNone, kNone, kNone, kNone, kNone};
    }
}

Shape weight_of(const Geometry& g, int32_t opcode) {
    switch (opcode) {
        case EMBED:
        case LM_HEAD:
            return {g.vocabulary, g.hidden};
        case ADD_RMSNORM:
            return {1, g.hidden};
        case QKV_PROJ:
            return {int64_t{g.heads + 2 * g.kv_heads} * g.head_dim, g.hidden};
        case ROUTER_GEMM:
            return {g.experts, g.hidden};
        case O_PROJ:
            return {g.hidden, int64_t{g.heads} * g.head_dim};
        case FFN_UPGATE_ACT:
            return {2 * int64_t{g.dense_width}, g.hidden};
        case FFN_DOWN:
            return {g.hidden, g.dense_width};
        case MOE_UPGATE_ACT:
        case MOE_UPGATE_ACT_DRAIN:
            return {int64_t{g.experts} * 2 * g.expert_width, g.hidden};
        case MOE_DOWN:
        case MOE_DOWN_DRAIN:
            return {int64_t{g.experts} * g.hidden, g.expert_width};
        default:
            return {0, 0};
    }
}

}  // namespace north_jax::megakernel
