// The experts: MOE_UPGATE_ACT, MOE_DOWN, and MOE_UPGATE_ACT_DRAIN, MOE_DOWN_DRAIN.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/reference/operations/products.h"
#include "csrc/reference/operations/routes.h"

namespace north_jax::megakernel {

// A task whose items belong to active experts. The routing comes from ROUTER_LOGITS, and then activations lie by
// assignment; or from ROUTES, and then they lie by sorted assignment.
template <typename T>
class ExpertTask : public MatrixTask {
   public:
    ExpertTask(Context& context, const Task& task) : MatrixTask(context, task), input_(context, task) {}

   protected:
    bool by_tables() const { return task_[FIELD_INPUT_2] == BUFFER_ROUTES; }

    void read_routing() {
        if (by_tables()) {
            routing_.sorted = read_routes(context_, task_, FIELD_INPUT_2);
        } else {
            routing_ = choose(context_, task_);
        }
    }

    Routes<const int32_t> routes() const { return {routing_.sorted.data(), context_.geometry.experts}; }
    int32_t active() const { return routes().active(); }
    int32_t assignments(int32_t rank) const { return routes().first(rank + 1) - routes().first(rank); }

    // Of each assignment of an active expert: its row in EXPERT_HIDDEN.
    std::vector<int32_t> places(int32_t rank) const {
        std::vector<int32_t> result;
        for (int32_t i = routes().first(rank); i < routes().first(rank + 1); ++i) {
            result.push_back(by_tables() ? i : routes().assignment(i));
        }
        return result;
    }

    // Row of the weight matrix: `row` of an expert that has `rows` rows.
    const T* weight(int32_t rank, int64_t row, int64_t rows) const {
        return context_.weight<T>(task_, routes().expert(rank) * rows + row);
    }

    InputRows<T> input_;
    Routing routing_;
};

// OUTPUT = router weight · silu(gate) · up, tile by tile.
template <typename T>
class ExpertUp : public ExpertTask<T> {
    using ExpertTask<T>::ExpertTask;

    Dealt open() override {
        this->read_routing();
        tiles_ = this->context_.geometry.expert_width / units();
        const int32_t items = this->active() * tiles_;
        const Task& task = this->task_;
        if (task.operation().claims) return {0, items, 1};
        return dealt(items, task[FIELD_DEALER], task[FIELD_DEALERS], task[FIELD_ROUND_BEGIN], task[FIELD_ROUND_END]);
    }

    void load(int32_t number, std::vector<float>& staged) override {
        this->input_.load(width(), sources(number), 0, width(), staged);
    }

    void consume(int32_t number, const std::vector<float>& staged) override {
        const Geometry& g = this->context_.geometry;
        const ExpertItem item = expert_item(tiles_, number);
        const float* x = this->input_.read(width(), sources(number), 0, width(), staged);
        const std::vector<int32_t> places = this->places(item.rank);
        T* out = this->context_.template buffer<T>(this->task_, FIELD_OUTPUT);
        for (int32_t unit = item.tile * units(); unit < (item.tile + 1) * units(); ++unit) {
            const T* gate = this->weight(item.rank, unit, 2 * g.expert_width);
            const T* up = this->weight(item.rank, unit + g.expert_width, 2 * g.expert_width);
            for (size_t i = 0; i < places.size(); ++i) {
                const float* row = x + i * width();
                const float weight = this->by_tables() ? 1.0f : this->routing_.weights[places[i]];
                const float hidden = silu(dot(gate, row, width())) * dot(up, row, width());
                out[int64_t{places[i]} * g.expert_width + unit] = from_float<T>(hidden * weight);
            }
        }
        this->context_.arrive(this->task_, this->task_[FIELD_ARRIVE] + item.rank, this->task_[FIELD_ARRIVE_COUNT]);
    }

    // Arrivals of the ranks that no expert has.
    void finish() override {
        const Task& task = this->task_;
        if (task[FIELD_ROUND_BEGIN] != 0) return;
        const Geometry& g = this->context_.geometry;
        const int32_t ranks = smaller(g.experts, task[FIELD_BATCH_COUNT] * g.top_k);
        for (int32_t rank = this->active(); rank < ranks; ++rank) {
            if (rank % task[FIELD_DEALERS] != task[FIELD_DEALER]) continue;
            this->context_.arrive(task, task[FIELD_ARRIVE] + rank, int64_t{task[FIELD_ARRIVE_COUNT]} * tiles_);
        }
    }

    int32_t units() const { return this->task_[FIELD_ROW_COUNT]; }
    int64_t width() const { return this->context_.geometry.hidden; }

    // Rows of the input that an item's expert gets.
    std::vector<int32_t> sources(int32_t number) const {
        std::vector<int32_t> rows = this->places(expert_item(tiles_, number).rank);
        if (this->by_tables()) return rows;  // gathered already
        for (int32_t& row : rows) row /= this->context_.geometry.top_k;
        return rows;
    }

    int32_t tiles_ = 1;  // of an expert
};

// MOE_DOWN: one item an expert, all of them summed.
template <typename T>
class ExpertDown : public ExpertTask<T> {
    using ExpertTask<T>::ExpertTask;

    Dealt open() override {
        this->read_routing();
        sums_.assign(int64_t{this->context_.lists.batch} * outputs(), 0.0f);
        return {0, this->active(), 1};
    }

    int32_t slice(int32_t rank) const override { return rank; }

    void load(int32_t rank, std::vector<float>& staged) override {
        this->input_.load(width(), this->places(rank), 0, width(), staged);
    }

    void consume(int32_t rank, const std::vector<float>& staged) override {
        const Geometry& g = this->context_.geometry;
        const std::vector<int32_t> places = this->places(rank);
        for (int32_t r = 0; r < outputs(); ++r) {
            const T* w = this->weight(rank, this->task_[FIELD_ROW_BEGIN] + r, g.hidden);
            for (size_t i = 0; i < places.size(); ++i) {
                sums_[places[i] / g.top_k * outputs() + r] += dot(w, &staged[i * width()], width());
            }
        }
    }

    void finish() override {
        const int64_t columns = this->context_.geometry.hidden;
        float* out = this->context_.template buffer<float>(this->task_, FIELD_OUTPUT) + this->task_[FIELD_ROW_BEGIN];
        for (const int32_t row : this->routing_.rows) {
            for (int32_t r = 0; r < outputs(); ++r) out[row * columns + r] = sums_[row * outputs() + r];
        }
        this->context_.arrive(this->task_);
    }

    int32_t outputs() const { return this->task_[FIELD_ROW_COUNT]; }
    int64_t width() const { return this->context_.geometry.expert_width; }

    std::vector<float> sums_;  // [B, outputs]
};

// MOE_DOWN_DRAIN: tile by tile, each assignment's output on its own.
template <typename T>
class ExpertDownDrain : public ExpertTask<T> {
    using ExpertTask<T>::ExpertTask;

    Dealt open() override {
        this->read_routing();
        tiles_ = ceil_div(this->context_.geometry.hidden, this->task_[FIELD_ROW_COUNT]);
        return {0, this->active() * tiles_, 1};
    }

    int32_t slice(int32_t number) const override { return expert_item(tiles_, number).rank; }

    void load(int32_t number, std::vector<float>& staged) override {
        this->input_.load(width(), this->places(slice(number)), 0, width(), staged);
    }

    void consume(int32_t number, const std::vector<float>& staged) override {
        const Geometry& g = this->context_.geometry;
        const ExpertItem item = expert_item(tiles_, number);
        const std::vector<int32_t> places = this->places(item.rank);
        float* out = this->context_.template buffer<float>(this->task_, FIELD_OUTPUT);
        const int32_t first = item.tile * this->task_[FIELD_ROW_COUNT];
        for (int32_t r = first; r < smaller(g.hidden, first + this->task_[FIELD_ROW_COUNT]); ++r) {
            const T* w = this->weight(item.rank, r, g.hidden);
            for (size_t i = 0; i < places.size(); ++i) {
                out[int64_t{places[i]} * g.hidden + r] = dot(w, &staged[i * width()], width());
            }
        }
    }

    void finish() override { this->context_.arrive(this->task_); }

    int64_t width() const { return this->context_.geometry.expert_width; }

    int32_t tiles_ = 1;  // of an expert
};

}  // namespace north_jax::megakernel
