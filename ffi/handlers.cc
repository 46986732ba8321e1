#include "ffi/handlers.h"

#include <cstddef>
#include <cstdint>
#include <limits>

#include "csrc/kv_write.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

#ifdef NORTH_JAX_CUDA_ARCHITECTURES
#include "csrc/cuda/kv_write.h"
#endif

namespace north_jax {
namespace {

namespace ffi = ::xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;

ffi::ErrorOr<KvWrite> kv_write_operands(AnyBuffer pages, AnyBuffer k, AnyBuffer v, AnyBuffer table, AnyBuffer start,
                                        AnyBuffer length, AnyBuffer out) {
    OperandCheck check("kv_write");
    const DataType dtype = pages.element_type();
    const Shape cache = shape_of(pages);  // [num_pages, 2, K, 64, d]
    const Shape chunk = shape_of(k);      // [N, T, K, d]
    const Shape ring = shape_of(table);   // [N, P]
    check.require((dtype == DataType::BF16 || dtype == DataType::F32) && cache.size() == 5 && cache[1] == 2 &&
                      cache[3] == kPageTokens,
                  "pages", pages, "BF16 or F32 [num_pages, 2, K, 64, d]");
    check.require(chunk.size() == 4, "k", k, "[N, T, K, d]");
    check.require(ring.size() == 2 && ring[1] > 0, "table", table, "[N, P] with P > 0");
    if (check.failed()) return check.error();

    const int64_t rows = chunk[0], tokens = chunk[1], kv_heads = cache[2], head_dim = cache[4];
    check.require("k", k, dtype, {rows, tokens, kv_heads, head_dim});
    check.require("v", v, dtype, {rows, tokens, kv_heads, head_dim});
    check.require("table", table, DataType::S32, {rows, ring[1]});
    check.require("start", start, DataType::S32, {rows});
    check.require("length", length, DataType::S32, {rows});
    check.require("result", out, dtype, cache);
    check.require(out.untyped_data() == pages.untyped_data(), "the result does not share the buffer of pages");
    const int64_t row_bytes = head_dim * static_cast<int64_t>(ffi::ByteWidth(dtype));
    for (const int64_t size : {cache[0], rows, tokens, ring[1], 2 * kv_heads * row_bytes}) {
        check.require(size <= std::numeric_limits<int32_t>::max(), "a size exceeds 32 bits: " + std::to_string(size));
    }
    if (check.failed()) return check.error();

    KvWrite op;
    op.pages = static_cast<std::byte*>(out.untyped_data());
    op.k = static_cast<const std::byte*>(k.untyped_data());
    op.v = static_cast<const std::byte*>(v.untyped_data());
    op.table = static_cast<const int32_t*>(table.untyped_data());
    op.start = static_cast<const int32_t*>(start.untyped_data());
    op.length = static_cast<const int32_t*>(length.untyped_data());
    op.num_pages = static_cast<int32_t>(cache[0]);
    op.kv_heads = static_cast<int32_t>(kv_heads);
    op.rows = static_cast<int32_t>(rows);
    op.tokens = static_cast<int32_t>(tokens);
    op.entries = static_cast<int32_t>(ring[1]);
    op.row_bytes = static_cast<int32_t>(row_bytes);
    return op;
}

ffi::Error kv_write_on_cpu(AnyBuffer pages, AnyBuffer k, AnyBuffer v, AnyBuffer table, AnyBuffer start,
                           AnyBuffer length, ffi::Result<AnyBuffer> out) {
    const auto op = kv_write_operands(pages, k, v, table, start, length, *out);
    if (op.has_error()) return op.error();
    kv_write_cpu(*op);
    return ffi::Error::Success();
}

}  // namespace

XLA_FFI_Error* KvWriteCpu(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, kv_write_on_cpu,
                           ffi::Ffi::Bind()
                               .Arg<AnyBuffer>()    // pages
                               .Arg<AnyBuffer>()    // k
                               .Arg<AnyBuffer>()    // v
                               .Arg<AnyBuffer>()    // table
                               .Arg<AnyBuffer>()    // start
                               .Arg<AnyBuffer>()    // length
                               .Ret<AnyBuffer>());  // pages
    return handler(frame);
}

#ifdef NORTH_JAX_CUDA_ARCHITECTURES

namespace {

ffi::Error kv_write_on_cuda(cudaStream_t stream, AnyBuffer pages, AnyBuffer k, AnyBuffer v, AnyBuffer table,
                            AnyBuffer start, AnyBuffer length, ffi::Result<AnyBuffer> out) {
    const auto op = kv_write_operands(pages, k, v, table, start, length, *out);
    if (op.has_error()) return op.error();
    const cudaError_t status = kv_write_cuda(*op, stream);
    if (status != cudaSuccess) return ffi::Error::Internal(std::string("kv_write: ") + cudaGetErrorString(status));
    return ffi::Error::Success();
}

}  // namespace

XLA_FFI_Error* KvWriteCuda(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(handler, kv_write_on_cuda,
                           ffi::Ffi::Bind()
                               .Ctx<ffi::PlatformStream<cudaStream_t>>()
                               .Arg<AnyBuffer>()    // pages
                               .Arg<AnyBuffer>()    // k
                               .Arg<AnyBuffer>()    // v
                               .Arg<AnyBuffer>()    // table
                               .Arg<AnyBuffer>()    // start
                               .Arg<AnyBuffer>()    // length
                               .Ret<AnyBuffer>());  // pages
    return handler(frame);
}

#endif

}  // namespace north_jax
