// Shared memory of the grouped sparse backward, and its work tile.
//
// The query heads of a GQA group share key lists (pack-GQA). A CTA owns an m_block of all of these heads and a split of
// its list. For each n_block of the split the producer warpgroup gathers K and V; the MMA warpgroups then iterate over
// the rows, head after head. dK and dV of the n_block stay in registers over all heads and are added to global memory
// once. dQ is summed in a slot of the workspace, which the splits of a list share: the last split to finish converts
// it.
#pragma once

#include "params.h"
#include "cuda/plan.h"
#include "cuda/sm90/bwd/tiled_mma.cuh"
#include "cuda/sm90/bwd/workspace.cuh"
#include "cuda/arch/pipeline.cuh"
#include "cuda/arch/shared_storage.cuh"
#include "cuda/common/packed_blocks.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// Computed on the host: divisions on the device would delay the start of every CTA.
struct GroupedSparseBwdTileSchedulerParams {
    FastDivmod list_splits, num_m_blocks, kv_heads, dquery_slots;
    int qheads_per_kv, m_block_rows;
    bool packs_m_blocks;

    explicit GroupedSparseBwdTileSchedulerParams(const BwdArgs& p)
        : list_splits(p.list_splits), num_m_blocks(count_m_blocks(p, grouped_block_m(p))), kv_heads(p.kv_heads),
          dquery_slots(p.dquery_slots), qheads_per_kv(static_cast<int>(p.heads / p.kv_heads)),
          m_block_rows(static_cast<int>(grouped_block_m(p))),
          packs_m_blocks(cuda::packs_m_blocks(p, grouped_block_m(p))) {}
};

// An m_block of each query head of a GQA group, and a split of its list. The splits are neighbours, then the m_blocks
// that share most keys; the last rows come first: under causality their lists are the longest.
struct GroupedSparseBwdWorkTile {
    Sequence s;
    int split;
    int slot, epoch;                       // of dquery_accum, and which of the slot's m_blocks this is
    int head, qheads_per_kv;               // the query heads [head, head + qheads_per_kv)
    int first_row, end_row, m_block_rows;  // the rows [first_row, end_row), m_block_rows at most

    __device__ GroupedSparseBwdWorkTile(const BwdArgs& p, const GroupedSparseBwdTileSchedulerParams& scheduler,
                                        unsigned work_index)
        : qheads_per_kv(scheduler.qheads_per_kv), m_block_rows(scheduler.m_block_rows) {
        FlatIndex index(work_index);
        split = index.pop(scheduler.list_splits);
        FlatIndex of_slots(index.rest);
        slot = of_slots.pop(scheduler.dquery_slots);
        epoch = static_cast<int>(of_slots.rest);
        const int m_block = static_cast<int>(scheduler.num_m_blocks.value) - 1 - index.pop(scheduler.num_m_blocks);
        head = index.pop(scheduler.kv_heads) * qheads_per_kv;
        const NumberedMBlock block(p, scheduler.packs_m_blocks, m_block, static_cast<int>(index.rest), m_block_rows);
        s = Sequence(p, block.batch);
        first_row = block.first_row;
        end_row = min(first_row + m_block_rows, s.rows);
    }
    __device__ bool is_empty() const { return first_row >= s.rows; }

    // The mainloop's steps for each n_block: kRows rows of one head each, head after head.
    template <int kRows>
    __device__ __forceinline__ int num_steps() const {
        return qheads_per_kv << steps_per_head_log2<kRows>();
    }
    template <int kRows>
    __device__ __forceinline__ int head_of(int step) const {
        return head + (step >> steps_per_head_log2<kRows>());
    }
    // The step's first row, relative to first_row.
    template <int kRows>
    __device__ __forceinline__ int row_of(int step) const {
        return (step & ((1 << steps_per_head_log2<kRows>()) - 1)) * kRows;
    }

private:
    template <int kRows>
    __device__ __forceinline__ int steps_per_head_log2() const {
        static_assert(kRows == KeyListsView::kRows || kRows * 2 == KeyListsView::kRows);
        return kRows < KeyListsView::kRows && m_block_rows > kRows ? 1 : 0;
    }
};

template <typename Traits>
struct GroupedSparseBwdSharedStorage {
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;

    // Row data of a step, a stage of the query pipeline.
    struct RowInfo {
        alignas(16) float lse[kRows];  // times log2(e); inf where a row sees no key or lies beyond the sequence
        alignas(16) float delta[kRows];
        bool has_empty_rows[kRows / 32];  // for 32 rows each: some have an lse of inf
    };

    alignas(kSmemTileAlign) typename Traits::KvTile key;
    alignas(kSmemTileAlign) typename Traits::KvTile value;
    alignas(kSmemTileAlign) typename Traits::RowsTile query[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile dout[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::ScoresTile scores[2];  // two stages of dS; with shared keys dS and P
    std::conditional_t<Traits::kSharesKeys, Empty, typename Traits::DkvStages[Traits::kConsumerWarpgroups * 4]>
        dkv;  // per warp
    GatheredKeyMetadata<kKeys> keys;
    RowInfo rows[Traits::kStages];
    Uninitialized<GroupedSparseBwdWorkTile> raw_work_tile;
    Uninitialized<KeyList> raw_list;
    int first_n_block, end_n_block;  // of the split
    bool is_last_split;              // to finish
    PipelineBarriers<1> key_pipeline, value_pipeline;
    PipelineBarriers<Traits::kStages> query_pipeline, dout_pipeline;
    PipelineBarriers<1> scores_pipeline;  // with shared keys; only its empty barrier is used
    using DqStage = typename BwdTiledMma<Traits>::DqStage;
    // Per warp.
    alignas(128) std::conditional_t<Traits::kStagesDq, DqStage[Traits::kConsumerWarpgroups * 4], Empty> dq;

    __device__ GroupedSparseBwdWorkTile& work_tile() { return raw_work_tile.get(); }
    __device__ KeyList& list() { return raw_list.get(); }

    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        // Each producer thread arrives twice: for its key's data, and when its copies are complete.
        key_pipeline.init(2 * kWarpgroupThreads, kConsumerWarps);
        value_pipeline.init(kWarpgroupThreads, kConsumerWarps);
        query_pipeline.init(kWarpgroupThreads, kConsumerWarps);
        dout_pipeline.init(1, kConsumerWarps);
        if (Traits::kSharesKeys) scores_pipeline.init(1, kConsumerWarps);
    }
};

}  // namespace flash_dmattn::cuda::sm90
