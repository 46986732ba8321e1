// north_jax.decode on the CPU: the call runs its quantum to the end.
#include <string>

#include "csrc/reference/executor.h"
#include "ffi/decode_call.h"
#include "ffi/handlers.h"

namespace north_jax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error decode_on_cpu(ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t engine_id) {
    return decode_call(
        engine_id, operands, results, [](DecodeEngine& engine, const Quantum& quantum, const megakernel::Batch& batch) {
            return megakernel::run_quantum(engine.model(), *quantum.lists, batch, engine.platform().channel(),
                                           quantum.number, quantum.steps, quantum.options);
        });
}

}  // namespace

XLA_FFI_Error* DecodeCpu(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, decode_on_cpu,
                           ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("engine"));
    return handler(frame);
}

}  // namespace north_jax
