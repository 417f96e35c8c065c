// Interval masks: key j is visible to the rows [start_j, end_j).
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "bits.cuh"
#include "cuda/arch/fragment.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// Rows [begin, end) of a sequence.
struct RowRange {
    int begin, end;
    __device__ bool empty() const { return begin >= end; }
};

// Offset of the interval of a sequence's first key for one head; add `key * col_stride`. Head: int or QueryHead.
template <typename Head>
__device__ __forceinline__ int64_t interval_offset(const IntervalView& view, const Sequence& s, const Head& head,
                                                   int64_t heads) {
    return (view.batches > 1 ? s.batch * view.batch_stride : 0) +
           shared_head(head, heads, view.heads) * view.head_stride + s.first_key * view.col_stride;
}

// Rows that see a key of the sequence, by its interval and by causality.
__device__ __forceinline__ RowRange rows_of_key(const AttentionParams& p, const Sequence& s, int64_t offset, int key) {
    const int64_t at = offset + key * p.intervals.col_stride;
    const int begin = p.is_causal ? s.causal_begin(key) : 0;
    return {max(min(p.intervals.start[at], s.rows), begin), max(min(p.intervals.end[at], s.rows), 0)};
}

// The key intervals of an n_block, one key per lane, split among the warps of kThreads threads. Fetched early, then
// expanded to mask bits.
template <int kThreads, int kWords>
class BlockIntervals {
public:
    // Fetches the intervals of the keys from first_key on.
    __device__ __forceinline__ void fetch(const AttentionParams& p, const Sequence& s, int head, int first_key) {
        const int64_t offset = interval_offset(p.intervals, s, head, p.heads);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int key = first_key + word(i) * 32 + lane_id();
            rows_[i] = key < s.keys && exists(i) ? rows_of_key(p, s, offset, key) : RowRange{0, 0};
        }
    }

    // Writes the mask bits: bit j % 32 of to[r][j / 32] is 1 where row r sees key j. Row r of the m_block is row
    // (first_row + r) / pack of the sequence. All warps take part.
    template <int kRows>
    __device__ __forceinline__ void expand(uint32_t (&to)[kRows][kWords], int first_row, int pack) const {
        constexpr int kTimes = ceil_div(kRows, kParts * 32);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (!exists(i)) continue;
            uint32_t seen[kTimes];  // transposed together, to overlap their latencies
#pragma unroll
            for (int t = 0; t < kTimes; ++t) {
                const int above = first_row + row(i, t);
                seen[t] = bits_between(rows_[i].begin * pack - above, rows_[i].end * pack - above, 0);
            }
            transpose_bits(seen);
#pragma unroll
            for (int t = 0; t < kTimes; ++t)
                if (row(i, t) + lane_id() < kRows) to[row(i, t) + lane_id()][word(i)] = seen[t];
        }
    }

private:
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kParts = kWarps > kWords ? kWarps / kWords : 1;  // row parts per word of keys
    static constexpr int kOwn = ceil_div(kWords * kParts, kWarps);        // parts per warp

    __device__ static int part(int i) { return warp_id() + i * kWarps; }
    __device__ static bool exists(int i) { return part(i) < kWords * kParts; }
    __device__ static int word(int i) { return part(i) % kWords; }
    __device__ static int row(int i, int time) { return (part(i) / kWords + time * kParts) * 32; }

    RowRange rows_[kOwn];
};

// Copies the (start, end) intervals of kKeys keys to shared memory by cp.async; the caller commits. Skips keys beyond
// the sequence. `offset` is that of the sequence's first key.
template <int kKeys>
__device__ __forceinline__ void load_intervals(uint32_t to, const AttentionParams& p, const Sequence& s, int64_t offset,
                                               int first_key) {
    const int key = first_key + threadIdx.x;
    if (threadIdx.x >= kKeys || key >= s.keys) return;
    const int64_t at = offset + key * p.intervals.col_stride;
    cp_async<4>(to + threadIdx.x * 8, p.intervals.start + at);
    cp_async<4>(to + threadIdx.x * 8 + 4, p.intervals.end + at);
}

// Which of 32 keys a row sees by their intervals. Only this lane's keys of an accumulator fragment are tested; the bits
// of the others are 0.
__device__ __forceinline__ uint32_t visible_key_bits(const int2* intervals, int row) {
    const int first_key = opaque(fragment_col());  // keeps its multiples out of registers across the caller's loop
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
