#include "csrc/cuda/kv_write.h"

namespace north_jax {
namespace {

constexpr int kThreads = 128;  // K and V of a token at head_dim 128, bf16 and 4 KV heads: 128 vectors of 16 bytes

// One block per token. Thread i moves vectors i, i + kThreads, ... of the token's 2 * kv_heads head rows (K's, then
// V's): contiguous in k and v, and contiguous within a head row of the page.
template <typename Vector>
__global__ void __launch_bounds__(kThreads) kv_write(const __grid_constant__ KvWrite op) {
    const int32_t token = blockIdx.x, row = blockIdx.y;
    const int64_t offset = kv_write_offset(op, row, token);
    if (offset < 0) return;  // the whole block: idle row, padding, or no page

    const int32_t row_vectors = op.row_bytes / static_cast<int32_t>(sizeof(Vector));
    const int32_t k_vectors = op.kv_heads * row_vectors;
    const int64_t source = (int64_t{row} * op.tokens + token) * k_vectors;
    const Vector* k = reinterpret_cast<const Vector*>(op.k) + source;
    const Vector* v = reinterpret_cast<const Vector*>(op.v) + source;
    Vector* out = reinterpret_cast<Vector*>(op.pages + offset);

    for (int32_t i = threadIdx.x; i < 2 * k_vectors; i += kThreads) {
        const int32_t head = i / row_vectors;  // [0, 2 * kv_heads)
        const int32_t column = i % row_vectors;
        const int64_t to = int64_t{head} * kPageTokens * row_vectors + column;
        out[to] = i < k_vectors ? k[i] : v[i - k_vectors];
    }
}

bool fits_16_bytes(const KvWrite& op) {
    const auto bits = reinterpret_cast<uintptr_t>(op.pages) | reinterpret_cast<uintptr_t>(op.k) |
                      reinterpret_cast<uintptr_t>(op.v) | static_cast<uintptr_t>(op.row_bytes);
    return bits % 16 == 0;
}

}  // namespace

cudaError_t kv_write_cuda(const KvWrite& op, cudaStream_t stream) {
    if (op.rows == 0 || op.tokens == 0) return cudaSuccess;  // an empty grid is a launch error
    const dim3 grid(op.tokens, op.rows);
    if (fits_16_bytes(op)) {
        kv_write<uint4><<<grid, kThreads, 0, stream>>>(op);
    } else {
        kv_write<uint16_t><<<grid, kThreads, 0, stream>>>(op);  // head sizes that are no multiple of 16 bytes
    }
    return cudaGetLastError();
}

}  // namespace north_jax
