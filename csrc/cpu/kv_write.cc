#include "csrc/kv_write.h"

#include <cstring>

namespace north_jax {

void kv_write_cpu(const KvWrite& op) {
    const int64_t head_stride = int64_t{kPageTokens} * op.row_bytes;
    for (int32_t row = 0; row < op.rows; ++row) {
        for (int32_t token = 0; token < op.tokens; ++token) {
            const int64_t offset = kv_write_offset(op, row, token);
            if (offset < 0) continue;
            std::byte* k_out = op.pages + offset;
            std::byte* v_out = k_out + op.kv_heads * head_stride;
            const int64_t source = (int64_t{row} * op.tokens + token) * op.kv_heads * op.row_bytes;
            for (int32_t head = 0; head < op.kv_heads; ++head) {
                const int64_t from = source + int64_t{head} * op.row_bytes;
                std::memcpy(k_out + head * head_stride, op.k + from, op.row_bytes);
                std::memcpy(v_out + head * head_stride, op.v + from, op.row_bytes);
            }
        }
    }
}

}  // namespace north_jax
