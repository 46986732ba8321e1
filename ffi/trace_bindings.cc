// Traces of the pipelined kernel (csrc/megakernel/pipeline/trace.h), in builds with NORTH_JAX_TRACE.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/megakernel/pipeline/trace.h"
#include "ffi/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace north_jax {
namespace {

void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(std::string("tracing: ") + cudaGetErrorString(status));
}

nb::bytes trace_end(int sms, int events) {
    std::vector<megakernel::TraceEvent> recorded;
    check(megakernel::trace_end(sms, events, &recorded));
    return nb::bytes(recorded.data(), recorded.size() * sizeof(megakernel::TraceEvent));
}

}  // namespace

void bind_trace(nb::module_& module) {
    module.def(
        "trace_begin", [](int step, int events) { check(megakernel::trace_begin(step, events)); }, "step"_a,
        "events"_a);
    module.def("trace_end", &trace_end, "sms"_a, "events"_a);
    module.def("trace_warps", &megakernel::trace_warps);
    module.def("trace_barriers", &megakernel::trace_barriers);
}

}  // namespace north_jax
