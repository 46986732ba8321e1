// Rows of activations as float32.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/reference/number.h"
#include "csrc/reference/operations/operation.h"

namespace north_jax::megakernel {

// Columns [begin, begin + count) of some rows of a [*, columns] matrix.
template <typename T>
void copy_rows(const T* matrix, int64_t columns, const std::vector<int32_t>& rows, int64_t begin, int64_t count,
               std::vector<float>& out) {
    out.resize(rows.size() * count);
    float* to = out.data();
    for (const int32_t row : rows) {
        const T* from = matrix + row * columns + begin;
        for (int64_t i = 0; i < count; ++i) *to++ = to_float(from[i]);
    }
}

// The same as an item's input: staged by `load`, or read by `consume` where the buffer is the SM's own.
template <typename T>
class InputRows {
   public:
    InputRows(Context& context, const Task& task) : context_(context), task_(task) {}

    void load(int64_t columns, const std::vector<int32_t>& rows, int64_t begin, int64_t count,
              std::vector<float>& staged) const {
        if (!is_local(task_[FIELD_INPUT])) copy(columns, rows, begin, count, staged);
    }

    const float* read(int64_t columns, const std::vector<int32_t>& rows, int64_t begin, int64_t count,
                      const std::vector<float>& staged) {
        if (!is_local(task_[FIELD_INPUT])) return staged.data();
        copy(columns, rows, begin, count, local_);
        return local_.data();
    }

   private:
    void copy(int64_t columns, const std::vector<int32_t>& rows, int64_t begin, int64_t count,
              std::vector<float>& out) const {
        copy_rows(context_.template buffer<const T>(task_, FIELD_INPUT), columns, rows, begin, count, out);
    }

    Context& context_;
    const Task task_;
    std::vector<float> local_;
};

}  // namespace north_jax::megakernel
