#include "csrc/reference/validate.h"

#include <algorithm>

#include "csrc/megakernel/division.h"
#include "csrc/megakernel/routing.h"
#include "csrc/megakernel/sampling.h"
#include "csrc/reference/report.h"
#include "csrc/reference/text.h"
#include "csrc/reference/validate_task.h"

namespace north_jax::megakernel {
namespace {

constexpr int32_t kMostSize = 1 << 20;  // so that no number of items or of outputs overflows int32

std::string check_model(const Model& model) {
    const Geometry& g = model.geometry;
    const std::pair<const char*, int32_t> sizes[] = {
        {"hidden", g.hidden},           {"layers", g.layers},     {"heads", g.heads},
        {"kv_heads", g.kv_heads},       {"head_dim", g.head_dim}, {"expert_width", g.expert_width},
        {"dense_width", g.dense_width}, {"experts", g.experts},   {"top_k", g.top_k},
        {"vocabulary", g.vocabulary},
    };
    for (const auto& [name, size] : sizes) {
        if (size < 1 || size > kMostSize) return text(name, " is ", size, ", expected 1 to ", kMostSize);
    }
    if (g.heads % g.kv_heads) return text("heads is ", g.heads, ", expected a multiple of kv_heads, ", g.kv_heads);
    if (int64_t{g.heads + 2 * g.kv_heads} * g.head_dim > kMostSize) {
        return text("the heads have more than ", kMostSize, " components in all");
    }
    if (g.top_k > kMaxTopK || g.top_k > g.experts) {
        return text("top_k is ", g.top_k, ", expected at most ", kMaxTopK, " and the number of experts, ", g.experts);
    }
    if (g.head_dim % 2 || static_cast<int32_t>(model.frequencies.size()) != g.head_dim / 2) {
        return text(model.frequencies.size(), " rotary frequencies for heads of ", g.head_dim, " components");
    }
    for (const WeightMatrix& weight : model.weights) {
        if (weight.rows < 0 || weight.columns < 0 || (weight.rows > 0 && weight.data == nullptr)) {
            return text("a weight [", weight.rows, ", ", weight.columns, "] without data");
        }
    }
    return "";
}

std::string check_buffer(const Model& model, const TaskLists& lists, int32_t buffer) {
    const BufferPlace& place = lists.buffers[buffer];
    if (place.plane_bytes == 0) return "";
    const std::string name = text("buffer ", kBufferNames[buffer]);
    const int64_t expected = plane_bytes_of(model, lists, buffer);
    if (place.plane_bytes != expected) {
        return text(name, " has planes of ", place.plane_bytes, " bytes, expected ", expected);
    }
    const bool local = buffer == BUFFER_LOCAL_RESIDUAL || buffer == BUFFER_LOCAL_HIDDEN;
    const int64_t planes = int64_t{place.planes} * (local ? lists.sms() : 1);
    if (place.planes < 1 || place.planes > 1 << 16) return text(name, " has ", place.planes, " planes");
    if (place.offset < 0 || place.offset % 4 || place.offset > lists.workspace_bytes ||
        planes > (lists.workspace_bytes - place.offset) / place.plane_bytes) {
        return text(name, " at byte ", place.offset, " does not fit a workspace of ", lists.workspace_bytes, " bytes");
    }
    return "";
}

std::string check_lists(const Model& model, const TaskLists& lists) {
    const int64_t tasks = static_cast<int64_t>(lists.tasks.size()) / kDescriptorFields;
    if (lists.batch < 1 || lists.batch > kMaxRows) return text(lists.batch, " rows, expected 1 to ", kMaxRows);
    if (lists.tasks.size() % kDescriptorFields || lists.sms() < 1 || lists.begin.front() != 0 ||
        lists.begin.back() != tasks || !std::is_sorted(lists.begin.begin(), lists.begin.end())) {
        return text("the lists of ", lists.sms(), " SMs do not cover ", tasks, " tasks");
    }
    if (lists.counter_names.size() != lists.counter_needs.size()) {
        return text(lists.counter_names.size(), " names for ", lists.counter_needs.size(), " counters");
    }
    for (const int32_t need : lists.counter_needs) {
        if (need < 0) return text("a counter has ", need, " arrivals");
    }
    for (int32_t buffer = 1; buffer < kBufferCount; ++buffer) {
        if (std::string wrong = check_buffer(model, lists, buffer); !wrong.empty()) return wrong;
    }
    int32_t ends = 0;
    for (int64_t task = 0; task < tasks; ++task) ends += lists.tasks[task * kDescriptorFields] == END_STEP;
    return ends == 1 ? "" : text(ends, " END_STEP tasks, expected one");
}

// What the row's sampling names beside its own parameters.
std::string check_sampling(const Model& model, const Batch& batch, int32_t row) {
    const int32_t* parameters = batch.rows + int64_t{row} * kRowFields;
    const auto at_most = [&](const char* name, Row which, int32_t most) -> std::string {
        if (parameters[which] >= 0 && parameters[which] <= most) return "";
        return text(name, " ", parameters[which], ", expected 0 to ", most);
    };
    std::string wrong = at_most("HISTORY", ROW_HISTORY, batch.histories);
    if (wrong.empty()) wrong = at_most("LOGPROBS", ROW_LOGPROBS, 1 + kMaxLogprobs);
    if (wrong.empty()) wrong = at_most("BIAS_COUNT", ROW_BIAS_COUNT, batch.biases ? kMaxBiases : 0);
    if (wrong.empty()) wrong = at_most("MASKED", ROW_MASKED, batch.masks ? 1 : 0);
    for (int32_t i = 0; wrong.empty() && i < parameters[ROW_BIAS_COUNT]; ++i) {
        const int32_t token = batch.biases[(int64_t{row} * kMaxBiases + i) * 2];
        if (token < 0 || token >= model.geometry.vocabulary) wrong = text("a bias of token ", token);
    }
    return wrong;
}

}  // namespace

std::string validate_lists(const Model& model, const TaskLists& lists) {
    std::string wrong = check_model(model);
    if (wrong.empty()) wrong = check_lists(model, lists);
    for (int32_t task = 0; wrong.empty() && task < lists.begin.back(); ++task) {
        const std::string found = validate_task(model, lists, task);
        if (!found.empty()) wrong = text(describe(lists, task), ": ", found);
    }
    return wrong;
}

std::string validate_batch(const Model& model, const TaskLists& lists, const Batch& batch, int32_t steps) {
    if (steps < 1) return text(steps, " steps, expected at least one");
    if (batch.full_entries < 0 || batch.sliding_entries < 0) return "a page table of negative size";
    for (int32_t row = 0; row < lists.batch; ++row) {
        const int32_t position = batch.rows[row * kRowFields + ROW_POSITION];
        if (!is_live(batch.rows, row) || (position >= 0 && int64_t{position} + steps <= kMaxPosition)) continue;
        return text("row ", row, " has POSITION ", position, ", expected 0 to ", kMaxPosition, " at the end");
    }
    for (int32_t row = 0; row < lists.batch; ++row) {
        if (!is_live(batch.rows, row)) continue;
        const std::string wrong = check_sampling(model, batch, row);
        if (!wrong.empty()) return text("row ", row, " has ", wrong);
    }
    const auto pools = static_cast<int32_t>(batch.pools.size());
    return pools == model.geometry.layers ? "" : text(pools, " pools for ", model.geometry.layers, " layers");
}

CounterRange arrivals_of(const Geometry& g, const int32_t* fields) {
    const Operation& operation = kOperations[fields[FIELD_OPCODE]];
    if (!(operation.fields >> FIELD_ARRIVE & 1) || fields[FIELD_ARRIVE_COUNT] == 0) return {0, 0, false};
    const int64_t first = fields[FIELD_ARRIVE], begin = fields[FIELD_BATCH_BEGIN], count = fields[FIELD_BATCH_COUNT];
    switch (fields[FIELD_OPCODE]) {
        case ATTN_DECODE:
        case ATTN_DRAIN:
            return {first + begin * g.kv_heads, count * g.kv_heads, true};
        case MOE_UPGATE_ACT:
        case MOE_UPGATE_ACT_DRAIN:
            return {first, std::min<int64_t>(g.experts, count * g.top_k), true};
        default:
            return {first, 1, false};
    }
}

int32_t ranges_of(const TaskLists& lists) {
    const int64_t range = lists.batch * kMaxLogprobs * 2 * int64_t{sizeof(int32_t)};
    return static_cast<int32_t>(lists.buffers[BUFFER_RANGE_BEST].plane_bytes / range);
}

int64_t plane_bytes_of(const Model& model, const TaskLists& lists, int32_t buffer) {
    const Geometry& g = model.geometry;
    const int64_t t = model.type == Type::kBFloat16 ? 2 : 4, word = 4, b = lists.batch;
    const int64_t assignments = b * g.top_k, splits = b * g.kv_heads * kMaxSplits * (g.heads / g.kv_heads);
    switch (buffer) {
        case BUFFER_RESIDUAL:
        case BUFFER_LOCAL_RESIDUAL:
        case BUFFER_MLP_OUT:
            return b * g.hidden * word;
        case BUFFER_HIDDEN:
        case BUFFER_LOCAL_HIDDEN:
            return b * g.hidden * t;
        case BUFFER_QKV:
            return b * (g.heads + 2 * g.kv_heads) * g.head_dim * t;
        case BUFFER_ROUTER_LOGITS:
            return b * g.experts * word;
        case BUFFER_PARTIAL:
            return splits * g.head_dim * word;
        case BUFFER_PARTIAL_STATS:
            return splits * 2 * word;
        case BUFFER_ATTENTION:
            return b * g.heads * g.head_dim * t;
        case BUFFER_ATTENTION_OUT:
            return lists.buffers[buffer].leading * b * g.hidden * word;
        case BUFFER_DENSE_HIDDEN:
            return b * g.dense_width * t;
        case BUFFER_EXPERT_HIDDEN:
            return assignments * g.expert_width * t;
        case BUFFER_TOPK:
            return assignments * 2 * word;
        case BUFFER_ROUTES:
            return routes_size(g.experts, static_cast<int32_t>(assignments)) * word;
        case BUFFER_GATHERED:
            return assignments * g.hidden * t;
        case BUFFER_EXPERT_OUT:
            return assignments * g.hidden * word;
        case BUFFER_LOGITS:
            return b * g.vocabulary * word;
        case BUFFER_RANGE_BEST: {  // as many ranges as the layout has
            const int64_t range = b * kMaxLogprobs * 2 * word;
            return std::max<int64_t>(1, lists.buffers[buffer].plane_bytes / range) * range;
        }
        case BUFFER_SEARCH:
            return b * SearchBuffer::kBytes;
        case BUFFER_MASS:
            return b * ceil_div(g.vocabulary, kSampleBlock) * kMassWords * word;
        default:
            return 0;
    }
}

}  // namespace north_jax::megakernel
