// Matrix products with weights that no routing chooses: QKV_PROJ, ROUTER_GEMM, O_PROJ, FFN_UPGATE_ACT, FFN_DOWN,
// LM_HEAD.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "csrc/megakernel/routing.h"
#include "csrc/reference/operations/adjust.h"
#include "csrc/reference/operations/rows.h"

namespace north_jax::megakernel {

inline float silu(float x) { return x * sigmoid(x); }

// sums_ [live rows, outputs] = INPUT · weight rowsᵀ, K slice by K slice; `store` does the rest.
template <typename T>
class Product : public MatrixTask {
   public:
    Product(Context& context, const Task& task) : MatrixTask(context, task), input_(context, task) {}

    Dealt open() override {
        rows_ = context_.live_rows(task_);
        sums_.assign(rows_.size() * outputs(), 0.0f);
        columns_ = context_.model.weights[task_[FIELD_WEIGHT]].columns;
        const bool sliced = task_.reads(FIELD_K_SLICE);
        begin_ = sliced ? task_[FIELD_K_BEGIN] : 0;
        width_ = sliced ? task_[FIELD_K_SLICE] : columns_;
        return {0, sliced ? task_[FIELD_K_COUNT] / task_[FIELD_K_SLICE] : 1, 1};
    }

    int32_t slice(int32_t item) const override { return static_cast<int32_t>(begin_ / width_) + item; }

    void load(int32_t item, std::vector<float>& staged) override {
        input_.load(columns_, rows_, column(item), width_, staged);
    }

    void consume(int32_t item, const std::vector<float>& staged) override {
        const float* x = input_.read(columns_, rows_, column(item), width_, staged);
        const int32_t count = outputs();
        for (int32_t r = 0; r < count; ++r) {
            const T* w = context_.weight<T>(task_, weight_row(r)) + column(item);
            for (size_t i = 0; i < rows_.size(); ++i) sums_[i * count + r] += dot(w, x + i * width_, width_);
        }
    }

    void finish() override {
        for (size_t i = 0; i < rows_.size(); ++i) store(rows_[i], &sums_[i * outputs()]);
        context_.arrive(task_);
    }

   protected:
    virtual int32_t outputs() const { return task_[FIELD_ROW_COUNT]; }
    virtual int64_t weight_row(int32_t output) const { return task_[FIELD_ROW_BEGIN] + output; }
    virtual void store(int32_t row, const float* sums) = 0;

    template <typename U>
    U* out(int32_t row, int64_t columns) const {
        return context_.buffer<U>(task_, FIELD_OUTPUT) + row * columns + task_[FIELD_ROW_BEGIN];
    }

   private:
    int64_t column(int32_t item) const { return begin_ + item * width_; }

    InputRows<T> input_;
    std::vector<int32_t> rows_;
    std::vector<float> sums_;
    int64_t columns_ = 0;
    int64_t begin_ = 0;  // first column
    int64_t width_ = 1;  // of a slice
};

// ROUTER_GEMM, O_PROJ, FFN_DOWN: the sums as they are.
template <typename T>
class PlainProduct : public Product<T> {
    using Product<T>::Product;

    void store(int32_t row, const float* sums) override {
        const int64_t columns = this->context_.model.weights[this->task_[FIELD_WEIGHT]].rows;
        const int64_t plane = this->task_.reads(FIELD_SPLIT) ? this->task_[FIELD_SPLIT] : 0;
        float* out = this->template out<float>(row, columns) + plane * this->context_.lists.batch * columns;
        for (int32_t r = 0; r < this->outputs(); ++r) out[r] = sums[r];
    }
};

template <typename T>
class QkvProjection : public Product<T> {
    using Product<T>::Product;

    void store(int32_t row, const float* sums) override {
        const Geometry& g = this->context_.geometry;
        const int32_t d = g.head_dim, first = this->task_[FIELD_ROW_BEGIN], count = this->outputs();
        const int32_t head = first / d;  // of queries, then of keys, then of values
        const int32_t position = this->context_.parameter(row, ROW_POSITION);
        std::vector<float> y(sums, sums + count);
        if (this->task_[FIELD_ROPE] && head < g.heads + g.kv_heads) rotate(y, first % d, position);
        T* out = this->template out<T>(row, int64_t{g.heads + 2 * g.kv_heads} * d);
        for (int32_t r = 0; r < count; ++r) out[r] = from_float<T>(y[r]);
        if (head < g.heads) return;
        const int32_t part = (head - g.heads) / g.kv_heads, kv_head = (head - g.heads) % g.kv_heads;
        T* page = this->context_.template page<T>(this->task_, row, position, part, kv_head) + first % d;
        for (int32_t r = 0; r < count; ++r) page[r] = out[r];
    }

    // Interleaved pairs (2i, 2i + 1), from component `first` of a head on; others of its kind may follow.
    void rotate(std::vector<float>& y, int32_t first, int32_t position) const {
        const int32_t d = this->context_.geometry.head_dim;
        for (size_t i = 0; i < y.size(); i += 2) {
            const float angle = static_cast<float>(position) * this->context_.model.frequencies[(first + i) % d / 2];
            const float cosine = std::cos(angle), sine = std::sin(angle);
            const float even = y[i], odd = y[i + 1];
            y[i] = even * cosine - odd * sine;
            y[i + 1] = odd * cosine + even * sine;
        }
    }
};

// FFN_UPGATE_ACT: outputs are the gate rows and then the up rows of ROW_COUNT hidden units.
template <typename T>
class GateUpProduct : public Product<T> {
    using Product<T>::Product;

    int32_t outputs() const override { return 2 * this->task_[FIELD_ROW_COUNT]; }

    int64_t weight_row(int32_t output) const override {
        const int32_t units = this->task_[FIELD_ROW_COUNT];
        return this->task_[FIELD_ROW_BEGIN] + output % units + output / units * this->context_.geometry.dense_width;
    }

    void store(int32_t row, const float* sums) override {
        const int32_t units = this->task_[FIELD_ROW_COUNT];
        T* out = this->template out<T>(row, this->context_.geometry.dense_width);
        for (int32_t r = 0; r < units; ++r) out[r] = from_float<T>(silu(sums[r]) * sums[units + r]);
    }
};

template <typename T>
class LmHead : public Product<T> {
    using Product<T>::Product;

    void store(int32_t row, const float* sums) override {
        float* out = this->template out<float>(row, this->context_.geometry.vocabulary);
        for (int32_t r = 0; r < this->outputs(); ++r) out[r] = sums[r] * this->context_.geometry.logit_scale;
        const int32_t first = this->task_[FIELD_ROW_BEGIN];
        adjust(this->context_, row, out, first, this->outputs());
        Best* best = this->context_.template buffer<Best>(this->task_, FIELD_OUTPUT_2) +
                     (int64_t{row} * this->task_[FIELD_DEALERS] + this->task_[FIELD_DEALER]) * kMaxLogprobs;
        const int32_t wanted = larger(sampling_of(this->context_, row).alternatives(), 1);
        list_largest(out, first, this->outputs(), wanted, best);
    }
};

}  // namespace north_jax::megakernel
