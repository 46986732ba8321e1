// north_jax.decode on a GPU: the call enqueues its quantum on XLA's stream and returns.
#include "ffi/decode_call.h"
#include "ffi/decode_cuda_platform.h"
#include "ffi/handlers.h"

namespace north_jax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error decode_on_cuda(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                          int64_t engine_id) {
    return decode_call(engine_id, operands, results,
                       [stream](DecodeEngine& engine, const Quantum& quantum, const megakernel::Batch& batch) {
                           auto* platform = dynamic_cast<CudaPlatform*>(&engine.platform());
                           return platform ? platform->launch(quantum, batch, stream)
                                           : std::string("the engine's weights are not on a GPU");
                       });
}

}  // namespace

XLA_FFI_Error* DecodeCuda(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(
        handler, decode_on_cuda,
        ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attr<int64_t>(
            "engine"));
    return handler(frame);
}

}  // namespace north_jax
