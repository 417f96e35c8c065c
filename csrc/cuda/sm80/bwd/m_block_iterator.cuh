// Which tiles of query rows a block of the backward visits.
#pragma once

#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm80 {

// Where a warp is in its visits; in shared memory: registers are short.
struct RowTilePlace {
    int head, m_block;
    bool mask_full;  // the mask hides nothing of the tile
    BlockMaskIterator ahead;
};

// Which tiles of rows a block visits: head after head, the tiles that causality and the mask leave a pair of, ascending.
// The blocks of a cluster, one for each batch element that shares a bias, visit the same tiles: those that a mask leaves a
// pair of for any of them.
template <typename Traits, bool kCausal>
class RowTileCursor {
public:
    __device__ RowTileCursor(RowTilePlace& place, const BwdArgs& p, const Sequence& s, int n_block, int first_head)
        : place_(place), p_(p), s_(s), n_block_(n_block), first_head_(first_head) {
        __syncwarp();
        place_ = {first_head, 0, false, {begin()}};
        __syncwarp();
    }

    __device__ __forceinline__ int head() const { return place_.head; }
    __device__ __forceinline__ int m_block() const { return place_.m_block; }
    __device__ __forceinline__ bool mask_full() const { return place_.mask_full; }

    // Moves to the next tile; false where there is none.
    __device__ __forceinline__ bool next() {
        RowTilePlace place = place_;
        __syncwarp();
        while (place.ahead.pending == 0) {
            if (place.ahead.next >= end()) {
                if (place.head + 1 == first_head_ + static_cast<int>(p_.heads / p_.kv_heads)) return false;
                ++place.head;
                place.ahead.next = begin();
                if (place.ahead.next >= end()) return false;
            }
            place.ahead.look(end(), [&](int tile, bool& is_empty, bool& is_full) {
                if (has_mask(p_)) ask_mask(place.head, tile, is_empty, is_full);
            });
        }
        const int lane = place.ahead.take();
        place.m_block = place.ahead.candidate(lane);
        place.mask_full = place.ahead.is_full(lane);
        place_ = place;
        __syncwarp();
        return true;
    }

private:
    __device__ int begin() const { return kCausal ? s_.causal_begin(n_block_ * Traits::kKeys) / Traits::kRows : 0; }
    __device__ int end() const { return ceil_div(s_.rows, Traits::kRows); }

    __device__ __forceinline__ void ask_mask(int head, int tile, bool& is_empty, bool& is_full) const {
        const auto summary_of = [&](const Sequence& s) {
            const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p_, s, head);
            const int first = tile * Traits::kRows;
            return masks.of(first, min(first + Traits::kRows, s.rows) - 1, n_block_);
        };
        const auto summary = summary_of(s_);
        is_full = summary.full;
        // In deterministic mode every block takes its turn at every tile.
        is_empty = summary.empty && !p_.deterministic;
        if (p_.dense_dbias == DenseDbias::kClusterReduce) {
            Sequence other = s_;
            const int sharers = static_cast<int>(p_.dbias.batch_group_size);  // 2 or 4
            for (int i = 1; is_empty && i < sharers; ++i) {
                other.batch = s_.batch ^ i;
                is_empty = summary_of(other).empty;
            }
        }
    }

    RowTilePlace& place_;
    const BwdArgs& p_;
    const Sequence& s_;
    int n_block_, first_head_;
};

}  // namespace flash_dmattn::cuda::sm80
