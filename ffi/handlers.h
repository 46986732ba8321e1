// The XLA FFI handlers: XLA's buffers in, checked, and a call into csrc.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace north_jax {

XLA_FFI_Error* KvWriteCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* DecodeCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MoeGateUpCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MoeDownCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* WarpDecodeCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* GroupedMatmulCpu(XLA_FFI_CallFrame* frame);

#ifdef NORTH_JAX_CUDA_ARCHITECTURES
XLA_FFI_Error* KvWriteCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* DecodeCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MoeGateUpCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MoeDownCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* WarpDecodeCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* GroupedMatmulCuda(XLA_FFI_CallFrame* frame);
#endif

// How often a handler of warp_decode.cc has been called by the host. A CUDA graph that XLA has recorded calls none.
int64_t warp_decode_calls();

}  // namespace north_jax
