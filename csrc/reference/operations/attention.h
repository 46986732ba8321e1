// Attention of one new token a row: ATTN_DECODE, ATTN_DRAIN, ATTN_COMBINE.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "csrc/reference/operations/rows.h"
#include "csrc/reference/text.h"

namespace north_jax::megakernel {

// PARTIAL and PARTIAL_STATS: [B, K, kMaxSplits, H / K, …].
inline int64_t partial_index(const Geometry& g, int32_t row, int32_t kv_head, int32_t split, int32_t query) {
    return ((int64_t{row} * g.kv_heads + kv_head) * kMaxSplits + split) * (g.heads / g.kv_heads) + query;
}

template <typename T>
class Attention : public MatrixTask {
   public:
    using MatrixTask::MatrixTask;

    Dealt open() override {
        const Batch& batch = context_.batch;
        parameters_.assign(batch.rows, batch.rows + int64_t{context_.lists.batch} * kRowFields);
        const int32_t items = attention_item_count(parameters_.data(), task_[FIELD_BATCH_BEGIN],
                                                   task_[FIELD_BATCH_COUNT], kv_heads(), task_[FIELD_WINDOW]);
        if (task_.operation().claims) return {0, items, 1};
        return dealt(items, task_[FIELD_DEALER], task_[FIELD_DEALERS], 0, items);
    }

    int32_t slice(int32_t item) const override { return find(item).head; }

    // The queries, then the step's own key and value.
    void load(int32_t number, std::vector<float>& staged) override {
        const Geometry& g = context_.geometry;
        const AttentionItem item = find(number);
        const int64_t columns = int64_t{g.heads + 2 * g.kv_heads} * g.head_dim;
        const T* row = context_.buffer<const T>(task_, FIELD_INPUT) + item.row * columns;
        const int32_t heads[] = {item.head * group(), g.heads + item.head, g.heads + g.kv_heads + item.head};
        const int32_t counts[] = {group(), 1, 1};
        staged.clear();
        for (int part = 0; part < 3; ++part) {
            const T* from = row + int64_t{heads[part]} * g.head_dim;
            for (int32_t i = 0; i < counts[part] * g.head_dim; ++i) staged.push_back(to_float(from[i]));
        }
    }

    void consume(int32_t number, const std::vector<float>& staged) override {
        const Geometry& g = context_.geometry;
        const AttentionItem item = find(number);
        const Splits splits = attention_splits(position(item.row), task_[FIELD_WINDOW]);
        check_pages(item.row, splits);
        const int32_t d = g.head_dim, first = splits.first(item.split), end = splits.last(item.split);
        const int64_t keys = end - first, index = partial_index(g, item.row, item.head, item.split, 0);

        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        scores_.resize(group() * keys);
        each_position(item, staged, 0, first, end, [&](int32_t at, const auto* key) {
            for (int32_t query = 0; query < group(); ++query) {
                scores_[query * keys + at - first] = dot(key, &staged[query * d], d) * scale;
            }
        });
        float* stats = context_.buffer<float>(task_, FIELD_OUTPUT_2) + index * 2;
        for (int32_t query = 0; query < group(); ++query) {
            float* p = &scores_[query * keys];
            const float maximum = *std::max_element(p, p + keys);
            float sum = 0;
            for (int64_t i = 0; i < keys; ++i) {
                p[i] = std::exp(p[i] - maximum);
                sum += p[i];
                p[i] = to_float(from_float<T>(p[i]));  // as tensor cores take it
            }
            stats[2 * query] = maximum;
            stats[2 * query + 1] = sum;
        }
        sums_.assign(group() * d, 0.0f);
        each_position(item, staged, 1, first, end, [&](int32_t at, const auto* value) {
            for (int32_t query = 0; query < group(); ++query) {
                const float p = scores_[query * keys + at - first];
                float* sums = &sums_[query * d];
                for (int32_t i = 0; i < d; ++i) sums[i] += p * to_float(value[i]);
            }
        });
        std::copy(sums_.begin(), sums_.end(), context_.buffer<float>(task_, FIELD_OUTPUT) + index * d);

        const int32_t missing = item.split == splits.count - 1 ? kMaxSplits - splits.count : 0;
        context_.arrive(task_, counter(item.row, item.head), int64_t{task_[FIELD_ARRIVE_COUNT]} * (1 + missing));
    }

    // Arrivals of the idle rows.
    void finish() override {
        for (int32_t i = 0; i < task_[FIELD_BATCH_COUNT]; ++i) {
            const int32_t row = task_[FIELD_BATCH_BEGIN] + i;
            if (is_live(parameters_.data(), row)) continue;
            for (int32_t head = 0; head < kv_heads(); ++head) {
                const int64_t brings = (int64_t{row} * kv_heads() + head) % task_[FIELD_DEALERS];
                if (brings != task_[FIELD_DEALER]) continue;
                context_.arrive(task_, counter(row, head), int64_t{task_[FIELD_ARRIVE_COUNT]} * kMaxSplits);
            }
        }
    }

   private:
    int32_t kv_heads() const { return context_.geometry.kv_heads; }
    int32_t group() const { return context_.geometry.heads / context_.geometry.kv_heads; }
    int32_t position(int32_t row) const { return parameters_[row * kRowFields + ROW_POSITION]; }
    int32_t counter(int32_t row, int32_t head) const { return task_[FIELD_ARRIVE] + row * kv_heads() + head; }

    AttentionItem find(int32_t item) const {
        return attention_item(parameters_.data(), task_[FIELD_BATCH_BEGIN], kv_heads(), task_[FIELD_WINDOW], item);
    }

    void check_pages(int32_t row, const Splits& splits) const {
        const int32_t pages = ceil_div(splits.end, kPageTokens) - splits.first_page;
        const int32_t entries = task_[FIELD_WINDOW] ? context_.batch.sliding_entries : context_.batch.full_entries;
        if (pages <= entries) return;
        context_.fail(task_, text("row ", row, " sees ", pages, " pages at position ", splits.end - 1,
                                  ", its table has ", entries, " entries"));
    }

    // Calls visit(position, its key or value) for [first, end): earlier positions lie in pages, the row's own was
    // staged.
    template <typename Visit>
    void each_position(const AttentionItem& item, const std::vector<float>& staged, int32_t part, int32_t first,
                       int32_t end, Visit visit) const {
        const int32_t d = context_.geometry.head_dim, own = position(item.row);
        for (int32_t at = first; at < smaller(end, own);) {
            const int32_t page_end = smaller(smaller(end, own), at - at % kPageTokens + kPageTokens);
            const T* line = context_.page<const T>(task_, item.row, at, part, item.head);
            for (; at < page_end; ++at, line += d) visit(at, line);
        }
        if (end > own) visit(own, &staged[(group() + part) * d]);
    }

    std::vector<int32_t> parameters_;  // of all rows
    std::vector<float> scores_;        // [group, keys of the split]
    std::vector<float> sums_;          // [group, d]
};

// ATTN_COMBINE for one query head: the splits are folded in order.
template <typename T>
void combine_head(Context& context, const Task& task, int32_t row, int32_t head) {
    const Geometry& g = context.geometry;
    const int32_t d = g.head_dim, group = g.heads / g.kv_heads;
    const float* partial = context.buffer<const float>(task, FIELD_INPUT);
    const float* stats = context.buffer<const float>(task, FIELD_INPUT_2);
    const Splits splits = attention_splits(context.parameter(row, ROW_POSITION), task[FIELD_WINDOW]);
    float maximum = -std::numeric_limits<float>::infinity(), total = 0;
    std::vector<float> sums(d);
    for (int32_t split = 0; split < splits.count; ++split) {
        const int64_t index = partial_index(g, row, head / group, split, head % group);
        const float next = std::fmax(maximum, stats[index * 2]);
        const float shrink = std::exp(maximum - next), weight = std::exp(stats[index * 2] - next);
        maximum = next;
        total = total * shrink + stats[index * 2 + 1] * weight;
        for (int32_t i = 0; i < d; ++i) sums[i] = sums[i] * shrink + partial[index * d + i] * weight;
    }
    T* out = context.buffer<T>(task, FIELD_OUTPUT) + (int64_t{row} * g.heads + head) * d;
    for (int32_t i = 0; i < d; ++i) out[i] = from_float<T>(sums[i] / total);
}

template <typename T>
void combine(Context& context, const Task& task) {
    for (const int32_t row : context.live_rows(task)) {
        for (int32_t i = 0; i < task[FIELD_ROW_COUNT]; ++i)
            combine_head<T>(context, task, row, task[FIELD_ROW_BEGIN] + i);
    }
}

}  // namespace north_jax::megakernel
