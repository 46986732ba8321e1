// Checks of the operands of one call. The first thing found wrong becomes the error, and names the operand.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace north_jax {

using Shape = std::vector<int64_t>;

inline Shape shape_of(const xla::ffi::AnyBuffer& buffer) {
    return Shape(buffer.dimensions().begin(), buffer.dimensions().end());
}

inline std::string describe(xla::ffi::DataType dtype, const Shape& shape) {
    std::ostringstream text;
    text << dtype << "[";
    for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
    text << "]";
    return text.str();
}

class OperandCheck {
   public:
    explicit OperandCheck(std::string operation) : operation_(std::move(operation)) {}

    // For a condition that no shape expresses.
    void require(bool holds, const std::string& otherwise) {
        if (!holds && error_.success()) error_ = xla::ffi::Error::InvalidArgument(operation_ + ": " + otherwise);
    }

    // For an operand whose sizes are not known from others: `fits` says whether it is as `expected` words it.
    void require(bool fits, const char* name, const xla::ffi::AnyBuffer& buffer, const std::string& expected) {
        require(fits, std::string(name) + " is " + describe(buffer.element_type(), shape_of(buffer)) + ", expected " +
                          expected);
    }

    void require(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype, const Shape& shape) {
        require(buffer.element_type() == dtype && shape_of(buffer) == shape, name, buffer, describe(dtype, shape));
    }

    bool failed() const { return error_.failure(); }
    const xla::ffi::Error& error() const { return error_; }

   private:
    std::string operation_;
    xla::ffi::Error error_;
};

}  // namespace north_jax
