// Shared memory, work tile and contributors of the recompute kernel of dbias.
#pragma once

#include <cuda.h>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/pipeline.cuh"
#include "cuda/arch/shared_storage.cuh"
#include "cuda/arch/smem_descriptor.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/plan.h"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// TMA tensor maps: [D, heads, S, B]; of the bias [Sk, Sq, heads, B].
struct DbiasTensorMaps {
    CUtensorMap query, dout, key, value, bias;
};

template <typename Traits>
struct DbiasSharedStorage {
    struct Operands {
        typename Traits::RowsTile rows;
        typename Traits::KeysTile keys;
    };
    // One contributor: its row stats and its mask.
    struct RowData {
        static constexpr int kEnd = -1;  // as a head: there is no other contributor

        int batch, head;
        bool is_full;                // no score is masked by the mask, and no row is empty
        const uint32_t* mask_words;  // of the tile's first row; null without a packed mask
        float lse[Traits::kRows];    // times log2(e); inf for rows that see no key or lie beyond the sequence
        float delta[Traits::kRows];
    };
    static constexpr int kRowStages = 2;

    alignas(kSmemTileAlign) Operands operands[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::BiasTile bias;
    RowData row_data[kRowStages];
    PipelineBarriers<Traits::kStages> operands_pipeline;
    PipelineBarriers<kRowStages> row_pipeline;
    alignas(8) uint64_t bias_full;

    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        operands_pipeline.init(1, kConsumerWarps);
        row_pipeline.init(32, kConsumerWarps);  // the lanes of the warp that writes row data
        mbarrier_init(smem_address(&bias_full), 1);
    }
};

// A tile of dbias, and a split of its contributors: the (batch element, query head) pairs that share it.
template <typename Traits>
struct DbiasWorkTile {
    int m_block, n_block;
    int head;                     // of dbias
    int first_batch, first_head;  // the first contributor
    int heads;                    // query heads that share a head of dbias
    int begin, end;               // contributors of the split; a batch element's heads follow each other
    int split, tile;              // tile: among all

    // The splits of a tile are far apart: CTAs that run together have the same contributors.
    __device__ DbiasWorkTile(const BwdArgs& p, int cta) {
        FlatIndex<int> index(cta);
        n_block = index.pop(ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys));
        m_block = index.pop(ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows));
        head = index.pop(p.dbias.heads);
        const int group_size = static_cast<int>(p.dbias.batch_group_size), splits = static_cast<int>(p.dbias_splits);
        first_batch = index.pop(p.cu_seqlens_q == nullptr ? p.dbias.batches : p.batch) * group_size;
        split = index.rest;
        tile = cta - split * static_cast<int>(p.dbias_tiles);
        heads = static_cast<int>(p.heads) / static_cast<int>(p.dbias.heads);
        first_head = head * heads;
        begin = heads * group_size * split / splits;
        end = heads * group_size * (split + 1) / splits;
    }

    __device__ int first_row() const { return m_block * Traits::kRows; }
    __device__ int first_key() const { return n_block * Traits::kKeys; }
};

// Iterates over the contributors that see a score of the tile. All lanes of a warp call.
template <typename Traits>
class DbiasContributors {
public:
    __device__ DbiasContributors(const BwdArgs& p, const DbiasWorkTile<Traits>& work_tile)
        : p_(p), work_tile_(work_tile), sequence_(p, work_tile.first_batch), iterator_{work_tile.begin},
          last_row_(min(work_tile.first_row() + Traits::kRows, sequence_.rows) - 1) {
        const bool sees_keys =
            last_row_ >= work_tile.first_row() && work_tile.first_key() < sequence_.keys_of(last_row_, p.is_causal);
        end_ = sees_keys ? work_tile.end : work_tile.begin;
    }

    __device__ bool next() {
        while (iterator_.pending == 0) {
            if (iterator_.next >= end_) return false;
            iterator_.test_next_32(end_, [&](int contributor, bool& is_empty, bool& is_full) {
                if (!has_mask(p_)) return;
                const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p_, sequence_of(contributor),
                                                                        head_of(contributor));
                const auto summary = masks.of(work_tile_.first_row(), last_row_, work_tile_.n_block);
                is_empty = summary.empty;
                is_full = summary.full;
            });
        }
        lane_ = iterator_.pop();
        return true;
    }
    __device__ int head() const { return head_of(iterator_.candidate(lane_)); }
    // All contributors have the same lengths.
    __device__ Sequence sequence() const { return sequence_of(iterator_.candidate(lane_)); }
    // Whether the mask, apart from causality and lengths, masks no score.
    __device__ bool is_full() const { return iterator_.is_full(lane_); }

private:
    __device__ int head_of(int contributor) const { return work_tile_.first_head + contributor % work_tile_.heads; }
    __device__ Sequence sequence_of(int contributor) const {
        Sequence s = sequence_;
        s.batch += contributor / work_tile_.heads;
        return s;
    }

    const BwdArgs& p_;
    const DbiasWorkTile<Traits>& work_tile_;
    const Sequence sequence_;
    BlockMaskIterator iterator_;
    const int last_row_;
    int end_;
    int lane_ = 0;  // of the current contributor
};

}  // namespace flash_dmattn::cuda::sm90
