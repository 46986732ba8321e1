// A quantum of the pipelined kernel as files hold it (test_emulated_kernel.py writes them): read, and what it leaves
// written again.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "arrays.h"
#include "csrc/megakernel/launch.h"
#include "csrc/megakernel/pipeline/limits.h"
#include "csrc/megakernel/pipeline/tasks.h"

using namespace north_jax::megakernel;

inline Geometry geometry_of(const std::vector<int32_t>& sizes, const std::vector<float>& reals) {
    Geometry g{};
    int32_t* const to[] = {&g.hidden,       &g.layers,      &g.heads,   &g.kv_heads, &g.head_dim,
                           &g.expert_width, &g.dense_width, &g.experts, &g.top_k,    &g.vocabulary};
    for (int i = 0; i < 10; ++i) *to[i] = sizes[i];
    g.layer_norm = sizes[10], g.softmax_router = sizes[11], g.renormalise = sizes[12];
    g.norm_eps = reals[0], g.logit_scale = reals[1];
    return g;
}

struct Input {
    int64_t seed = 0, shared_memory = 0, queues = 0;  // shared memory: bytes of an SM's
    bool stop = false;                                // whether the host says stop
    Quantum quantum{};
    Model model{};
    TaskLists lists;
    std::vector<int32_t> rows, full_table, sliding_table;
    std::vector<std::vector<uint4>> weights, pools;  // aligned as on a GPU
    std::vector<uint4> workspace;                    // NaN where nobody has written; the histograms are zeros

    explicit Input(const char* path) {
        std::ifstream in(path, std::ios::binary);
        const auto sizes = read<int32_t>(in);
        const auto reals = read<float>(in);
        // Batch, steps, seed, nanoseconds of a wait, bytes of an SM's shared memory, queues, bytes of the workspace,
        // whether the host says stop, origin of the counters.
        const auto options = read<int64_t>(in);
        model.geometry = geometry_of(sizes, reals);
        model.type = Type::kBFloat16;
        lists.batch = static_cast<int32_t>(options[0]);
        lists.tasks = read<int32_t>(in);
        lists.begin = read<int32_t>(in);
        lists.counter_needs = read<int32_t>(in);
        const auto places = read<int64_t>(in);
        for (int i = 0; i < kBufferCount; ++i) {
            const int64_t* place = &places[4 * i];
            lists.buffers[i] = {place[0], place[1], static_cast<int32_t>(place[2]), static_cast<int32_t>(place[3])};
        }
        rows = read<int32_t>(in);
        full_table = read<int32_t>(in);
        sliding_table = read<int32_t>(in);
        model.frequencies = read<float>(in);
        const auto shapes = read<int64_t>(in);  // of the weights: rows, columns
        for (size_t i = 0; i < shapes.size(); i += 2) {
            weights.push_back(read<uint4>(in));
            model.weights.push_back({weights.back().data(), shapes[i], shapes[i + 1]});
        }
        for (int layer = 0; layer < model.geometry.layers; ++layer) pools.push_back(read<uint4>(in));
        quantum = {1, static_cast<int32_t>(options[1]), static_cast<uint64_t>(options[3]),
                   static_cast<uint32_t>(options[8])};
        seed = options[2], shared_memory = options[4], queues = options[5], stop = options[7] != 0;
        workspace.assign(options[6] / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
        const BufferPlace& search = lists.buffers[BUFFER_SEARCH];
        std::memset(reinterpret_cast<std::byte*>(workspace.data()) + search.offset, 0, search.plane_bytes);
    }

    // "" or why the pipelined kernel does not run it.
    std::string refused() const { return pipeline::refuse(model.geometry, model.type, lists); }

    // The plan, of what lies where the kernel runs.
    DevicePlan plan(const WeightMatrix* weight_table, const float* frequencies, const PipelineTask* tasks,
                    const int32_t* begin) const {
        DevicePlan plan{};
        plan.geometry = model.geometry;
        plan.type = model.type;
        plan.weights = weight_table;
        plan.frequencies = frequencies;
        plan.pipeline_tasks = tasks;
        plan.begin = begin;
        for (int i = 0; i < kBufferCount; ++i) plan.buffers[i] = lists.buffers[i];
        plan.sms = lists.sms();
        plan.batch = lists.batch;
        plan.pipelined = true;
        plan.window = pipeline::window_of(lists);
        return plan;
    }

    // The batch without its pools, of what lies where the kernel runs.
    DeviceBatch batch(int32_t* at_rows, const int32_t* full, const int32_t* sliding, void* at_workspace) const {
        DeviceBatch batch{};
        batch.rows = at_rows;
        batch.full_table = full;
        batch.sliding_table = sliding;
        batch.full_entries = static_cast<int32_t>(full_table.size()) / lists.batch;
        batch.sliding_entries = static_cast<int32_t>(sliding_table.size()) / lists.batch;
        batch.workspace = static_cast<std::byte*>(at_workspace);
        return batch;
    }

    Pool pool(int layer, void* data) const {
        const Geometry& g = model.geometry;
        const int64_t page_bytes = int64_t{2} * g.kv_heads * kPageTokens * g.head_dim * 2;
        return {data, static_cast<int32_t>(pools[layer].size() * 16 / page_bytes)};
    }
};

// Rows, logits, ring entries, the fault, and the pages of each layer.
inline void write_result(const char* path, const Input& input, const Channel& channel, const DeviceFault& fault) {
    std::ofstream out(path, std::ios::binary);
    const auto* workspace = reinterpret_cast<const std::byte*>(input.workspace.data());
    write(out, input.rows.data(), input.rows.size());
    write(out, workspace + input.lists.buffers[BUFFER_LOGITS].offset,
          int64_t{input.lists.batch} * input.model.geometry.vocabulary * 4);
    write(out, channel.ring, channel.written);
    write(out, &fault, 1);
    for (const auto& pool : input.pools) write(out, pool.data(), pool.size());
}
