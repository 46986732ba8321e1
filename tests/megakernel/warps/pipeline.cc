// Runs a quantum of the pipelined kernel on a CPU: test_emulated_kernel.py builds this and writes its input. With
// races.cc beside it, it looks for races; a second name is that of a mistake (fibers::planted).
//
//   pipeline IN OUT [MISTAKE]
#include "csrc/megakernel/pipeline/kernel.cu"
#include "csrc/megakernel/pipeline/names.cuh"
#include "quantum.h"

namespace {

pipeline::Layout layout;  // of the launch

// The name of what lies at an address of a block's shared memory.
std::string name_of_place(const fibers::Block& block, const void* at) {
    const auto& s = *reinterpret_cast<const pipeline::Shared*>(block.memory);
    const std::string barrier = pipeline::barrier_name(s, static_cast<const uint64_t*>(at));
    if (!barrier.empty()) return barrier;
    const pipeline::Memory m(block.memory, layout);
    const auto* begin = block.memory;
    // From each on to the next one.
    const std::pair<const char*, const void*> regions[] = {
        {"barriers", &s},
        {"tasks", s.task},
        {"keys", s.keys},
        {"patience", &s.patience},
        {"words of the quantum", &s.words},
        {"task_of_warp", s.task_of_warp},
        {"step", &s.step},
        {"words of the quantum", &s.counter_origin},
        {"scores", s.scores},
        {"self_score", s.self_score},
        {"norm_sums", s.norm_sums},
        {"best", s.best},
        {"routing", s.routing},
        {"combined", s.combined},
        {"attention_items", s.attention_items},
        {"live_rows", &s.live_rows},
        {"decision", &s.decision},
        {"ended", &s.ended},
        {"aborted", const_cast<const bool*>(&s.aborted)},
        {"rotation", m.rotation},
        {"rows", m.rows},
        {"pages_of_rows", m.pages_of_rows},
        {"splits", m.splits},
        {"pages", begin + m.pages},
        {"input", begin + m.input},
        {"stages", begin + m.stages},
        {"sums", m.sums},
    };
    const char* name = "";
    for (const auto& [region, first] : regions) {
        if (first <= at) name = region;
    }
    return name;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) return 2;
    if (argc == 4) fibers::planted = argv[3];
    Input input(argv[1]);
    if (const std::string reason = input.refused(); !reason.empty()) {
        std::fprintf(stderr, "the pipelined kernel does not run %s\n", reason.c_str());
        return 4;
    }
    const auto tasks = pipeline::pipeline_tasks(input.lists, input.model);
    const DevicePlan plan =
        input.plan(input.model.weights.data(), input.model.frequencies.data(), tasks.data(), input.lists.begin.data());
    DeviceBatch batch =
        input.batch(input.rows.data(), input.full_table.data(), input.sliding_table.data(), input.workspace.data());
    for (int i = 0; i < input.model.geometry.layers; ++i) batch.pools[i] = input.pool(i, input.pools[i].data());
    const auto& needs = input.lists.counter_needs;
    const WordLayout word_layout{static_cast<int64_t>(needs.size()), input.queues};
    std::vector<uint32_t> memory(word_layout.words());
    std::fill_n(memory.begin(), word_layout.counter_words(), input.quantum.counter_origin);
    const DeviceWords words = word_layout.in(memory.data());
    const auto channel = std::make_unique<Channel>();
    channel->stop = input.stop;
    DeviceFault fault{};

    fibers::seed = input.seed;
    fibers::shared_memory = static_cast<int>(input.shared_memory);
    fibers::limit_ns = 100 * input.quantum.timeout_ns + 1'000'000'000;
    fibers::name_of_warp = pipeline::role_name;
    fibers::name_of_place = name_of_place;
    fibers::invoke = [](void** a) {
        layout = *static_cast<pipeline::Layout*>(a[6]);
        pipeline::decode_kernel(*static_cast<DevicePlan*>(a[0]), *static_cast<DeviceWords*>(a[1]),
                                *static_cast<DeviceBatch*>(a[2]), *static_cast<Channel**>(a[3]),
                                *static_cast<DeviceFault**>(a[4]), *static_cast<Quantum*>(a[5]),
                                *static_cast<pipeline::Layout*>(a[6]));
    };
    const cudaError_t status =
        launch_pipelined(plan, words, batch, channel.get(), &fault, input.quantum, cudaStream_t{});
    if (status != cudaSuccess || channel->finished != input.quantum.number) {
        std::fprintf(stderr, "status %d, finished %u\n", status, channel->finished);
        return 5;
    }
    // In a step that came to its end every counter has got what it needs.
    if (fault.kind == DeviceFault::kNone) {
        for (size_t i = 0; i < needs.size(); ++i) {
            const uint32_t steps = *words.decision / 2;
            const uint32_t arrivals = *counter_at(words.counters, i) - input.quantum.counter_origin;
            if (arrivals == steps * needs[i]) continue;
            std::fprintf(stderr, "counter %zu has %u arrivals, not %u steps of %d\n", i, arrivals, steps, needs[i]);
            return 6;
        }
    }
    write_result(argv[2], input, *channel, fault);
    return 0;
}
