// The m_blocks that a CTA of the backward visits.
#pragma once

#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/plan.h"
#include "cuda/softmax/relative_bias.cuh"

namespace flash_dmattn::cuda::sm80 {

// Lives in shared memory, one per warp, to save registers.
struct MBlockIteratorState {
    int head, m_block;
    bool mask_full;  // no score of the tile is masked
    BlockMaskIterator ahead;
};

// One step of the mainloop.
struct MBlockStep {
    int stage;  // 0 and 1 alternate
    int head, m_block;
    bool mask_full;  // no score of the tile is masked
};

// Iterates head by head over the m_blocks that causality, the mask and a relative bias leave active, ascending. The
// CTAs of a cluster, one per batch element that shares a bias, visit the same m_blocks: those that are active for any
// of them.
template <typename Traits>
class MBlockIterator {
public:
    __device__ MBlockIterator(MBlockIteratorState& state, const BwdArgs& p, const Sequence& s, int n_block,
                              int first_head)
        : state_(state), p_(p), s_(s), n_block_(n_block), first_head_(first_head) {
        __syncwarp();
        state_ = {first_head, 0, false, {m_blocks_of(first_head).begin}};
        __syncwarp();
    }

    __device__ __forceinline__ int head() const { return state_.head; }
    __device__ __forceinline__ int m_block() const { return state_.m_block; }
    __device__ __forceinline__ bool mask_full() const { return state_.mask_full; }

    // Moves to the next m_block. Returns false at the end.
    __device__ __forceinline__ bool next() {
        MBlockIteratorState state = state_;
        __syncwarp();
        while (state.ahead.pending == 0) {
            BlockRange m_blocks = m_blocks_of(state.head);
            if (state.ahead.next >= m_blocks.end) {
                if (state.head + 1 == first_head_ + static_cast<int>(p_.heads / p_.kv_heads)) return false;
                ++state.head;
                m_blocks = m_blocks_of(state.head);
                state.ahead.next = m_blocks.begin;
            }
            state.ahead.test_next_32(m_blocks.end, [&](int m_block, bool& is_empty, bool& is_full) {
                if (has_mask(p_)) summarize(state.head, m_block, is_empty, is_full);
            });
        }
        const int lane = state.ahead.pop();
        state.m_block = state.ahead.candidate(lane);
        state.mask_full = state.ahead.is_full(lane);
        state_ = state;
        __syncwarp();
        return true;
    }

private:
    __device__ __forceinline__ BlockRange m_blocks_of(int head) const {
        const int first_key = n_block_ * Traits::kKeys;
        BlockRange blocks{p_.is_causal ? s_.causal_begin(first_key) / Traits::kRows : 0,
                          ceil_div(s_.rows, Traits::kRows)};
        // Deterministic mode and the gradient of a dense bias need all of them.
        if (p_.visible_distances == nullptr || p_.deterministic || p_.dense_dbias != DenseDbias::kNone) return blocks;
        const auto rows =
            VisibleDistances(p_, p_.visible_distances, s_, head).rows_of(first_key, first_key + Traits::kKeys - 1);
        if (rows.empty()) return {0, 0};
        return {max(blocks.begin, rows.begin / Traits::kRows), min(blocks.end, ceil_div(rows.end, Traits::kRows))};
    }

    __device__ __forceinline__ void summarize(int head, int m_block, bool& is_empty, bool& is_full) const {
        const auto summary_of = [&](const Sequence& s) {
            const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p_, s, head);
            const int first = m_block * Traits::kRows;
            return masks.of(first, min(first + Traits::kRows, s.rows) - 1, n_block_);
        };
        const auto summary = summary_of(s_);
        is_full = summary.full;
        // Deterministic mode orders the CTAs of every m_block, so none may skip one.
        is_empty = summary.empty && !p_.deterministic;
        if (p_.dense_dbias == DenseDbias::kClusterReduce) {
            Sequence other = s_;
            const int group_size = static_cast<int>(p_.dbias.batch_group_size);  // 2 or 4
            for (int i = 1; is_empty && i < group_size; ++i) {
                other.batch = s_.batch ^ i;
                is_empty = summary_of(other).empty;
            }
        }
    }

    MBlockIteratorState& state_;
    const BwdArgs& p_;
    const Sequence& s_;
    int n_block_, first_head_;
};

}  // namespace flash_dmattn::cuda::sm80
