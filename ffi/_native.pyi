# The compiled module (ffi/module.cc).

cuda_architectures: str  # such as "sm_90a", separated by spaces; "" without CUDA kernels

def handlers() -> dict[str, dict[str, object]]: ...  # platform, as jax.ffi spells it -> target -> capsule
