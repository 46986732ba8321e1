#include "ffi/decode_platform.h"

namespace north_jax {
namespace {

class CpuPlatform final : public DecodePlatform {
   public:
    megakernel::Channel& channel() override { return *channel_; }

   private:
    const std::unique_ptr<megakernel::Channel> channel_ = std::make_unique<megakernel::Channel>();
};

}  // namespace

std::unique_ptr<DecodePlatform> make_cpu_platform() { return std::make_unique<CpuPlatform>(); }

}  // namespace north_jax
