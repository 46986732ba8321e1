// What each opcode takes: the buffers that it may name, and the shape of its weight.
#pragma once

#include <cstdint>

#include "csrc/megakernel/plan.h"

namespace north_jax::megakernel {

// Buffers that a task may name in each field, bit b for Buffer b; bit 0 where it may name none.
struct Operands {
    uint32_t input, input_2, input_3, output, output_2;
};
Operands operands_of(int32_t opcode);

// Rows and columns of an opcode's weight; 0 rows: it has none.
struct Shape {
    int64_t rows, columns;
};
Shape weight_of(const Geometry& geometry, int32_t opcode);

}  // namespace north_jax::megakernel
