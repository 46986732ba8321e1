// The Python module ffi._native: the handlers as capsules, and what was compiled.
#include <nanobind/nanobind.h>

#include "ffi/bindings.h"
#include "ffi/handlers.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

// Platform, as JAX spells it when targets are registered -> target -> handler.
nb::dict handlers() {
    nb::dict by_platform;
    nb::dict cpu;
    cpu["north_jax.kv_write"] = capsule(north_jax::KvWriteCpu);
    cpu["north_jax.decode"] = capsule(north_jax::DecodeCpu);
    cpu["north_jax.moe_gate_up"] = capsule(north_jax::MoeGateUpCpu);
    cpu["north_jax.moe_down"] = capsule(north_jax::MoeDownCpu);
    cpu["north_jax.warp_decode"] = capsule(north_jax::WarpDecodeCpu);
    cpu["north_jax.grouped_matmul"] = capsule(north_jax::GroupedMatmulCpu);
    by_platform["cpu"] = cpu;
#ifdef NORTH_JAX_CUDA_ARCHITECTURES
    nb::dict cuda;
    cuda["north_jax.kv_write"] = capsule(north_jax::KvWriteCuda);
    cuda["north_jax.decode"] = capsule(north_jax::DecodeCuda);
    cuda["north_jax.moe_gate_up"] = capsule(north_jax::MoeGateUpCuda);
    cuda["north_jax.moe_down"] = capsule(north_jax::MoeDownCuda);
    cuda["north_jax.warp_decode"] = capsule(north_jax::WarpDecodeCuda);
    cuda["north_jax.grouped_matmul"] = capsule(north_jax::GroupedMatmulCuda);
    by_platform["CUDA"] = cuda;
#endif
    return by_platform;
}

}  // namespace

NB_MODULE(_native, module) {
    module.def("handlers", &handlers);
    module.def("warp_decode_calls", &north_jax::warp_decode_calls);
    north_jax::bind_abi(module);
    north_jax::bind_decode_engine(module);
    north_jax::bind_division(module);
#ifdef NORTH_JAX_TRACE
    north_jax::bind_trace(module);
#endif
#ifdef NORTH_JAX_CUDA_ARCHITECTURES
    module.attr("cuda_architectures") = NORTH_JAX_CUDA_ARCHITECTURES;
#else
    module.attr("cuda_architectures") = "";
#endif
}
