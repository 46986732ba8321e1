// The part of a decode call that all platforms share: engine, quantum and operands, and errors that name the cause.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "ffi/decode_engine.h"
#include "xla/ffi/api/ffi.h"

namespace north_jax {

// Runs or launches a quantum; gives what was wrong, "" for nothing.
using RunQuantum = std::function<std::string(DecodeEngine&, const Quantum&, const megakernel::Batch&)>;

// A call that finds its engine always takes a quantum, also one whose operands are refused: calls and quanta stay
// paired.
xla::ffi::Error decode_call(int64_t engine_id, const xla::ffi::RemainingArgs& operands,
                            const xla::ffi::RemainingRets& results, const RunQuantum& run);

}  // namespace north_jax
