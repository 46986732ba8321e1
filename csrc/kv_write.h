// kv_write: append this chunk's K and V rows to the pages of the KV cache, in place.
//
// Shared by the C++ and the CUDA form: the operands, and where a token's rows go.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/host_device.h"

namespace north_jax {

inline constexpr int kPageTokens = 64;

// Elements are opaque: one head's row of d elements is `row_bytes` bytes, whatever its type.
struct KvWrite {
    std::byte* pages;       // [num_pages, 2 (k, v), kv_heads, kPageTokens, row_bytes]
    const std::byte* k;     // [rows, tokens, kv_heads, row_bytes]
    const std::byte* v;     // as k
    const int32_t* table;   // [rows, entries]: page numbers, -1 for none
    const int32_t* start;   // [rows]: position of a row's first token
    const int32_t* length;  // [rows]: tokens to write, 0 for an idle row
    int32_t num_pages;
    int32_t kv_heads;
    int32_t rows;
    int32_t tokens;
    int32_t entries;
    int32_t row_bytes;
};

// Byte offset in `pages` of the K row of head 0 for this token, or -1 if the token has no place. The rows of the other
// heads, and after them those of V, follow at a stride of kPageTokens rows.
HOST_DEVICE inline int64_t kv_write_offset(const KvWrite& op, int32_t row, int32_t token) {
    const int32_t start = op.start[row];
    if (token >= op.length[row] || start < 0) return -1;
    const uint32_t position = static_cast<uint32_t>(start) + static_cast<uint32_t>(token);
    const uint32_t entry = position / kPageTokens % static_cast<uint32_t>(op.entries);
    const int32_t page = op.table[int64_t{row} * op.entries + entry];
    if (page < 0 || page >= op.num_pages) return -1;
    return (int64_t{page} * 2 * op.kv_heads * kPageTokens + position % kPageTokens) * op.row_bytes;
}

// Writes on the calling thread.
void kv_write_cpu(const KvWrite& op);

}  // namespace north_jax
