#include "ffi/decode_call.h"

#include "ffi/decode_operands.h"

namespace north_jax {

namespace ffi = ::xla::ffi;

ffi::Error decode_call(int64_t engine_id, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                       const RunQuantum& run) {
    const std::string who = "north_jax.decode: ";
    const auto engine = DecodeEngine::find(engine_id);
    if (!engine) {
        return ffi::Error::InvalidArgument(who + "no engine has id " + std::to_string(engine_id) +
                                           "; it was destroyed, or is another process's");
    }
    const auto quantum = engine->begin_call();
    if (!quantum) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, who + "no quantum is queued");
    const auto batch = decode_operands(engine->model(), *quantum->lists, operands, results);
    if (batch.has_error()) {
        engine->end_call(*quantum, batch.error().message());
        return batch.error();
    }
    std::string fault;
    try {
        fault = run(*engine, *quantum, *batch);
    } catch (const std::exception& error) {  // none may pass XLA
        fault = error.what();
    }
    engine->end_call(*quantum, fault);
    return fault.empty() ? ffi::Error::Success() : ffi::Error::Internal(who + fault);
}

}  // namespace north_jax
