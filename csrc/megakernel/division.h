// How dynamic work is divided: pure functions of lengths and routing that every SM evaluates alike.
//
// The same as north_jax/megakernel/division.py, which says why; tests/megakernel/test_division.py compares the two.
// Positions lie below kMaxPosition, so that no int32 here overflows.
#pragma once

#include <cstdint>

#include "csrc/host_device.h"
#include "csrc/megakernel/abi.h"

namespace north_jax::megakernel {

inline constexpr int32_t kMaxPosition = 1 << 30;

HOST_DEVICE inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
HOST_DEVICE inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
HOST_DEVICE inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// How the keys that one query sees are split.
struct Splits {
    int32_t count;
    int32_t first_page;
    int32_t pages;  // of each split,
    int32_t extra;  // and one more of so many first ones
    int32_t begin;  // first visible position
    int32_t end;    // one past the last, the query's own

    // First position of a split, and one past its last.
    HOST_DEVICE int32_t first(int32_t split) const {
        return larger(begin, (first_page + split * pages + smaller(split, extra)) * kPageTokens);
    }
    HOST_DEVICE int32_t last(int32_t split) const { return smaller(end, first(split + 1)); }
};

// Splits of a query at `position` that sees `window` keys, 0 for all: at most kMaxSplits, of whole pages, as even as
// that allows, so that no SM has more to read than another.
HOST_DEVICE inline Splits attention_splits(int32_t position, int32_t window) {
    Splits splits;
    splits.begin = window ? larger(position + 1 - window, 0) : 0;
    splits.end = position + 1;
    splits.first_page = splits.begin / kPageTokens;
    const int32_t total = ceil_div(splits.end, kPageTokens) - splits.first_page;
    splits.count = smaller(total, kMaxSplits);
    splits.pages = total / splits.count;
    splits.extra = total % splits.count;
    return splits;
}

// One split of one KV head of one row.
struct AttentionItem {
    int32_t row;
    int32_t head;
    int32_t split;
};

HOST_DEVICE inline bool is_live(const int32_t* rows, int32_t row) { return rows[row * kRowFields + ROW_REMAINING] > 0; }

// Items of one row; none where it is idle. `rows` holds the parameters of all rows, as in all of the following.
HOST_DEVICE inline int32_t attention_items_of_row(const int32_t* rows, int32_t row, int32_t kv_heads, int32_t window) {
    if (!is_live(rows, row)) return 0;
    return attention_splits(rows[row * kRowFields + ROW_POSITION], window).count * kv_heads;
}

// Items of `count` rows from `begin` on, in all.
HOST_DEVICE inline int32_t attention_item_count(const int32_t* rows, int32_t begin, int32_t count, int32_t kv_heads,
                                                int32_t window) {
    int32_t items = 0;
    for (int32_t row = begin; row < begin + count; ++row) items += attention_items_of_row(rows, row, kv_heads, window);
    return items;
}

// Item `number` of the rows from `begin` on, in order: by row, then KV head, then split. There must be such an item.
HOST_DEVICE inline AttentionItem attention_item(const int32_t* rows, int32_t begin, int32_t kv_heads, int32_t window,
                                                int32_t number) {
    int32_t row = begin;
    for (;; ++row) {
        const int32_t items = attention_items_of_row(rows, row, kv_heads, window);
        if (number < items) break;
        number -= items;
    }
    const int32_t splits = attention_splits(rows[row * kRowFields + ROW_POSITION], window).count;
    return {row, number / splits, number % splits};
}

// One tile of one active expert.
struct ExpertItem {
    int32_t rank;
    int32_t tile;
};

HOST_DEVICE inline ExpertItem expert_item(int32_t tiles, int32_t number) { return {number / tiles, number % tiles}; }

// Numbers first, first + step, … below end.
struct Dealt {
    int32_t first;
    int32_t end;
    int32_t step;
};

// The items that go to one dealer in the rounds [round_begin, round_end).
HOST_DEVICE inline Dealt dealt(int32_t items, int32_t dealer, int32_t dealers, int32_t round_begin, int32_t round_end) {
    const int64_t first = dealer + int64_t{round_begin} * dealers;
    const int64_t end = dealer + int64_t{round_end} * dealers;
    return {static_cast<int32_t>(first < items ? first : items), static_cast<int32_t>(end < items ? end : items),
            dealers};
}

}  // namespace north_jax::megakernel
