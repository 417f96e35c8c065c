// The work tiles of the recompute kernel of dbias, and their contributors: the (batch element, query head) pairs that
// share a tile.
#pragma once

#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/plan.h"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// A tile of dbias, and a split of its contributors.
template <typename Traits>
struct DbiasWorkTile {
    int m_block, n_block;
    int head;           // of dbias
    int heads;          // query heads that share a head of dbias
    Sequence sequence;  // of the first batch element; all contributors have its lengths
    int begin, end;     // contributors of the split; a batch element's heads follow each other
    int split, tile;    // tile: among all

    // The split is the outermost index, so that concurrent CTAs load the same contributors.
    __device__ DbiasWorkTile(const BwdArgs& p, int cta) {
        FlatIndex<int> index(cta);
        n_block = index.pop(ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys));
        m_block = index.pop(ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows));
        head = index.pop(p.dbias.heads);
        const int64_t group_size = p.dbias.batch_group_size;
        const int bias_batch = index.pop(p.cu_seqlens_q == nullptr ? p.dbias.batches : p.batch);
        sequence = Sequence(p, bias_batch * static_cast<int>(group_size));
        split = index.rest;
        tile = cta - split * static_cast<int>(p.dbias_tiles);
        heads = static_cast<int>(p.heads) / static_cast<int>(p.dbias.heads);
        begin = static_cast<int>(heads * group_size * split / p.dbias_splits);
        end = static_cast<int>(heads * group_size * (split + 1) / p.dbias_splits);
        // Causality may leave no score.
        if (exists() && first_key() >= sequence.keys_of(last_row(), p.is_causal)) end = begin;
    }

    __device__ bool has_contributors() const { return begin < end; }
    // With variable length a tile may lie beyond the sequence.
    __device__ bool exists() const { return first_row() < sequence.rows && first_key() < sequence.keys; }
    __device__ int first_row() const { return m_block * Traits::kRows; }
    __device__ int last_row() const { return min(first_row() + Traits::kRows, sequence.rows) - 1; }
    __device__ int first_key() const { return n_block * Traits::kKeys; }
};

// Iterates over the contributors that see a score of the tile. All lanes of a warp call.
template <typename Traits>
class DbiasContributors {
public:
    __device__ DbiasContributors(const BwdArgs& p, const DbiasWorkTile<Traits>& work_tile)
        : p_(p), work_tile_(work_tile), iterator_{work_tile.begin} {}

    __device__ bool next() {
        while (iterator_.pending == 0) {
            if (iterator_.next >= work_tile_.end) return false;
            iterator_.test_next_32(work_tile_.end, [&](int contributor, bool& is_empty, bool& is_full) {
                if (!has_mask(p_)) return;
                const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p_, sequence_of(contributor),
                                                                        head_of(contributor));
                const auto summary = masks.of(work_tile_.first_row(), work_tile_.last_row(), work_tile_.n_block);
                is_empty = summary.empty;
                is_full = summary.full;
            });
        }
        lane_ = iterator_.pop();
        return true;
    }
    __device__ int head() const { return head_of(iterator_.candidate(lane_)); }
    __device__ Sequence sequence() const { return sequence_of(iterator_.candidate(lane_)); }
    // Whether the mask, apart from causality and lengths, masks no score.
    __device__ bool is_full() const { return iterator_.is_full(lane_); }

private:
    __device__ int head_of(int contributor) const {
        return work_tile_.head * work_tile_.heads + contributor % work_tile_.heads;
    }
    __device__ Sequence sequence_of(int contributor) const {
        Sequence s = work_tile_.sequence;
        s.batch += contributor / work_tile_.heads;
        return s;
    }

    const BwdArgs& p_;
    const DbiasWorkTile<Traits>& work_tile_;
    BlockMaskIterator iterator_;
    int lane_ = 0;  // of the current contributor
};

}  // namespace flash_dmattn::cuda::sm90
