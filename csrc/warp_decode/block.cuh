// The shared memory that a launch gives to each block.
#pragma once

namespace north_jax::warp_decode {

extern __shared__ __align__(128) unsigned char memory_of_block[];

__device__ __forceinline__ unsigned char* block_memory() { return memory_of_block; }

}  // namespace north_jax::warp_decode
