// What a decode engine has on one platform: the memory that a running quantum and the host both see, and its launches.
#pragma once

#include <memory>
#include <string>

#include "csrc/megakernel/channel.h"
#include "csrc/megakernel/plan.h"

namespace north_jax {

class DecodePlatform {
   public:
    virtual ~DecodePlatform() = default;

    virtual megakernel::Channel& channel() = 0;

    // Makes ready to run these lists, which were found sound. They outlive the platform.
    virtual void prepare(const megakernel::TaskLists&) {}

    // Whether a quantum that was launched has not ended. Where calls run to their end, none is ever left.
    virtual bool busy() const { return false; }

    // What a launched quantum reported of a fault, "" for nothing. Where calls run to their end, they report
    // themselves.
    virtual std::string report() const { return ""; }
};

std::unique_ptr<DecodePlatform> make_cpu_platform();

}  // namespace north_jax
