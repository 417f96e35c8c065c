// Masks of intervals: which rows see a key, and which keys a row sees.
#pragma once

#include "bits.cuh"
#include "fragment.cuh"
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
        uint32_t seen[1] = {bits_below(rows.end * pack - above, 0) & ~bits_below(rows.begin * pack - above, 0)};
        transpose_bits(seen);
        if (row + lane_id() < kRows) to[row + lane_id()][word] = seen[0];
    }
}

// Starts to copy the intervals of kKeys keys to shared memory, pairs of a start and an end; those of keys beyond the
// sequence's are left out. `offset` is that of the sequence's first key. cp.async, the caller commits.
template <int kKeys>
__device__ __forceinline__ void load_intervals(uint32_t to, const AttentionParams& p, const Sequence& s,
                                               int64_t offset, int first_key) {
    const int key = first_key + threadIdx.x;
    if (threadIdx.x >= kKeys || key >= s.keys) return;
    const int64_t at = offset + key * p.intervals.col_stride;
    cp_async<4>(to + threadIdx.x * 8, p.intervals.start + at);
    cp_async<4>(to + threadIdx.x * 8 + 4, p.intervals.end + at);
}

// Which of 32 keys a row sees, by their intervals; of the keys that this lane has of an accumulator (see fragment.cuh)
// alone, the bits of the others are 0.
__device__ __forceinline__ uint32_t keys_seen(const int2* intervals, int row) {
    const int first_key = kept(fragment_col());  // else its multiples take registers across the caller's loop
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int4 pair = *reinterpret_cast<const int4*>(intervals + n * 8 + first_key);
        if (pair.x <= row && row < pair.y) seen |= 1u << n * 8;
        if (pair.z <= row && row < pair.w) seen |= 2u << n * 8;
    }
    return seen << first_key;
}

}  // namespace flash_dmattn::cuda
