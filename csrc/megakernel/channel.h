// What a running quantum and the host tell each other: a ring of tokens one way, a control word the other.
//
// Plain memory that both sides see: ordinary memory for the CPU executor, pinned and mapped for CUDA. Every field that
// both sides touch is one aligned word, written with release and read with acquire semantics (system scope on a GPU).
#pragma once

#include <cstdint>

#include "csrc/megakernel/abi.h"

namespace north_jax::megakernel {

inline constexpr int32_t kRingEntries = 4096;  // a power of two

// One row's result of one step.
struct TokenEntry {
    uint32_t quantum;  // number of the quantum that wrote it
    int32_t step;      // of the quantum, from 0
    int32_t slot;
    int32_t token;         // -1 where finish is CANCELLED or ERROR
    int32_t finish;        // a Finish
    int32_t alternatives;  // how many of what follows are there, as in a row's parameters; -1: no log-probability
    float logprob;
    int32_t top_token[kMaxLogprobs];
    float top_logprob[kMaxLogprobs];
};

struct Channel {
    // Host to kernel.
    alignas(64) uint64_t read;  // entries that the host has taken: the kernel waits before it would overwrite others
    uint32_t stop;              // quanta up to this number end after the step that they are in
    uint32_t cancel[kMaxRows];  // by row of the batch: the row of quantum `cancel[row]` ends with CANCELLED

    // Kernel to host.
    alignas(64) uint64_t written;   // entries ever written; entry i lies at ring[i % kRingEntries]
    alignas(64) uint32_t finished;  // quanta up to this number have ended: all their entries are written
    TokenEntry ring[kRingEntries];
};

}  // namespace north_jax::megakernel
