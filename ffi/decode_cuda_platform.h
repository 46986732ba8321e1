// A decode engine's part on a GPU: the plans in device memory, the channel and the fault record in mapped host memory.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/megakernel/launch.h"
#include "ffi/decode_engine.h"
#include "ffi/decode_platform.h"

namespace north_jax {

// Memory of the current device, with a copy of host values in it. Throws std::runtime_error where it cannot be had.
class DeviceMemory {
   public:
    DeviceMemory(const void* values, size_t bytes);  // null: zeros
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

   private:
    void* data_ = nullptr;
};

// One object in pinned host memory that the device sees too, zeroed.
template <class T>
class MappedMemory {
   public:
    MappedMemory();
    ~MappedMemory();
    MappedMemory(const MappedMemory&) = delete;
    MappedMemory& operator=(const MappedMemory&) = delete;
    T* host() const { return host_; }
    T* device() const { return device_; }

   private:
    T* host_ = nullptr;
    T* device_ = nullptr;
};

class CudaPlatform final : public DecodePlatform {
   public:
    // On the device that holds the weights. Throws std::invalid_argument for a model that the kernel does not take.
    explicit CudaPlatform(const megakernel::Model& model);
    ~CudaPlatform() override;  // waits for the quanta that were launched
    bool busy() const override;

    megakernel::Channel& channel() override { return *channel_.host(); }
    void prepare(const megakernel::TaskLists& lists) override;
    std::string report() const override;

    // Enqueues a quantum; gives what kept it from that, "" for nothing.
    std::string launch(const Quantum& quantum, const megakernel::Batch& batch, cudaStream_t stream);

   private:
    struct Plan;
    class OnDevice;

    const int device_;
    mutable std::mutex mutex_;  // guards `plans_`, `lists_` and the launches
    const megakernel::Model model_;
    std::map<const megakernel::TaskLists*, std::unique_ptr<Plan>> plans_;
    std::unique_ptr<DeviceMemory> weights_, frequencies_;
    MappedMemory<megakernel::Channel> channel_;
    MappedMemory<megakernel::DeviceFault> fault_;
    cudaEvent_t launched_ = nullptr;                      // the last quantum
    std::shared_ptr<const megakernel::TaskLists> lists_;  // its lists, for the report
};

std::unique_ptr<DecodePlatform> make_cuda_platform(const megakernel::Model& model);

}  // namespace north_jax
