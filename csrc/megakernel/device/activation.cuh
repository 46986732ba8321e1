// What hidden units do to the products of their gate and up rows.
#pragma once

namespace north_jax::megakernel {

__device__ inline float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// 2^x, in one instruction.
__device__ inline float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// By the fast instructions, within a few units of the last place of float32: for what bfloat16 holds next.
__device__ inline float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ inline float fast_swiglu(float gate, float up) { return gate * fast_sigmoid(gate) * up; }

}  // namespace north_jax::megakernel
