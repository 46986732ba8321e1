// The operands of north_jax.decode: XLA's buffers, checked against the engine's model and the quantum's lists.
#pragma once

#include "csrc/megakernel/plan.h"
#include "xla/ffi/api/ffi.h"

namespace north_jax {

// Operands: rows [B, kRowFields] int32, workspace [n] uint8, counts [histories, V] int32, full_table [B, P] int32,
// sliding_table [B, R] int32, biases [B, kMaxBiases, 2] int32, masks [B, ceil(V / 32)] uint32, and for every layer
// pages [num_pages, 2, K, 64, d] of the weights' type. Results: rows, workspace, counts and the pages, each in its
// operand's buffer.
xla::ffi::ErrorOr<megakernel::Batch> decode_operands(const megakernel::Model& model, const megakernel::TaskLists& lists,
                                                     const xla::ffi::RemainingArgs& operands,
                                                     const xla::ffi::RemainingRets& results);

}  // namespace north_jax
