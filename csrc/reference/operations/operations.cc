// From opcode and type of the weights to the code that runs the task.
#include "csrc/reference/operations/attention.h"
#include "csrc/reference/operations/experts.h"
#include "csrc/reference/operations/norm.h"
#include "csrc/reference/operations/operation.h"
#include "csrc/reference/operations/products.h"
#include "csrc/reference/operations/routes.h"
#include "csrc/reference/operations/sample.h"

namespace north_jax::megakernel {
namespace {

template <typename T>
std::unique_ptr<MatrixTask> make(Context& context, const Task& task) {
    switch (task[FIELD_OPCODE]) {
        case QKV_PROJ:
            return std::make_unique<QkvProjection<T>>(context, task);
        case ROUTER_GEMM:
        case O_PROJ:
        case FFN_DOWN:
            return std::make_unique<PlainProduct<T>>(context, task);
        case ATTN_DECODE:
        case ATTN_DRAIN:
            return std::make_unique<Attention<T>>(context, task);
        case FFN_UPGATE_ACT:
            return std::make_unique<GateUpProduct<T>>(context, task);
        case MOE_UPGATE_ACT:
        case MOE_UPGATE_ACT_DRAIN:
            return std::make_unique<ExpertUp<T>>(context, task);
        case MOE_DOWN:
            return std::make_unique<ExpertDown<T>>(context, task);
        case MOE_DOWN_DRAIN:
            return std::make_unique<ExpertDownDrain<T>>(context, task);
        case LM_HEAD:
            return std::make_unique<LmHead<T>>(context, task);
        default:
            context.fail(task, "is no MATRIX task that the CPU executor knows");
    }
}

template <typename T>
void run(Context& context, const Task& task) {
    switch (task[FIELD_OPCODE]) {
        case EMBED:
            return embed<T>(context, task);
        case ADD_RMSNORM:
            return add_rmsnorm<T>(context, task);
        case ATTN_COMBINE:
            return combine<T>(context, task);
        case ROUTER_TOPK:
            return router_topk(context, task);
        case ROUTE_FINALIZE:
            return route_finalize(context, task);
        case MOE_GATHER:
            return moe_gather<T>(context, task);
        case MOE_COMBINE:
            return moe_combine(context, task);
        case SAMPLE_HISTOGRAM:
            return sample_histogram(context, task);
        case SAMPLE_MASS:
            return sample_mass(context, task);
        default:
            context.fail(task, "is no task that the CPU executor knows");
    }
}

}  // namespace

std::unique_ptr<MatrixTask> make_matrix_task(Context& context, const Task& task) {
    if (context.model.type == Type::kBFloat16) return make<BFloat16>(context, task);
    return make<float>(context, task);
}

void run_task(Context& context, const Task& task) {
    if (context.model.type == Type::kBFloat16) return run<BFloat16>(context, task);
    run<float>(context, task);
}

}  // namespace north_jax::megakernel
