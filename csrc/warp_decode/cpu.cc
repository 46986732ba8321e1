// The C++ form: one row of weights at a time as float32, and its products with the tokens of its expert.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "csrc/warp_decode/operands.h"

namespace north_jax::warp_decode {
namespace {

float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t to_bfloat16(float x) {
    if (std::isnan(x)) return 0x7fc0;
    const auto bits = std::bit_cast<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_e4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                     : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return bits & 0x80 ? -size : size;
}

float from_e8m0(uint8_t bits) {
    return bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, bits - 127);
}

// One row, with its scales.
void read_row(const Weights& weights, int32_t expert, int32_t row, std::vector<float>& out) {
    static const auto* const table = [] {
        static float values[256];
        for (int i = 0; i < 256; ++i) values[i] = from_e4m3(static_cast<uint8_t>(i));
        return values;
    }();
    const int64_t number = int64_t{expert} * weights.rows + row, begin = number * weights.columns;
    if (weights.format == Format::kBfloat16) {
        const auto* values = reinterpret_cast<const uint16_t*>(weights.values) + begin;
        for (int32_t i = 0; i < weights.columns; ++i) out[i] = from_bfloat16(values[i]);
        return;
    }
    const auto* values = reinterpret_cast<const uint8_t*>(weights.values) + begin;
    const auto* floats = reinterpret_cast<const float*>(weights.scales);
    const auto* bytes = reinterpret_cast<const uint8_t*>(weights.scales);
    const int64_t words = (int64_t{expert} * scale_rows(weights) + scale_row(weights, row)) * scale_words(weights);
    for (int32_t i = 0; i < weights.columns; ++i) {
        float scale;
        if (weights.format == Format::kFp8Channel) {
            scale = floats[number];
        } else if (weights.format == Format::kFp8Block) {
            scale = floats[words + i / kScaleColumns];
        } else {
            scale = from_e8m0(bytes[words * 4 + i / 32]);
        }
        out[i] = table[values[i]] * scale;
    }
}

float dot(const std::vector<float>& row, const uint16_t* x) {
    float sums[8] = {};  // so that the compiler may use vectors
    for (size_t i = 0; i < row.size(); i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += row[i + j] * from_bfloat16(x[i + j]);
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

float silu(float x) { return x / (1.0f + std::exp(-x)); }

// The pairs (token, slot) of each expert that some token chose.
std::vector<std::vector<int32_t>> pairs_by_expert(const int32_t* experts, int32_t pairs, int32_t count) {
    std::vector<std::vector<int32_t>> result(count);
    for (int32_t p = 0; p < pairs; ++p) {
        if (experts[p] >= 0 && experts[p] < count) result[experts[p]].push_back(p);
    }
    return result;
}

}  // namespace

void gate_up_cpu(const GateUp& op) {
    const int32_t width = op.width(), columns = op.weights.columns;
    std::memset(op.hidden, 0, sizeof(uint16_t) * op.pairs() * width);
    std::vector<float> gate(columns), up(columns);
    const auto chosen = pairs_by_expert(op.experts, op.pairs(), op.weights.experts);
    for (int32_t e = 0; e < op.weights.experts; ++e) {
        for (int32_t i = 0; !chosen[e].empty() && i < width; ++i) {
            read_row(op.weights, e, i, gate);
            read_row(op.weights, e, width + i, up);
            for (const int32_t p : chosen[e]) {
                const uint16_t* x = op.x + int64_t{p / op.top_k} * columns;
                op.hidden[int64_t{p} * width + i] = to_bfloat16(silu(dot(gate, x)) * dot(up, x));
            }
        }
    }
}

void down_cpu(const Down& op) {
    const int32_t width = op.width(), rows = op.weights.rows;
    std::vector<float> row(width), products(op.pairs());
    const auto chosen = pairs_by_expert(op.experts, op.pairs(), op.weights.experts);
    for (int32_t d = 0; d < rows; ++d) {
        for (int32_t e = 0; e < op.weights.experts; ++e) {
            if (!chosen[e].empty()) read_row(op.weights, e, d, row);
            for (const int32_t p : chosen[e]) products[p] = dot(row, op.hidden + int64_t{p} * width);
        }
        for (int32_t t = 0; t < op.tokens; ++t) {
            float sum = 0;
            for (int32_t p = t * op.top_k; p < (t + 1) * op.top_k; ++p) {
                if (op.experts[p] >= 0 && op.experts[p] < op.weights.experts) sum += op.router[p] * products[p];
            }
            const int64_t place = int64_t{t} * rows + d;
            if (op.float32_out) {
                static_cast<float*>(op.out)[place] = sum;
            } else {
                static_cast<uint16_t*>(op.out)[place] = to_bfloat16(sum);
            }
        }
    }
}

void grouped_matmul_cpu(const GroupedMatmul& op) {
    std::vector<float> row(op.weights.columns);
    for (int32_t tile = 0; tile < op.tiles && op.tile_experts[tile] >= 0; ++tile) {
        for (int32_t n = 0; n < op.weights.rows; ++n) {
            read_row(op.weights, op.tile_experts[tile], n, row);
            for (int64_t i = int64_t{tile} * kTileTokens; i < int64_t{tile + 1} * kTileTokens; ++i) {
                op.out[i * op.weights.rows + n] = to_bfloat16(dot(row, op.x + i * op.weights.columns));
            }
        }
    }
}

}  // namespace north_jax::warp_decode
