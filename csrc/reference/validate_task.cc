#include "csrc/reference/validate_task.h"

#include <algorithm>

#include "csrc/megakernel/division.h"
#include "csrc/reference/operands.h"
#include "csrc/reference/text.h"
#include "csrc/reference/validate.h"

namespace north_jax::megakernel {
namespace {

struct Refusal {
    std::string what;
};

class TaskCheck {
   public:
    TaskCheck(const Model& model, const TaskLists& lists, int32_t task)
        : model_(model),
          g_(model.geometry),
          lists_(lists),
          task_(task),
          fields_(&lists.tasks[int64_t{task} * kDescriptorFields]),
          opcode_(fields_[FIELD_OPCODE]) {}

    // Throws what is wrong as a Refusal.
    void run() const {
        if (opcode_ <= 0 || opcode_ >= kOpcodeCount) refuse(FIELD_OPCODE, "an operation");
        for (int32_t field = 1; field < FIELD_TASK; ++field) {
            if (!reads(Field(field))) expect(Field(field), 0, 0, "it is not read");
        }
        expect(FIELD_TASK, task_, task_, "its place in the schedule");
        common();
        switch (opcode_) {
            case ADD_RMSNORM:
                norm();
                break;
            case QKV_PROJ:
                qkv();
                break;
            case ATTN_COMBINE:
                rows(g_.heads);
                break;
            case O_PROJ:
            case FFN_DOWN:
                slices();
                [[fallthrough]];
            case MOE_DOWN:
            case MOE_COMBINE:
                rows(g_.hidden);
                break;
            case FFN_UPGATE_ACT:
                rows(g_.dense_width);
                break;
            case ROUTER_GEMM:
                rows(g_.experts);
                break;
            case MOE_GATHER:
                rows(int64_t{lists_.batch} * g_.top_k);
                break;
            case MOE_UPGATE_ACT:
            case MOE_UPGATE_ACT_DRAIN:
                tile(g_.expert_width);
                if (g_.expert_width % at(FIELD_ROW_COUNT)) {
                    refuse(FIELD_ROW_COUNT, text("a divisor of ", g_.expert_width));
                }
                break;
            case MOE_DOWN_DRAIN:
                tile(g_.hidden);
                break;
            case LM_HEAD:
                rows(g_.vocabulary, 0);
                ranges();
                break;
            case SAMPLE_HISTOGRAM:
                expect(FIELD_SPLIT, 0, kPasses - 1, "a pass");
                [[fallthrough]];
            case SAMPLE_MASS:
                blocks();
                ranges();
                break;
            case SAMPLE_DRAW:
                ranges();
                break;
            case END_STEP:
                span(FIELD_QUEUE, at(FIELD_ROW_COUNT), static_cast<int64_t>(lists_.queue_names.size()), "queues");
                break;
            default:
                break;
        }
    }

   private:
    bool reads(Field field) const { return kOperations[opcode_].fields >> field & 1; }
    int64_t at(Field field) const { return fields_[field]; }

    [[noreturn]] void refuse(Field field, const std::string& expected) const {
        throw Refusal{text(kFieldNames[field], " is ", at(field), ", expected ", expected)};
    }

    void expect(Field field, int64_t least, int64_t most, const char* why) const {
        if (at(field) < least || at(field) > most) {
            refuse(field, least == most ? text(least, ": ", why) : text(least, " to ", most, ": ", why));
        }
    }

    // [begin, begin + count) lies within `total` things.
    void span(Field begin, int64_t count, int64_t total, const char* what) const {
        if (at(begin) < 0 || count < 0 || at(begin) + count > total) {
            refuse(begin, text(count, " from it on within ", total, " ", what));
        }
    }

    // What every operation checks that reads the field.
    void common() const {
        if (reads(FIELD_LAYER)) expect(FIELD_LAYER, 0, g_.layers, "a layer, or the head after the last");
        if (reads(FIELD_BATCH_COUNT)) {
            expect(FIELD_BATCH_COUNT, 1, lists_.batch, "rows of the batch");
            span(FIELD_BATCH_BEGIN, at(FIELD_BATCH_COUNT), lists_.batch, "rows of the batch");
        }
        weight();
        const Operands operands = operands_of(opcode_);
        buffer(FIELD_INPUT, operands.input);
        buffer(FIELD_INPUT_2, operands.input_2);
        buffer(FIELD_INPUT_3, operands.input_3);
        buffer(FIELD_OUTPUT, operands.output);
        buffer(FIELD_OUTPUT_2, operands.output_2);
        if (reads(FIELD_POOL)) expect(FIELD_POOL, 0, g_.layers - 1, "a layer's pages");
        if (reads(FIELD_WINDOW)) expect(FIELD_WINDOW, 0, kMaxPosition, "keys, 0 for all");
        if (reads(FIELD_DEALERS)) expect(FIELD_DEALERS, 1, 1 << 16, "tasks that share the work");
        if (reads(FIELD_DEALER)) expect(FIELD_DEALER, 0, at(FIELD_DEALERS) - 1, "one of the DEALERS");
        if (reads(FIELD_ROUND_BEGIN)) {
            expect(FIELD_ROUND_BEGIN, 0, at(FIELD_ROUND_END), "the first round");
        }
        if (reads(FIELD_QUEUE) && opcode_ != END_STEP) {
            expect(FIELD_QUEUE, 0, int64_t(lists_.queue_names.size()) - 1, "a queue");
        }
        waits();
        arrivals();
        const bool by_tables = opcode_ == ROUTE_FINALIZE || opcode_ == MOE_GATHER || opcode_ == MOE_UPGATE_ACT_DRAIN ||
                               opcode_ == MOE_DOWN_DRAIN;
        if (by_tables) expect(FIELD_BATCH_COUNT, lists_.batch, lists_.batch, "routes are those of all rows");
    }

    void weight() const {
        const Shape shape = weight_of(g_, opcode_);
        if (shape.rows == 0) return;
        expect(FIELD_WEIGHT, 0, int64_t(model_.weights.size()) - 1, "a weight");
        const WeightMatrix& found = model_.weights[at(FIELD_WEIGHT)];
        if (found.rows == shape.rows && found.columns == shape.columns) return;
        refuse(FIELD_WEIGHT,
               text("a weight [", shape.rows, ", ", shape.columns, "], found [", found.rows, ", ", found.columns, "]"));
    }

    void buffer(Field field, uint32_t allowed) const {
        const int64_t name = at(field);
        const bool known = name >= 0 && name < kBufferCount;
        if (known && (allowed >> name & 1)) {
            if (name == BUFFER_NONE || lists_.buffers[name].plane_bytes > 0) return;
            refuse(field, text("a buffer of the layout, which lacks ", kBufferNames[name]));
        }
        std::string names;
        for (int32_t other = 0; other < kBufferCount; ++other) {
            if (allowed >> other & 1) names += text(names.empty() ? "" : " or ", kBufferNames[other]);
        }
        refuse(field, names + (known ? text(", found ", kBufferNames[name]) : ""));
    }

    // Counters [first, first + count) exist, and `need` is all their arrivals.
    void counters(Field first, int64_t count, Field need) const {
        span(first, count, static_cast<int64_t>(lists_.counter_needs.size()), "counters");
        for (int64_t i = 0; i < count; ++i) {
            const int32_t total = lists_.counter_needs[at(first) + i];
            if (total > 0 && at(need) == total) continue;
            refuse(need, text("all arrivals at ", lists_.counter_names[at(first) + i], ", ", total));
        }
    }

    void waits() const {
        if (reads(FIELD_WAIT)) {
            if (at(FIELD_WAIT_COUNT) == 0) {
                expect(FIELD_WAIT, 0, 0, "there is no wait");
                expect(FIELD_WAIT_NEED, 0, 0, "there is no wait");
            } else {
                counters(FIELD_WAIT, at(FIELD_WAIT_COUNT), FIELD_WAIT_NEED);
            }
        }
        if (!reads(FIELD_SLICE_WAIT)) return;
        if (at(FIELD_SLICE_NEED) == 0) return expect(FIELD_SLICE_WAIT, 0, 0, "there is no wait");
        counters(FIELD_SLICE_WAIT, slice_count(), FIELD_SLICE_NEED);
    }

    // Counters that the slices of a whole input wait for.
    int64_t slice_count() const {
        switch (opcode_) {
            case ATTN_DECODE:
            case ATTN_DRAIN:
                return g_.kv_heads;
            case MOE_DOWN:
            case MOE_DOWN_DRAIN:
                return std::min<int64_t>(g_.experts, at(FIELD_BATCH_COUNT) * g_.top_k);
            default:
                return at(FIELD_K_SLICE) > 0 ? (at(FIELD_K_BEGIN) + at(FIELD_K_COUNT)) / at(FIELD_K_SLICE) : 0;
        }
    }

    void arrivals() const {
        if (!reads(FIELD_ARRIVE)) return;
        if (at(FIELD_ARRIVE_COUNT) == 0) return expect(FIELD_ARRIVE, 0, 0, "there is no arrival");
        const CounterRange range = arrivals_of(g_, fields_);
        const auto total = static_cast<int64_t>(lists_.counter_needs.size());
        if (at(FIELD_ARRIVE) < 0 || range.first + range.count > total) {
            refuse(FIELD_ARRIVE, text("one of ", total, " counters, ", range.count, " of them from ", range.first));
        }
        for (int64_t i = range.first; i < range.first + range.count; ++i) {
            const int32_t need = lists_.counter_needs[i];
            if (at(FIELD_ARRIVE_COUNT) >= 1 && at(FIELD_ARRIVE_COUNT) <= need) continue;
            refuse(FIELD_ARRIVE_COUNT, text("1 to ", need, ": all arrivals at ", lists_.counter_names[i]));
        }
    }

    void rows(int64_t total, int64_t least = 1) const {
        expect(FIELD_ROW_COUNT, least, total, "rows");
        span(FIELD_ROW_BEGIN, at(FIELD_ROW_COUNT), total, "rows");
    }

    void tile(int64_t total) const { expect(FIELD_ROW_COUNT, 1, total, "rows of a tile"); }

    void norm() const {
        if (at(FIELD_INPUT_2) == BUFFER_NONE) {
            for (const Field field : {FIELD_INPUT_3, FIELD_SPLIT, FIELD_OUTPUT_2}) {
                expect(field, 0, 0, "INPUT_2 is NONE");
            }
            return;
        }
        for (const Field field : {FIELD_INPUT_3, FIELD_OUTPUT_2}) {
            if (at(field) == BUFFER_NONE) refuse(field, "a buffer: INPUT_2 is one");
        }
        expect(FIELD_LAYER, 1, g_.layers, "the layer before is added");
        expect(FIELD_SPLIT, 1, lists_.buffers[BUFFER_ATTENTION_OUT].leading, "parts of ATTENTION_OUT");
    }

    void qkv() const {
        const int64_t d = g_.head_dim;
        rows(int64_t{g_.heads + 2 * g_.kv_heads} * d);
        expect(FIELD_ROPE, 0, 1, "whether to rotate");
        // Several query heads may share a task; a key or a value is written to its head's page.
        const int64_t first = at(FIELD_ROW_BEGIN), last = first + at(FIELD_ROW_COUNT) - 1, queries = g_.heads * d;
        const int64_t each = first < queries ? queries / g_.kv_heads : d;
        if (first / each != last / each) {
            refuse(FIELD_ROW_COUNT, "the queries of one KV head, or its key or value");
        }
        if (at(FIELD_ROPE) == 0) return;
        if (at(FIELD_ROW_BEGIN) % 2) refuse(FIELD_ROW_BEGIN, "an even row: pairs are rotated");
        if (at(FIELD_ROW_COUNT) % 2) refuse(FIELD_ROW_COUNT, "an even number: pairs are rotated");
    }

    void slices() const {
        const int64_t columns = weight_of(g_, opcode_).columns;
        expect(FIELD_K_COUNT, 1, columns, "columns");
        span(FIELD_K_BEGIN, at(FIELD_K_COUNT), columns, "columns");
        expect(FIELD_K_SLICE, 1, columns, "columns");
        if (at(FIELD_K_COUNT) % at(FIELD_K_SLICE)) refuse(FIELD_K_SLICE, text("a divisor of ", at(FIELD_K_COUNT)));
        if (at(FIELD_K_BEGIN) % at(FIELD_K_SLICE)) refuse(FIELD_K_BEGIN, text("a multiple of ", at(FIELD_K_SLICE)));
        if (reads(FIELD_SPLIT)) {
            expect(FIELD_SPLIT, 0, lists_.buffers[at(FIELD_OUTPUT)].leading - 1, "a part of the output");
        }
    }

    // DEALERS are the ranges of the vocabulary in RANGE_BEST.
    void ranges() const {
        const int64_t found = ranges_of(lists_);
        expect(FIELD_DEALERS, found, found, "the ranges of RANGE_BEST");
    }

    void blocks() const {
        rows(g_.vocabulary, 0);
        const int64_t end = at(FIELD_ROW_BEGIN) + at(FIELD_ROW_COUNT);
        if (at(FIELD_ROW_BEGIN) % kSampleBlock) refuse(FIELD_ROW_BEGIN, text("a multiple of ", kSampleBlock));
        if (end % kSampleBlock && end != g_.vocabulary) refuse(FIELD_ROW_COUNT, "whole blocks of the vocabulary");
    }

    const Model& model_;
    const Geometry& g_;
    const TaskLists& lists_;
    const int32_t task_;
    const int32_t* fields_;
    const int32_t opcode_;
};

}  // namespace

std::string validate_task(const Model& model, const TaskLists& lists, int32_t task) {
    try {
        TaskCheck(model, lists, task).run();
        return "";
    } catch (const Refusal& refusal) {
        return refusal.what;
    }
}

}  // namespace north_jax::megakernel
