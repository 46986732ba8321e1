#include "ffi/decode_cuda_platform.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "csrc/megakernel/pipeline/limits.h"
#include "csrc/megakernel/pipeline/tasks.h"
#include "csrc/reference/report.h"

namespace north_jax {

using megakernel::DeviceBatch;
using megakernel::DeviceFault;
using megakernel::DevicePlan;
using megakernel::DeviceWords;
using megakernel::PipelineTask;
using megakernel::TaskLists;
using megakernel::WordLayout;

namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

int device_of(const megakernel::Model& model) {
    cudaPointerAttributes attributes;
    for (const auto& weight : model.weights) {
        if (weight.rows == 0) continue;
        check(cudaPointerGetAttributes(&attributes, weight.data), "a weight's address");
        if (attributes.type != cudaMemoryTypeDevice) throw std::invalid_argument("the weights are not on a GPU");
        return attributes.device;
    }
    throw std::invalid_argument("a model without weights");
}

template <class T>
std::unique_ptr<DeviceMemory> upload(const std::vector<T>& values) {
    return std::make_unique<DeviceMemory>(values.data(), values.size() * sizeof(T));
}

}  // namespace

// Makes the platform's device the current one, for a while.
class CudaPlatform::OnDevice {
   public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~OnDevice() { cudaSetDevice(before_); }

   private:
    int before_ = 0;
};

// Task lists on the device, and the words that their quanta synchronise through.
struct CudaPlatform::Plan {
    Plan(const TaskLists& lists, const megakernel::Model& model, bool pipelined)
        : tasks(pipelined ? upload(megakernel::pipeline::pipeline_tasks(lists, model)) : upload(lists.tasks)),
          begin(lists.begin.data(), lists.begin.size() * sizeof(int32_t)),
          layout{static_cast<int64_t>(lists.counter_needs.size()), static_cast<int64_t>(lists.queue_names.size())},
          words(nullptr, layout.words() * sizeof(uint32_t)),
          view(layout.in(words.as<uint32_t>())) {
        plan.pipelined = pipelined;
        plan.tasks = pipelined ? nullptr : tasks->as<int32_t>();
        plan.pipeline_tasks = pipelined ? tasks->as<PipelineTask>() : nullptr;
    }

    std::unique_ptr<DeviceMemory> tasks;
    DeviceMemory begin;
    WordLayout layout;
    DeviceMemory words;
    DeviceWords view;
    DevicePlan plan;
};

DeviceMemory::DeviceMemory(const void* values, size_t bytes) {
    check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "memory for the decode plan");
    cudaError_t status =
        values ? cudaMemcpy(data_, values, bytes, cudaMemcpyHostToDevice) : cudaMemset(data_, 0, bytes);
    if (status == cudaSuccess) status = cudaStreamSynchronize(nullptr);  // a copy from ordinary memory may return early
    if (status == cudaSuccess) return;
    cudaFree(data_);
    check(status, "upload of the decode plan");
}

DeviceMemory::~DeviceMemory() { cudaFree(data_); }

template <class T>
MappedMemory<T>::MappedMemory() {
    void *host = nullptr, *device = nullptr;
    check(cudaHostAlloc(&host, sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), "pinned memory");
    const cudaError_t status = cudaHostGetDevicePointer(&device, host, 0);
    if (status != cudaSuccess) cudaFreeHost(host);
    check(status, "mapped memory");
    host_ = new (host) T{};
    device_ = static_cast<T*>(device);
}

template <class T>
MappedMemory<T>::~MappedMemory() {
    cudaFreeHost(host_);
}

CudaPlatform::CudaPlatform(const megakernel::Model& model) : device_(device_of(model)), model_(model) {
    const std::string reason = megakernel::unsupported(model.geometry, 1);
    if (!reason.empty()) throw std::invalid_argument("the decode kernel does not take " + reason);
    const OnDevice current(device_);
    weights_ = upload(model.weights);
    frequencies_ = upload(model.frequencies);
    check(cudaEventCreateWithFlags(&launched_, cudaEventDisableTiming), "an event");
}

CudaPlatform::~CudaPlatform() {
    cudaEventSynchronize(launched_);
    cudaEventDestroy(launched_);
}

bool CudaPlatform::busy() const { return cudaEventQuery(launched_) == cudaErrorNotReady; }

void CudaPlatform::prepare(const TaskLists& lists) {
    const OnDevice current(device_);
    const bool pipelined = megakernel::pipeline::refuse(model_.geometry, model_.type, lists).empty();
    auto plan = std::make_unique<Plan>(lists, model_, pipelined);
    DevicePlan& view = plan->plan;
    view.geometry = model_.geometry;
    view.type = model_.type;
    view.weights = weights_->as<megakernel::WeightMatrix>();
    view.frequencies = frequencies_->as<float>();
    view.begin = plan->begin.as<int32_t>();
    std::copy(std::begin(lists.buffers), std::end(lists.buffers), view.buffers);
    view.sms = lists.sms();
    view.batch = lists.batch;
    view.window = pipelined ? megakernel::pipeline::window_of(lists) : 0;
    const std::lock_guard lock(mutex_);
    plans_[&lists] = std::move(plan);
}

std::string CudaPlatform::launch(const Quantum& quantum, const megakernel::Batch& batch, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    const Plan& plan = *plans_.at(quantum.lists.get());
    // A record that was there to be read is cleared; one that a quantum may still write is left to it.
    if (!busy()) *fault_.host() = {};
    lists_ = quantum.lists;

    DeviceBatch view = {
        batch.rows,      batch.full_table, batch.sliding_table, batch.full_entries, batch.sliding_entries,
        batch.workspace, batch.counts,     batch.biases,        batch.masks,        {}};
    std::copy(batch.pools.begin(), batch.pools.end(), view.pools);
    const uint32_t origin = quantum.options.counter_origin;
    const megakernel::Quantum run = {quantum.number, quantum.steps,
                                     static_cast<uint64_t>(quantum.options.timeout_s * 1e9), origin};
    cudaError_t status = megakernel::reset_words(plan.words.as<uint32_t>(), plan.layout, origin, stream);
    // The histograms are zero when a step begins: within a quantum SAMPLE_DRAW sees to it.
    const megakernel::BufferPlace& search = quantum.lists->buffers[megakernel::BUFFER_SEARCH];
    if (status == cudaSuccess) {
        status = cudaMemsetAsync(batch.workspace + search.offset, 0, search.plane_bytes, stream);
    }
    if (status == cudaSuccess) {
        const auto launch = plan.plan.pipelined ? megakernel::launch_pipelined : megakernel::launch_plain;
        status = launch(plan.plan, plan.view, view, channel_.device(), fault_.device(), run, stream);
    }
    if (status == cudaSuccess) status = cudaEventRecord(launched_, stream);
    return status == cudaSuccess ? "" : std::string("the launch failed: ") + cudaGetErrorString(status);
}

std::string CudaPlatform::report() const {
    const DeviceFault& fault = *fault_.host();
    const uint32_t kind = __atomic_load_n(&fault.kind, __ATOMIC_ACQUIRE);
    if (kind == DeviceFault::kNone) return "";
    const std::lock_guard lock(mutex_);
    const std::string role = plans_.at(lists_.get())->plan.pipelined
                                 ? std::string(" (") + megakernel::pipeline::kRoleNames[fault.role] + ")"
                                 : "";
    const std::string where = "in step " + std::to_string(fault.step) + " SM " + std::to_string(fault.sm) + role;
    const std::string task = fault.task < 0 ? "" : " in " + megakernel::describe(*lists_, fault.task);
    switch (kind) {
        case DeviceFault::kWait:
        case DeviceFault::kSliceWait:
            return where + task + " waited in vain for " + megakernel::describe_counter(*lists_, fault.counter) + ": " +
                   std::to_string(fault.seen) + " of " + std::to_string(fault.needed) + " arrivals";
        case DeviceFault::kUnseen:
            return where + task + " looked in vain for what has arrived at " +
                   megakernel::describe_counter(*lists_, fault.counter);
        case DeviceFault::kStepEnd:
            return where + " waited in vain for the step's end";
        case DeviceFault::kRingFull:
            return where + task + " waited in vain for room in the token ring: nobody takes its entries";
        case DeviceFault::kBlocked:
            return where + task + " waited in vain for another role of its block";
        case DeviceFault::kNoPage:
            return where + task + ": row " + std::to_string(fault.needed) + " has no page for position " +
                   std::to_string(fault.seen);
        default:
            return where + task + ": the kernel does not know this operation";
    }
}

std::unique_ptr<DecodePlatform> make_cuda_platform(const megakernel::Model& model) {
    return std::make_unique<CudaPlatform>(model);
}

}  // namespace north_jax
