#pragma once

#include <cuda_runtime_api.h>

#include "csrc/kv_write.h"

namespace north_jax {

// Enqueues the write on `stream`. `op` holds device addresses.
cudaError_t kv_write_cuda(const KvWrite& op, cudaStream_t stream);

}  // namespace north_jax
