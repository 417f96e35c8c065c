// Key lists, and which rows see a listed key.
#pragma once

#include "sequence.cuh"
#include "tile_scan.cuh"

namespace flash_dmattn::cuda {

// The rows that see a key: [begin, end), and of them only those whose bit is set, where there are bits.
struct SeeingRows {
    int begin;
    int end;
    const uint32_t* bits;  // the first is row `first_bit`, or null
    int first_bit;

    // Bit i: whether row first + i sees the key. Where there are bits, `first` is one of their rows.
    __device__ __forceinline__ uint32_t from(int first) const {
        uint32_t rows = bits_below(end - first, 0) & ~bits_below(begin - first, 0);
        if (bits != nullptr) {
            const int at = first - first_bit, word = at / 32, last = KeyListsView::kRows / 32 - 1;
            rows &= __funnelshift_r(bits[word], bits[min(word + 1, last)], at);
        }
        return rows;
    }
};

// The list of keys that a tile of query rows goes by.
struct KeyList {
    static constexpr int kWords = KeyListsView::kRows / 32;
    static_assert(kWords == 4, "copied as 16 bytes");

    const int32_t* keys;  // [size]: places in the sequence, -1 where there is none
    int size;             // a multiple of KeyListsView::kAlign
    int first_row;        // of the list's tile
    const uint32_t* rows;    // of the list's keys, or null
    const int32_t* start;    // of the sequence's keys, or null
    const int32_t* end;
    int64_t col_stride;

    // Of query head `head` and row `row` of the sequence.
    __device__ KeyList(const AttentionParams& p, const Sequence& s, int head, int row) {
        const KeyListsView& lists = p.lists;
        const int64_t tile = lists.row_tiles > 1 ? row / KeyListsView::kRows : 0;
        const int64_t batch = lists.batches > 1 ? s.batch : 0;
        const int64_t list = (batch * lists.heads + shared_head(head, p.heads, lists.heads)) * lists.row_tiles + tile;
        const int64_t first = lists.starts[list];
        keys = lists.keys + first;
        size = static_cast<int>(lists.starts[list + 1] - first);
        first_row = static_cast<int>(tile * KeyListsView::kRows);
        start = end = nullptr;
        rows = nullptr;
        col_stride = p.intervals.col_stride;
        if (p.intervals.start != nullptr) {
            const int64_t offset = (p.intervals.batches > 1 ? s.batch * p.intervals.batch_stride : 0) +
                                   shared_head(head, p.heads, p.intervals.heads) * p.intervals.head_stride +
                                   s.first_key * col_stride;
            start = p.intervals.start + offset;
            end = p.intervals.end + offset;
        } else if (lists.rows != nullptr && !lists.rows_alike) {
            rows = lists.rows + first * kWords;
        }
    }

    // Starts to copy keys[at] to shared memory.
    __device__ __forceinline__ void fetch_key(int& to, int at) const {
        if (at < size) {
            cp_async<4>(smem_address(&to), keys + at);
        } else {
            to = -1;
        }
    }

    // Starts to copy what memory says of the rows that see keys[at], which is `key`, to shared memory: 16 bytes, an interval
    // or bits.
    __device__ __forceinline__ void fetch(uint32_t (&to)[kWords], int at, int key) const {
        if (start != nullptr) {
            cp_async<4>(smem_address(to), start + key * col_stride);
            cp_async<4>(smem_address(to + 1), end + key * col_stride);
        } else if (rows != nullptr) {
            cp_async<16>(smem_address(to), rows + static_cast<int64_t>(at) * kWords);
        }
    }
    // The same, once it has come, together with causality and length.
    __device__ __forceinline__ SeeingRows seeing(const uint32_t (&fetched)[kWords], int key, const Sequence& s,
                                                 bool is_causal) const {
        SeeingRows seeing{is_causal ? s.causal_begin(key) : 0, s.rows, nullptr, first_row};
        if (start != nullptr) {
            seeing.begin = max(seeing.begin, static_cast<int>(fetched[0]));
            seeing.end = min(seeing.end, static_cast<int>(fetched[1]));
        } else if (rows != nullptr) {
            seeing.bits = fetched;
        }
        return seeing;
    }
};

}  // namespace flash_dmattn::cuda
