// Runs a quantum of the pipelined kernel on a CPU: test_emulated_kernel.py builds this and writes its input.
//
//   pipeline IN OUT
//
// The files are sequences of arrays (arrays.h). In: what `main` reads, in its order. Out: rows, logits, ring entries,
// the fault, and the pages of each layer.
#include "arrays.h"
#include "csrc/megakernel/pipeline/kernel.cu"
#include "csrc/megakernel/pipeline/names.cuh"
#include "csrc/megakernel/pipeline/tasks.h"

using namespace north_jax::megakernel;

namespace {

// The name of a barrier among those of a block.
std::string name_of_barrier(const fibers::Block& block, const void* at) {
    const auto& s = *reinterpret_cast<const pipeline::Shared*>(block.memory);
    const std::string name = pipeline::barrier_name(s, static_cast<const uint64_t*>(at));
    return name.empty() ? "another barrier" : name;
}

Geometry geometry_of(const std::vector<int32_t>& sizes, const std::vector<float>& reals) {
    Geometry g{};
    int32_t* const to[] = {&g.hidden,       &g.layers,      &g.heads,   &g.kv_heads, &g.head_dim,
                           &g.expert_width, &g.dense_width, &g.experts, &g.top_k,    &g.vocabulary};
    for (int i = 0; i < 10; ++i) *to[i] = sizes[i];
    g.layer_norm = sizes[10], g.softmax_router = sizes[11], g.renormalise = sizes[12];
    g.norm_eps = reals[0], g.logit_scale = reals[1];
    return g;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    std::ifstream in(argv[1], std::ios::binary);
    std::ofstream out(argv[2], std::ios::binary);
    const auto sizes = read<int32_t>(in);
    const auto reals = read<float>(in);
    // Batch, steps, seed, nanoseconds of a wait, bytes of an SM's shared memory, queues, bytes of the workspace,
    // whether the host says stop, what counters begin with.
    const auto options = read<int64_t>(in);
    Model model{geometry_of(sizes, reals), Type::kBFloat16, {}, {}};
    const Geometry& g = model.geometry;
    TaskLists lists;
    lists.batch = static_cast<int32_t>(options[0]);
    lists.tasks = read<int32_t>(in);
    lists.begin = read<int32_t>(in);
    lists.counter_needs = read<int32_t>(in);
    const auto places = read<int64_t>(in);
    for (int i = 0; i < kBufferCount; ++i) {
        const int64_t* place = &places[4 * i];
        lists.buffers[i] = {place[0], place[1], static_cast<int32_t>(place[2]), static_cast<int32_t>(place[3])};
    }
    auto rows = read<int32_t>(in);
    const auto full_table = read<int32_t>(in);
    const auto sliding_table = read<int32_t>(in);
    model.frequencies = read<float>(in);
    const auto shapes = read<int64_t>(in);    // of the weights: rows, columns
    std::vector<std::vector<uint4>> weights;  // aligned as on a GPU
    for (size_t i = 0; i < shapes.size(); i += 2) {
        weights.push_back(read<uint4>(in));
        model.weights.push_back({weights.back().data(), shapes[i], shapes[i + 1]});
    }
    std::vector<std::vector<uint4>> pools;
    for (int layer = 0; layer < g.layers; ++layer) pools.push_back(read<uint4>(in));
    if (const std::string reason = pipeline::refuse(g, model.type, lists); !reason.empty()) {
        std::fprintf(stderr, "the pipelined kernel does not run %s\n", reason.c_str());
        return 4;
    }

    // What nobody has written is NaN; the histograms alone begin with zeros.
    std::vector<uint4> workspace(options[6] / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
    DeviceBatch batch{};
    batch.rows = rows.data();
    batch.full_table = full_table.data();
    batch.sliding_table = sliding_table.data();
    batch.full_entries = static_cast<int32_t>(full_table.size()) / lists.batch;
    batch.sliding_entries = static_cast<int32_t>(sliding_table.size()) / lists.batch;
    batch.workspace = reinterpret_cast<std::byte*>(workspace.data());
    const BufferPlace& search = lists.buffers[BUFFER_SEARCH];
    std::memset(batch.workspace + search.offset, 0, search.plane_bytes);
    const int64_t page_bytes = int64_t{2} * g.kv_heads * kPageTokens * g.head_dim * 2;
    for (int layer = 0; layer < g.layers; ++layer) {
        batch.pools[layer] = {pools[layer].data(), static_cast<int32_t>(pools[layer].size() * 16 / page_bytes)};
    }

    const auto tasks = pipeline::pipeline_tasks(lists, model);
    DevicePlan plan{};
    plan.geometry = g;
    plan.type = model.type;
    plan.weights = model.weights.data();
    plan.frequencies = model.frequencies.data();
    plan.pipeline_tasks = tasks.data();
    plan.begin = lists.begin.data();
    std::copy(std::begin(lists.buffers), std::end(lists.buffers), plan.buffers);
    plan.sms = lists.sms();
    plan.batch = lists.batch;
    plan.pipelined = true;
    plan.window = pipeline::window_of(lists);
    const WordLayout layout{static_cast<int64_t>(lists.counter_needs.size()), options[5]};
    const auto origin = static_cast<uint32_t>(options[8]);
    std::vector<uint32_t> memory(layout.words());
    std::fill_n(memory.begin(), layout.counter_words(), origin);
    const DeviceWords words = layout.in(memory.data());
    const auto channel = std::make_unique<Channel>();
    channel->stop = static_cast<uint32_t>(options[7]);
    DeviceFault fault{};
    const Quantum quantum{1, static_cast<int32_t>(options[1]), static_cast<uint64_t>(options[3]), origin};

    fibers::seed = options[2];
    fibers::shared_memory = static_cast<int>(options[4]);
    fibers::limit_ns = 100 * quantum.timeout_ns + 1'000'000'000;
    fibers::name_of_warp = pipeline::role_name;
    fibers::name_of_place = name_of_barrier;
    fibers::invoke = [](void** a) {
        pipeline::decode_kernel(*static_cast<DevicePlan*>(a[0]), *static_cast<DeviceWords*>(a[1]),
                                *static_cast<DeviceBatch*>(a[2]), *static_cast<Channel**>(a[3]),
                                *static_cast<DeviceFault**>(a[4]), *static_cast<Quantum*>(a[5]),
                                *static_cast<pipeline::Layout*>(a[6]));
    };
    const cudaError_t status = launch_pipelined(plan, words, batch, channel.get(), &fault, quantum, cudaStream_t{});
    if (status != cudaSuccess || channel->finished != quantum.number) {
        std::fprintf(stderr, "status %d, finished %u\n", status, channel->finished);
        return 5;
    }
    // In a step that came to its end every counter has got what it needs.
    if (fault.kind == DeviceFault::kNone) {
        for (size_t i = 0; i < lists.counter_needs.size(); ++i) {
            const uint32_t steps = *words.decision / 2, arrivals = *counter_at(words.counters, i) - origin;
            if (arrivals == steps * lists.counter_needs[i]) continue;
            std::fprintf(stderr, "counter %zu has %u arrivals, not %u steps of %d\n", i, arrivals, steps,
                         lists.counter_needs[i]);
            return 6;
        }
    }
    write(out, rows.data(), rows.size());
    write(out, batch.workspace + lists.buffers[BUFFER_LOGITS].offset, int64_t{lists.batch} * g.vocabulary * 4);
    write(out, channel->ring, channel->written);
    write(out, &fault, 1);
    for (const auto& pool : pools) write(out, pool.data(), pool.size());
    return 0;
}
