// The formats of weights: sixteen bytes of a row as float32 values, and where their scales are.
#pragma once

#include <cuda_runtime.h>

#include "csrc/warp_decode/convert.cuh"
#include "csrc/warp_decode/operands.h"

namespace north_jax::warp_decode {

inline constexpr int kUnit = 8;  // values that are worked on at once: sixteen bytes of activations

__device__ __forceinline__ void unpack_bfloat16(uint4 raw, float (&values)[kUnit]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// 2^(bits - 127), NaN for 255.
__device__ __forceinline__ float from_e8m0(uint32_t bits) {
    const uint32_t tiny = bits == 0 ? 0x00400000u : bits << 23;  // 2^-127 is subnormal
    return __uint_as_float(bits == 255 ? 0x7fc00000u : tiny);
}

// A chunk is sixteen bytes of a row, `kUnits` units of values. Where `kWords`, one 4-byte word of a row's scales goes
// with 128 columns, which `kBlocks` has in common for 128 rows; `kRowScale` says that a row has one scale.
template <Format format>
struct Code {
    static constexpr int kUnits = format == Format::kBfloat16 ? 1 : 2;
    static constexpr int kChunk = kUnits * kUnit;
    static constexpr bool kWords = format == Format::kFp8Block || format == Format::kMxfp8;
    static constexpr bool kRowScale = format == Format::kFp8Channel;
    static constexpr bool kBlocks = format == Format::kFp8Block;

    __device__ __forceinline__ static void unpack(uint4 raw, int unit, float (&values)[kUnit]) {
        if constexpr (format == Format::kBfloat16) {
            unpack_bfloat16(raw, values);
        } else {
            const uint32_t words[2] = {unit == 0 ? raw.x : raw.z, unit == 0 ? raw.y : raw.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 two = from_e4m3x2(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2)));
                values[2 * i] = two.x;
                values[2 * i + 1] = two.y;
            }
        }
    }

    // The scale of chunk number `chunk` of a row.
    __device__ __forceinline__ static float scale(uint32_t word, int chunk) {
        if constexpr (format == Format::kMxfp8) return from_e8m0(word >> chunk / 2 % 4 * 8 & 0xff);
        return __uint_as_float(word);
    }
};

// Where an expert's rows are.
template <Format format>
class Expert {
   public:
    __device__ Expert(const Weights& weights, int expert) : weights_(weights), expert_(expert) {}

    __device__ const std::byte* row(int row) const {
        return weights_.values + (int64_t{expert_} * weights_.rows + row) * weights_.columns * value_bytes(format);
    }

    __device__ const uint32_t* words(int row) const {
        if constexpr (!Code<format>::kWords) return nullptr;
        const int64_t line = int64_t{expert_} * scale_rows(weights_) + scale_row(weights_, row);
        return reinterpret_cast<const uint32_t*>(weights_.scales) + line * scale_words(weights_);
    }

    __device__ float row_scale(int row) const {
        if constexpr (!Code<format>::kRowScale) return 1.0f;
        const int64_t place = int64_t{expert_} * weights_.rows + row;
        return __ldg(reinterpret_cast<const float*>(weights_.scales) + place);
    }

   private:
    const Weights& weights_;
    int expert_;
};

}  // namespace north_jax::warp_decode
