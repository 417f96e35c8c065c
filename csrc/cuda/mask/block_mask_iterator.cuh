// Iterates over the key blocks (n_blocks) in which a CTA's rows see any key.
#pragma once

#include "bits.cuh"
#include "intervals.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// What the block summaries say about an m_block x n_block. Bit j % 32 of visible_keys[j / 32]: a row may see key j of
// the block. Bits beyond the sequence are undefined.
template <int kKeys>
struct BlockSummary {
    static constexpr int kWords = kKeys / 32;
    bool empty;
    bool full;
    uint32_t visible_keys[kWords];
};

__host__ __device__ __forceinline__ bool has_mask(const AttentionParams& p) {
    return p.packed_mask.present() || p.interval_summaries.present();
}

// Whether the mask differs by row. If not, the visible keys of the block summaries are all of it.
__host__ __device__ __forceinline__ bool mask_differs_by_row(const AttentionParams& p) {
    return p.interval_summaries.present() || (p.packed_mask.present() && !p.packed_mask.row_broadcast());
}

// The mask's block summaries of one batch element and head, combined to the kernel's block size. Without kHasMask the
// kernel is compiled for calls without a mask.
template <int kRows, int kKeys, bool kHasMask = true>
class MaskSummaries {
    // Rows and keys of a stored summary; stored summaries of an n_block.
    static constexpr int kBlock = PackedMask::kBlock, kNumSummaries = kKeys / kBlock;
    static_assert(kKeys % kBlock == 0 && kBlock == IntervalBlockSummary::kKeys);

public:
    __device__ MaskSummaries(const AttentionParams& p, const Sequence& s, int head)
        : mask_(p.packed_mask), intervals_(p.interval_summaries) {
        if (has_packed_mask()) {
            const int mask_head = shared_head(head, p.heads, mask_.heads);
            offset_ = shared_batch(mask_, s) * mask_.blocks_batch_stride + mask_head * mask_.blocks_head_stride;
        } else if (has_intervals()) {
            const int mask_head = shared_head(head, p.heads, p.intervals.heads);
            intervals_of_head_ =
                intervals_.blocks + s.batch * intervals_.batch_stride + mask_head * intervals_.num_n_blocks;
        }
    }

    // Summary of rows [first_row, last_row] and keys [n_block * kKeys, (n_block + 1) * kKeys), without causality
    // and lengths.
    __device__ BlockSummary<kKeys> of(int first_row, int last_row, int n_block) const {
        BlockSummary<kKeys> summary;
        summary.full = true;
        const bool present = has_packed_mask() || has_intervals();
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) summary.visible_keys[w] = present ? 0 : ~0u;
        if (has_packed_mask()) {
            const bool row_broadcast = mask_.row_broadcast();
            const int end = row_broadcast ? 1 : last_row / kBlock + 1;
            constexpr int kUnroll = kRows > kBlock ? 2 : 1;  // independent loads
#pragma unroll 1
            for (int row = row_broadcast ? 0 : first_row / kBlock; row < end; row += kUnroll) {
                bool is_full[kUnroll][kNumSummaries];
                uint64_t visible_keys[kUnroll][kNumSummaries];
#pragma unroll
                for (int r = 0; r < kUnroll; ++r)
#pragma unroll
                    for (int k = 0; k < kNumSummaries; ++k) {
                        const int key = n_block * kNumSummaries + k;
                        const bool exists = row + r < end && key < mask_.num_n_blocks;
                        const int64_t at = offset_ + (row + r) * mask_.blocks_row_stride + key;
                        is_full[r][k] = exists ? mask_.is_full[at] : true;  // as a select: fewer spills than ||
                        visible_keys[r][k] = exists ? mask_.visible_keys[at] : 0;
                    }
#pragma unroll
                for (int r = 0; r < kUnroll; ++r)
#pragma unroll
                    for (int k = 0; k < kNumSummaries; ++k) {
                        summary.full &= is_full[r][k];
                        add_visible_keys(summary, k, visible_keys[r][k]);
                    }
            }
        } else if (has_intervals()) {
            IntervalBlockSummary blocks[kNumSummaries];
#pragma unroll
            for (int k = 0; k < kNumSummaries; ++k) blocks[k] = interval_summary(n_block * kNumSummaries + k);
#pragma unroll
            for (int k = 0; k < kNumSummaries; ++k) {
                const IntervalBlockSummary& block = blocks[k];
                summary.full &= block.last_begin <= first_row && block.first_end > last_row;
                if (block.first_begin <= last_row && block.last_end > first_row)
                    add_visible_keys(summary, k, block.visible_keys);
            }
        }
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) any |= summary.visible_keys[w];
        summary.empty = any == 0;
        return summary;
    }

    // A row range outside which no row sees a key of the block. Packed masks do not store it: all rows.
    __device__ RowRange rows_of(int rows, int n_block) const {
        if (!has_intervals()) return {0, rows};
        RowRange range{rows, 0};
#pragma unroll
        for (int k = 0; k < kNumSummaries; ++k) {
            const IntervalBlockSummary block = interval_summary(n_block * kNumSummaries + k);
            range = {min(range.begin, block.first_begin), max(range.end, block.last_end)};
        }
        return range;
    }

private:
    __device__ bool has_packed_mask() const { return kHasMask && mask_.present(); }
    __device__ bool has_intervals() const { return kHasMask && intervals_.present(); }
    // Clamped to the last summary, so that loads beyond it need no branch.
    __device__ __forceinline__ IntervalBlockSummary interval_summary(int n_block) const {
        return intervals_of_head_[min(n_block, static_cast<int>(intervals_.num_n_blocks) - 1)];
    }
    static __device__ __forceinline__ void add_visible_keys(BlockSummary<kKeys>& summary, int block,
                                                            uint64_t visible_keys) {
        summary.visible_keys[2 * block] |= static_cast<uint32_t>(visible_keys);
        summary.visible_keys[2 * block + 1] |= static_cast<uint32_t>(visible_keys >> 32);
    }

    const PackedMask& mask_;
    const IntervalSummaries& intervals_;
    int64_t offset_ = 0;  // of the first summary of a packed mask
    const IntervalBlockSummary* intervals_of_head_ = nullptr;
};

// Tests 32 candidate blocks at a time, one per lane, so that the mainloop waits for summaries once per 32 blocks. All
// lanes of a warp call together and get the same result.
struct BlockMaskIterator {
    int next;              // the first untested candidate
    uint32_t pending = 0;  // active candidates among the 32 before `next`
    uint32_t full = 0;     // candidates without a masked score

    // classify(candidate, is_empty, is_full) is called for this lane's candidate.
    template <typename Classify>
    __device__ __forceinline__ void test_next_32(int end, const Classify& classify) {
        const int candidate = next + lane_id();
        bool is_empty = candidate >= end, is_full = true;
        if (!is_empty) classify(candidate, is_empty, is_full);
        pending = __ballot_sync(~0u, !is_empty);
        full = __ballot_sync(~0u, is_full);
        next += 32;
    }
    // Removes the first pending candidate and returns its lane.
    __device__ __forceinline__ int pop() {
        const int lane = __ffs(pending) - 1;
        pending &= pending - 1;
        return lane;
    }
    __device__ __forceinline__ int candidate(int lane) const { return next - 32 + lane; }
    __device__ __forceinline__ bool is_full(int lane) const { return full >> lane & 1; }
};

// Blocks [begin, end).
struct BlockRange {
    int begin, end;
};

// Narrows [0, end), in steps of 32, to the blocks whose row range rows_of(block) intersects `rows`. For masks in
// which few blocks do, such as windows: tests 128 blocks per step.
template <typename RowsOf>
__device__ __forceinline__ BlockRange active_block_range(int end, RowRange rows, const RowsOf& rows_of) {
    constexpr int kUnroll = 4;
    BlockRange span{end, 0};
    for (int next = 0; next < end; next += 32 * kUnroll) {
        RowRange seen[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) seen[k] = rows_of(min(next + 32 * k + lane_id(), end - 1));
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const bool is_visited = seen[k].begin < rows.end && seen[k].end > rows.begin;
            if (!__any_sync(~0u, is_visited)) continue;
            span.begin = min(span.begin, next + 32 * k);
            span.end = min(end, next + 32 * (k + 1));
        }
    }
    return span;
}

enum class BlockOrder { kAscending, kDescending };

// Iterates over the non-empty blocks of [begin, end). Every warp of a CTA gets the same sequence.
template <int kKeys, typename Summarize, BlockOrder kOrder = BlockOrder::kAscending>
class ActiveBlockScan {
public:
    __device__ ActiveBlockScan(int begin, int end, const Summarize& summarize)
        : summarize_(summarize), iterator_{begin}, begin_(begin), end_(end) {}

    // Moves to the next active block; false at the end.
    __device__ __forceinline__ bool next() {
        while (iterator_.pending == 0) {
            if (iterator_.next >= end_) return false;
            iterator_.test_next_32(end_, [&](int candidate, bool& is_empty, bool& is_full) {
                const BlockSummary<kKeys> summary = summarize_(index_of(candidate));
                is_empty = summary.empty;
                is_full = summary.full;
#pragma unroll
                for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) visible_keys_[w] = summary.visible_keys[w];
            });
        }
        current_ = iterator_.pop();
        return true;
    }
    __device__ __forceinline__ int index() const { return index_of(iterator_.candidate(current_)); }
    __device__ __forceinline__ bool full() const { return iterator_.is_full(current_); }
    // Word of the current block's visible keys.
    __device__ __forceinline__ uint32_t visible_keys(int word) const {
        return __shfl_sync(~0u, visible_keys_[word], current_);
    }

private:
    __device__ __forceinline__ int index_of(int candidate) const {
        return kOrder == BlockOrder::kAscending ? candidate : begin_ + end_ - 1 - candidate;
    }

    Summarize summarize_;
    BlockMaskIterator iterator_;
    int begin_, end_;
    int current_ = 0;                                     // lane of the current block
    uint32_t visible_keys_[BlockSummary<kKeys>::kWords];  // of this lane's block
};

}  // namespace flash_dmattn::cuda
