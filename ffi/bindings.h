// The parts of the Python module ffi._native.
#pragma once

#include <nanobind/nanobind.h>

namespace north_jax {

void bind_decode_engine(nanobind::module_& module);
void bind_abi(nanobind::module_& module);       // the constants that the module was compiled with
void bind_division(nanobind::module_& module);  // _native.division, for tests
void bind_trace(nanobind::module_& module);     // in builds with NORTH_JAX_TRACE

}  // namespace north_jax
