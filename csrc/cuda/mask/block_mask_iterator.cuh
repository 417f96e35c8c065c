// Which tiles a block visits: those that the mask leaves a pair of, in ascending order.
#pragma once

#include "bits.cuh"
#include "intervals.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// What is known of a tile before any of its pairs is read. Bit j % 32 of columns[j / 32]: may a row see key j of it. Beyond the
// sequence's keys it may say anything.
template <int kKeys>
struct BlockSummary {
    static constexpr int kWords = kKeys / 32;
    bool empty;
    bool full;
    uint32_t columns[kWords];
};

__device__ __forceinline__ bool has_mask(const AttentionParams& p) {
    return p.packed_mask.bits != nullptr || p.interval_summaries.tiles != nullptr;
}

// A mask's summaries of one batch and head, read a kernel's tile at a time.
template <int kRows, int kKeys>
class MaskSummaries {
    static constexpr int kTile = PackedMask::kTile, kAcross = kKeys / kTile;
    static_assert(kKeys % kTile == 0 && kTile == IntervalBlockSummary::kKeys);

public:
    __device__ MaskSummaries(const AttentionParams& p, const Sequence& s, int head)
        : mask_(p.packed_mask), intervals_(p.interval_summaries) {
        if (mask_.bits != nullptr) {
            const int mask_head = shared_head(head, p.heads, mask_.heads);
            offset_ = shared_batch(mask_, s) * mask_.tiles_batch_stride + mask_head * mask_.tiles_head_stride;
        } else if (intervals_.tiles != nullptr) {
            const int mask_head = shared_head(head, p.heads, p.intervals.heads);
            tiles_ = intervals_.tiles + s.batch * intervals_.batch_stride + mask_head * intervals_.num_n_blocks;
        }
    }

    // Of the rows [first_row, last_row] and the keys [n_block * kKeys, (n_block + 1) * kKeys). Without a mask, and
    // before causality and lengths are asked, every pair is visible.
    __device__ BlockSummary<kKeys> of(int first_row, int last_row, int n_block) const {
        BlockSummary<kKeys> summary;
        summary.full = true;
        const bool present = mask_.bits != nullptr || intervals_.tiles != nullptr;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) summary.columns[w] = present ? 0 : ~0u;
        if (mask_.bits != nullptr) {
            const bool row_broadcast = mask_.tiles_row_stride == 0;
            const int end = row_broadcast ? 1 : last_row / kTile + 1;
            constexpr int kAtOnce = kRows > kTile ? 2 : 1;  // none of which waits for another
#pragma unroll 1
            for (int row = row_broadcast ? 0 : first_row / kTile; row < end; row += kAtOnce) {
                BlockKind kinds[kAtOnce][kAcross];
                uint64_t columns[kAtOnce][kAcross];
#pragma unroll
                for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
                    for (int k = 0; k < kAcross; ++k) {
                        const int key = n_block * kAcross + k;
                        const bool exists = row + r < end && key < mask_.num_n_blocks;
                        const int64_t at = offset_ + (row + r) * mask_.tiles_row_stride + key;
                        kinds[r][k] = exists ? mask_.kinds[at] : BlockKind::kFull;
                        columns[r][k] = exists ? mask_.columns[at] : 0;
                    }
#pragma unroll
                for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
                    for (int k = 0; k < kAcross; ++k) {
                        summary.full &= kinds[r][k] == BlockKind::kFull;
                        add_columns(summary, k, columns[r][k]);
                    }
            }
        } else if (intervals_.tiles != nullptr) {
            IntervalBlockSummary tiles[kAcross];
#pragma unroll
            for (int k = 0; k < kAcross; ++k) tiles[k] = interval_summary(n_block * kAcross + k);
#pragma unroll
            for (int k = 0; k < kAcross; ++k) {
                const IntervalBlockSummary& tile = tiles[k];
                summary.full &= tile.last_begin <= first_row && tile.first_end > last_row;
                if (tile.first_begin <= last_row && tile.last_end > first_row) add_columns(summary, k, tile.seen);
            }
        }
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) any |= summary.columns[w];
        summary.empty = any == 0;
        return summary;
    }

    // The rows among which all lie that the mask shows some of these keys; may be none. Of bits, which do not say, all rows.
    __device__ RowRange rows_of(int rows, int n_block) const {
        if (intervals_.tiles == nullptr) return {0, rows};
        RowRange range{rows, 0};
#pragma unroll
        for (int k = 0; k < kAcross; ++k) {
            const IntervalBlockSummary tile = interval_summary(n_block * kAcross + k);
            range = {min(range.begin, tile.first_begin), max(range.end, tile.last_end)};
        }
        return range;
    }

private:
    // The last one where there is none: so that of several none waits for another.
    __device__ __forceinline__ IntervalBlockSummary interval_summary(int n_block) const {
        return tiles_[min(n_block, static_cast<int>(intervals_.num_n_blocks) - 1)];
    }
    static __device__ __forceinline__ void add_columns(BlockSummary<kKeys>& summary, int tile, uint64_t columns) {
        summary.columns[2 * tile] |= static_cast<uint32_t>(columns);
        summary.columns[2 * tile + 1] |= static_cast<uint32_t>(columns >> 32);
    }

    const PackedMask& mask_;
    const IntervalSummaries& intervals_;
    int64_t offset_ = 0;                           // of a bool mask's first summary,
    const IntervalBlockSummary* tiles_ = nullptr;  // or that of intervals
};

// Looks at candidates 32 at a time, one a lane, so that the main loop waits for memory once every 32 of them. All lanes of
// a warp call together, and see the same.
struct BlockMaskIterator {
    int next;              // the first candidate that has not been looked at
    uint32_t pending = 0;  // of the 32 before it: candidates still to visit,
    uint32_t full = 0;     // and those of which the mask hides nothing

    // ask(candidate, is_empty, is_full) answers for this lane's candidate.
    template <typename Ask>
    __device__ __forceinline__ void look(int end, const Ask& ask) {
        const int candidate = next + lane_id();
        bool is_empty = candidate >= end, is_full = true;
        if (!is_empty) ask(candidate, is_empty, is_full);
        pending = __ballot_sync(~0u, !is_empty);
        full = __ballot_sync(~0u, is_full);
        next += 32;
    }
    // The lane that has looked at the first that is pending, which no longer is.
    __device__ __forceinline__ int take() {
        const int lane = __ffs(pending) - 1;
        pending &= pending - 1;
        return lane;
    }
    __device__ __forceinline__ int candidate(int lane) const { return next - 32 + lane; }
    __device__ __forceinline__ bool is_full(int lane) const { return full >> lane & 1; }
};

// Candidates [begin, end).
struct BlockRange {
    int begin, end;
};

// Of [0, end) a part, in steps of 32, beyond which no candidate has any of `rows`: rows_of(candidate) says which it has. For a
// mask that hides long stretches: of many candidates memory answers at once.
template <typename RowsOf>
__device__ __forceinline__ BlockRange active_block_range(int end, RowRange rows, const RowsOf& rows_of) {
    constexpr int kAtOnce = 4;
    BlockRange span{end, 0};
    for (int next = 0; next < end; next += 32 * kAtOnce) {
        RowRange seen[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) seen[k] = rows_of(min(next + 32 * k + lane_id(), end - 1));
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const bool is_visited = seen[k].begin < rows.end && seen[k].end > rows.begin;
            if (!__any_sync(~0u, is_visited)) continue;
            span.begin = min(span.begin, next + 32 * k);
            span.end = min(end, next + 32 * (k + 1));
        }
    }
    return span;
}

// Visits the tiles of [begin, end) that are not empty. Every warp of a block sees the same sequence.
template <int kKeys, typename Summarize>
class ActiveBlockScan {
public:
    __device__ ActiveBlockScan(int begin, int end, const Summarize& summarize)
        : summarize_(summarize), ahead_{begin}, end_(end) {}

    // Whether there is another tile, which then is the current one.
    __device__ __forceinline__ bool next() {
        while (ahead_.pending == 0) {
            if (ahead_.next >= end_) return false;
            ahead_.look(end_, [&](int index, bool& is_empty, bool& is_full) {
                const BlockSummary<kKeys> summary = summarize_(index);
                is_empty = summary.empty;
                is_full = summary.full;
#pragma unroll
                for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) columns_[w] = summary.columns[w];
            });
        }
        current_ = ahead_.take();
        return true;
    }
    __device__ __forceinline__ int index() const { return ahead_.candidate(current_); }
    __device__ __forceinline__ bool full() const { return ahead_.is_full(current_); }
    // Word of the current tile's columns.
    __device__ __forceinline__ uint32_t columns(int word) const { return __shfl_sync(~0u, columns_[word], current_); }

private:
    Summarize summarize_;
    BlockMaskIterator ahead_;
    int end_;
    int current_ = 0;                                // lane of the current tile
    uint32_t columns_[BlockSummary<kKeys>::kWords];  // of this lane's tile
};

}  // namespace flash_dmattn::cuda
