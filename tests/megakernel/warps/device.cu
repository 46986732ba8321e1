// Runs a quantum on a GPU, without Python: for compute-sanitizer and profilers. By the pipelined kernel, or the plain
// one where that does not run the lists, as an engine does.
//
//   device IN OUT
#include <cuda_runtime.h>

#include "quantum.h"

namespace {

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(5);
}

template <class T>
T* on_device(const std::vector<T>& from) {
    T* to = nullptr;
    check(cudaMalloc(&to, std::max<size_t>(from.size() * sizeof(T), 16)), "memory");
    check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "a copy");
    return to;
}

template <class T>
void from_device(std::vector<T>& to, const void* from) {
    check(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost), "a copy");
}

template <class T>
T* mapped() {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocMapped), "mapped memory");
    return new (memory) T{};
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    Input input(argv[1]);
    const bool pipelined = input.refused().empty();
    for (size_t i = 0; i < input.weights.size(); ++i) input.model.weights[i].data = on_device(input.weights[i]);
    DevicePlan plan = input.plan(on_device(input.model.weights), on_device(input.model.frequencies),
                                 pipelined ? on_device(pipeline::pipeline_tasks(input.lists, input.model)) : nullptr,
                                 on_device(input.lists.begin));
    plan.pipelined = pipelined;
    plan.tasks = pipelined ? nullptr : on_device(input.lists.tasks);
    DeviceBatch batch = input.batch(on_device(input.rows), on_device(input.full_table), on_device(input.sliding_table),
                                    on_device(input.workspace));
    for (int i = 0; i < input.model.geometry.layers; ++i) batch.pools[i] = input.pool(i, on_device(input.pools[i]));
    const WordLayout layout{static_cast<int64_t>(input.lists.counter_needs.size()), input.queues};
    uint32_t* memory = on_device(std::vector<uint32_t>(layout.words()));
    auto* channel = mapped<Channel>();
    auto* fault = mapped<DeviceFault>();
    channel->stop = input.stop;
    check(reset_words(memory, layout, input.quantum.counter_origin, nullptr), "words");
    const auto launch = pipelined ? launch_pipelined : launch_plain;
    check(launch(plan, layout.in(memory), batch, channel, fault, input.quantum, nullptr), "the launch");
    check(cudaDeviceSynchronize(), "the kernel");
    from_device(input.rows, batch.rows);
    from_device(input.workspace, batch.workspace);
    for (size_t i = 0; i < input.pools.size(); ++i) from_device(input.pools[i], batch.pools[i].data);
    write_result(argv[2], input, *channel, *fault);
    if (fault->kind != DeviceFault::kNone) {
        std::fprintf(stderr, "fault %d of SM %d, role %d, task %d\n", static_cast<int>(fault->kind), fault->sm,
                     fault->role, fault->task);
        return 7;
    }
    return channel->finished == input.quantum.number ? 0 : 6;
}
