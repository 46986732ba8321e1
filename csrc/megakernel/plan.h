// What a decode call works on: an immutable plan (model, weights, task lists) and the buffers of one batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/megakernel/abi.h"

namespace north_jax::megakernel {

enum class Type : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// Sizes and constants of the model. Letters as in DESIGN.md, "Parameters".
struct Geometry {
    int32_t hidden;  // D
    int32_t layers;
    int32_t heads;         // H
    int32_t kv_heads;      // K
    int32_t head_dim;      // d
    int32_t expert_width;  // I
    int32_t dense_width;   // F
    int32_t experts;       // E
    int32_t top_k;         // k
    int32_t vocabulary;    // V
    float norm_eps;
    float logit_scale;
    bool layer_norm;      // mean-centred norm instead of RMSNorm
    bool softmax_router;  // softmax over the selected logits instead of the sigmoid
    bool renormalise;     // divide sigmoid weights by their sum
};

// One weight as a matrix: leading axes of the checkpoint's array are folded into the rows. rows = 0: no such weight.
struct WeightMatrix {
    const void* data = nullptr;
    int64_t rows = 0;
    int64_t columns = 0;
};

// Weights in the order of the table (abi.h, Weight), all of one type. Whoever builds it keeps the arrays alive.
struct Model {
    Geometry geometry;
    Type type;
    std::vector<WeightMatrix> weights;
    // [d/2] rotary frequencies in radians a position: JAX's own, since an error of one bit in them grows with the
    // position.
    std::vector<float> frequencies;
};

// Where one buffer lies in the workspace. Plane p begins p · plane_bytes after offset; LOCAL buffers have `planes`
// planes for each SM, one SM after the other. bytes = 0: the schedule has no such buffer.
struct BufferPlace {
    int64_t offset = 0;
    int64_t plane_bytes = 0;
    int32_t planes = 0;
    int32_t leading = 0;  // size of the first axis: splits of ATTENTION_OUT and MLP_OUT
};

// The task lists of one step for one batch size: north_jax.megakernel.schedule.Schedule as C++ sees it.
struct TaskLists {
    int32_t batch = 0;                   // B
    std::vector<int32_t> tasks;          // [n, kDescriptorFields]
    std::vector<int32_t> begin;          // [SMs + 1]
    std::vector<int32_t> counter_needs;  // arrivals of one step
    std::vector<std::string> counter_names;
    std::vector<std::string> queue_names;
    BufferPlace buffers[kBufferCount];
    int64_t workspace_bytes = 0;

    int32_t sms() const { return static_cast<int32_t>(begin.size()) - 1; }
};

// The KV pages of one layer, [pages, 2, K, kPageTokens, d] of the weights' type.
struct Pool {
    void* data;
    int32_t pages;
};

// The buffers of one call. Rows, pools and workspace are updated in place.
struct Batch {
    int32_t* rows;                 // [B, kRowFields]
    const int32_t* full_table;     // [B, full_entries]: page numbers, -1 for none
    const int32_t* sliding_table;  // [B, sliding_entries]
    int32_t full_entries;
    int32_t sliding_entries;
    std::vector<Pool> pools;  // one a layer
    std::byte* workspace;
    int32_t* counts = nullptr;  // [histories, V]: how often each token was said, see adjust.count
    int32_t histories = 0;
    const int32_t* biases = nullptr;  // [B, kMaxBiases, 2]: token, bits of what is added to its logit
    const uint32_t* masks = nullptr;  // [B, ceil(V / 32)]: bit i % 32 of word i / 32 allows token i
};

}  // namespace north_jax::megakernel
