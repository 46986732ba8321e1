#include "csrc/megakernel/pipeline/limits.h"

namespace north_jax::megakernel::pipeline {
namespace {

// "" or what keeps these sizes from the tensor cores' tiles.
std::string refuse_geometry(const Geometry& g, int32_t batch) {
    auto odd = [](int32_t value) { return value % kStepColumns != 0; };
    if (batch > kMaxBatch) return "more than 8 rows";
    if (g.head_dim != kHeadDim) return "a head of other than 128 values";
    if (g.heads / g.kv_heads > kQueryHeads) return "more than 8 query heads a KV head";
    if (g.hidden > kResidualChunks * kLoaderWarps * 128 || odd(g.hidden)) {
        return "a hidden size that is no multiple of 128 up to 2048";
    }
    if (g.experts > kMaxPipelineExperts) return "more than 128 experts";
    if (g.experts % 4 != 0) return "a number of experts that is no multiple of 4";
    if (g.experts > 0 && (g.expert_width > kPageColumns || odd(g.expert_width))) {
        return "experts whose width is no multiple of 128 up to 1024";
    }
    return "";
}

}  // namespace

int32_t window_of(const TaskLists& lists) {
    for (size_t at = 0; at < lists.tasks.size(); at += kDescriptorFields) {
        const int32_t* task = &lists.tasks[at];
        if (task[FIELD_OPCODE] == ATTN_DECODE && task[FIELD_WINDOW] > 0) return task[FIELD_WINDOW];
    }
    return 0;
}

namespace {

std::string refuse_lists(const Geometry& geometry, const TaskLists& lists) {
    const int32_t window = window_of(lists);
    for (int i = 0; i < kExchanged; ++i) {
        const Buffer buffer = exchanged_buffer(i);
        const BufferPlace& place = lists.buffers[buffer];
        if (place.plane_bytes == 0 || place.planes == 2 * geometry.layers) continue;
        return std::string("fewer than two planes a layer of ") + kBufferNames[buffer];
    }
    for (int32_t sm = 0; sm < lists.sms(); ++sm) {
        int heads = 0;
        bool unread = false;  // an input that nobody has taken
        bool normed = false, copied = false;
        for (int32_t number = lists.begin[sm]; number < lists.begin[sm + 1]; ++number) {
            const int32_t* task = &lists.tasks[int64_t{number} * kDescriptorFields];
            const int32_t opcode = task[FIELD_OPCODE], rows = task[FIELD_ROW_COUNT];
            switch (opcode) {
                case ADD_RMSNORM:
                    if (task[FIELD_OUTPUT] != BUFFER_LOCAL_HIDDEN) break;
                    if (unread) return "an SM that norms an input and does not take it";
                    unread = normed = true;
                    break;
                case O_PROJ:
                case FFN_DOWN: {
                    const int32_t slice = task[FIELD_K_SLICE], parts = (slice + kPageColumns - 1) / kPageColumns;
                    if (slice % (parts * kStepColumns) != 0) return "slices of other than 128 columns' multiples";
                    if (rows > kTileRows) return "tiles of more than 16 rows";
                    break;
                }
                case FFN_UPGATE_ACT:
                case MOE_UPGATE_ACT:
                    if (rows > kTileRows / 2) return "tiles of more than 8 hidden units";
                    break;
                case ROUTER_GEMM:
                case MOE_DOWN:
                    if (rows > kTileRows) return "tiles of more than 16 rows";
                    break;
                case ATTN_DECODE:
                case ATTN_COMBINE:
                    if (task[FIELD_WINDOW] > 0 && task[FIELD_WINDOW] != window) return "windows of different sizes";
                    break;
                case EMBED:
                case QKV_PROJ:
                case SAMPLE_HISTOGRAM:
                case SAMPLE_MASS:
                case SAMPLE_DRAW:
                case END_STEP:
                    break;
                case LM_HEAD:
                    if (rows == 0) return "an SM without a part of the vocabulary";
                    ++heads;
                    break;
                default:
                    return std::string("the operation ") +
                           (opcode >= 0 && opcode < kOpcodeCount ? kOperations[opcode].name : "of an unknown opcode");
            }
            const bool of_all_rows = task[FIELD_BATCH_BEGIN] == 0 && task[FIELD_BATCH_COUNT] == lists.batch;
            if (kOperations[opcode].lane == LANE_MATRIX && !of_all_rows) return "products of a part of the rows";
            for (int32_t field = FIELD_INPUT; field <= FIELD_OUTPUT_2; ++field) {
                const BufferPlace& place = lists.buffers[task[field]];
                if (!(kOperations[opcode].fields >> field & 1) || place.planes < 2) continue;
                if (place.plane_bytes % 16 != 0) return std::string("a size of ") + kBufferNames[task[field]];
            }
            if (takes_input(opcode)) {
                unread = false;
                copied |= task[FIELD_INPUT] != BUFFER_LOCAL_HIDDEN;
            }
            // Whoever has stored the head has done with the step: its parameters may change when all have.
            if (heads > 0 && opcode != LM_HEAD && kOperations[opcode].lane == LANE_MATRIX) {
                return "a product after LM_HEAD";
            }
        }
        // A role may be a task ring ahead of another, never a step.
        if (lists.begin[sm + 1] - lists.begin[sm] <= kTaskSlots * kTasksOfSlot) return "a list of few tasks";
        if (unread) return "an SM that norms an input and does not take it";
        // What threads have written would need a fence before the copy.
        if (normed && copied) return "an SM that norms its input and copies it too";
        if (heads != 1) return "an SM with other than one LM_HEAD task";
    }
    return "";
}

}  // namespace

std::string refuse(const Geometry& geometry, Type type, const TaskLists& lists) {
    if (type != Type::kBFloat16) return "weights other than bfloat16";
    const std::string reason = refuse_geometry(geometry, lists.batch);
    return reason.empty() ? refuse_lists(geometry, lists) : reason;
}

}  // namespace north_jax::megakernel::pipeline
