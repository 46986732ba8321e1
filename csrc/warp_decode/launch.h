// Launches of the two kernels. Operands hold device addresses that are multiples of 16, and sizes that fit
// (operands.h).
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/warp_decode/operands.h"

namespace north_jax::warp_decode {

cudaError_t launch_gate_up(const GateUp& op, Form form, cudaStream_t stream);

// `follows`: the launch before this one on the stream is gate_up's, of which the hidden vectors are. The kernel then
// starts before that one has ended, and fetches its first weights meanwhile.
cudaError_t launch_down(const Down& op, Form form, bool follows, cudaStream_t stream);

cudaError_t launch_grouped_matmul(const GroupedMatmul& op, cudaStream_t stream);

}  // namespace north_jax::warp_decode
