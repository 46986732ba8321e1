// The experts of a mixture for few tokens, organised by outputs: what the C++ and the CUDA form share.
//
// gate_up: hidden[t, j, i] = silu(x[t] · gate row i) * (x[t] · up row i) of the expert experts[t, j].
// down:    out[t, d] = sum over j of weights[t, j] * (hidden[t, j] · row d of the expert experts[t, j]).
// An expert id outside [0, count) chooses none: its hidden values are 0, and it adds nothing to the output.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/host_device.h"

namespace north_jax::warp_decode {

inline constexpr int kMaxTokens = 64;
inline constexpr int kMaxTopK = 16;
inline constexpr int kSizeStep = 32;       // hidden and intermediate sizes are multiples of it
inline constexpr int kScaleColumns = 128;  // columns that one 4-byte word of scales covers

enum class Format : int32_t {
    kBfloat16,
    kFp8Channel,  // e4m3, one float32 scale a row
    kFp8Block,    // e4m3, one float32 scale for 128 × 128 weights
    kMxfp8,       // e4m3, one e8m0 scale for 32 weights of a row
};

enum class Form : int32_t {
    kPlain,   // one warp an output value (for gate_up: and expert)
    kShared,  // tokens that chose the same expert share its weights' way from memory
};

// The stacked weights of all experts, row-major [experts, rows, columns].
struct Weights {
    const std::byte* values;
    // kFp8Channel: float32 [experts, rows]
    // kFp8Block:   float32 [experts, parts * ceil(rows / parts / 128), ceil(columns / 128)]
    // kMxfp8:      e8m0 [experts, rows, ceil(columns / 128) * 4]
    const std::byte* scales;
    Format format;
    int32_t experts;
    int32_t rows;
    int32_t columns;
    int32_t parts;  // projections stacked in the rows, each with blocks of its own: gate and up are 2
};

struct GateUp {
    const uint16_t* x;       // BF16 [tokens, hidden_size]
    const int32_t* experts;  // [tokens, top_k]
    Weights weights;         // rows: 2 * width, gate first; columns: hidden_size
    uint16_t* hidden;        // BF16 [tokens, top_k, width]
    int32_t tokens;
    int32_t top_k;

    HOST_DEVICE int32_t width() const { return weights.rows / 2; }
    HOST_DEVICE int32_t pairs() const { return tokens * top_k; }
};

struct Down {
    const uint16_t* hidden;  // BF16 [tokens, top_k, width]
    const int32_t* experts;  // [tokens, top_k]
    const float* router;     // [tokens, top_k]
    Weights weights;         // rows: hidden_size; columns: width
    void* out;               // [tokens, hidden_size], BF16 or float32
    int32_t tokens;
    int32_t top_k;
    bool float32_out;

    HOST_DEVICE int32_t width() const { return weights.columns; }
    HOST_DEVICE int32_t pairs() const { return tokens * top_k; }
};

inline constexpr int kTileTokens = 16;

// The expert-centric path's product: out[i] = x[i] · weights[tile_experts[i / 16]], for the rows i of tiles that have
// an expert; those without one (-1) come last, and their rows of `out` are not written.
struct GroupedMatmul {
    const uint16_t* x;            // BF16 [16 * tiles, columns]
    const int32_t* tile_experts;  // [tiles]
    Weights weights;              // BF16 alone
    uint16_t* out;                // BF16 [16 * tiles, rows]
    int32_t tiles;
};

HOST_DEVICE constexpr int32_t value_bytes(Format format) { return format == Format::kBfloat16 ? 2 : 1; }

HOST_DEVICE constexpr int32_t ceil_div(int32_t n, int32_t by) { return (n + by - 1) / by; }

// Words of scales in a row of kMxfp8 and in a row of blocks of kFp8Block.
HOST_DEVICE inline int32_t scale_words(const Weights& weights) { return ceil_div(weights.columns, kScaleColumns); }

// Rows of words of one expert.
HOST_DEVICE inline int32_t scale_rows(const Weights& weights) {
    if (weights.format == Format::kMxfp8) return weights.rows;
    return weights.parts * ceil_div(weights.rows / weights.parts, kScaleColumns);
}

// Which of them a row of weights uses.
HOST_DEVICE inline int32_t scale_row(const Weights& weights, int32_t row) {
    if (weights.format == Format::kMxfp8) return row;
    const int32_t part = weights.rows / weights.parts;
    return row / part * ceil_div(part, kScaleColumns) + row % part / kScaleColumns;
}

// Runs on the calling thread.
void gate_up_cpu(const GateUp& op);
void down_cpu(const Down& op);
void grouped_matmul_cpu(const GroupedMatmul& op);

}  // namespace north_jax::warp_decode
