// In place of csrc/megakernel/device/block.cuh.
#pragma once

#include "cuda_runtime.h"

namespace north_jax::megakernel {

inline unsigned char* block_memory() { return fibers::current->warp->block->memory; }

}  // namespace north_jax::megakernel
