// Masks of intervals: which rows see a key, and which keys a row.
#pragma once

#include "bits.cuh"
#include "sequence.cuh"

namespace flash_dmattn::cuda {

// Some rows of a sequence.
struct RowRange {
    int begin, end;
    __device__ bool empty() const { return begin >= end; }
};

// Of the interval of a sequence's first key, for one head; add `key * col_stride`.
__device__ __forceinline__ int64_t interval_offset(const IntervalView& view, const Sequence& s, int head,
                                                   int64_t heads) {
    return (view.batches > 1 ? s.batch * view.batch_stride : 0) +
           shared_head(head, heads, view.heads) * view.head_stride + s.first_key * view.col_stride;
}

// The rows that see a key of the sequence, by its interval and by causality.
__device__ __forceinline__ RowRange rows_of_key(const AttentionParams& p, const Sequence& s, int64_t offset, int key) {
    const int64_t at = offset + key * p.intervals.col_stride;
    const int begin = p.is_causal ? s.causal_begin(key) : 0;
    return {max(min(p.intervals.start[at], s.rows), begin), max(min(p.intervals.end[at], s.rows), 0)};
}

// Which rows of a tile see which keys, as PackedMask has it: bit j % 32 of to[i][j / 32]. Row i of the tile is row
// (first_row + i) / pack of the sequence. All warps of the block take part.
template <int kThreads, int kRows, int kWords>
__device__ __forceinline__ void expand_intervals(uint32_t (&to)[kRows][kWords], const AttentionParams& p,
                                                 const Sequence& s, int head, int first_row, int pack, int first_key) {
    const int64_t offset = interval_offset(p.intervals, s, head, p.heads);
    constexpr int kBlocks = ceil_div(kRows, 32) * kWords;  // of 32 rows by 32 keys
#pragma unroll 1
    for (int block = warp_id(); block < kBlocks; block += kThreads / 32) {
        const int row = block / kWords * 32, word = block % kWords;
        const int key = first_key + word * 32 + lane_id();
        RowRange rows{0, 0};
        if (key < s.keys) rows = rows_of_key(p, s, offset, key);
        const int above = first_row + row;
        const uint32_t seeing = bits_below(rows.end * pack - above, 0) & ~bits_below(rows.begin * pack - above, 0);
        const uint32_t seen = transpose_bits(seeing);
        if (row + lane_id() < kRows) to[row + lane_id()][word] = seen;
    }
}

// The same, each thread reading the intervals of 32 keys: slower, but it takes no registers from a kernel that is short of
// them. full: the mask hides nothing of the tile.
template <int kThreads, int kRows, int kWords>
__device__ __forceinline__ void expand_intervals_by_row(uint32_t (&to)[kRows][kWords], const AttentionParams& p,
                                                        const Sequence& s, int head, int first_row, int first_key,
                                                        bool full) {
    static_assert(kRows % 32 == 0, "a warp's threads read the same keys");
    const int64_t offset = interval_offset(p.intervals, s, head, p.heads);
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kWords; i += kThreads) {
        const int row = i % kRows, key = first_key + i / kRows * 32;
        const int keys = full ? 0 : min(s.keys - key, 32);
        uint32_t seen = full ? ~0u : 0;
#pragma unroll 4
        for (int bit = 0; bit < keys; ++bit) {
            const int64_t at = offset + (key + bit) * p.intervals.col_stride;
            if (p.intervals.start[at] <= first_row + row && first_row + row < p.intervals.end[at]) seen |= 1u << bit;
        }
        to[row][i / kRows] = seen;
    }
}

}  // namespace flash_dmattn::cuda
