// What hidden units do to the products of their gate and up rows.
#pragma once

namespace north_jax::megakernel {

__device__ inline float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

}  // namespace north_jax::megakernel
