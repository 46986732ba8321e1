// In place of csrc/warp_decode/block.cuh.
#pragma once

#include "cuda_runtime.h"

namespace north_jax::warp_decode {

inline unsigned char* block_memory() { return fibers::current->warp->block->memory; }

}  // namespace north_jax::warp_decode
