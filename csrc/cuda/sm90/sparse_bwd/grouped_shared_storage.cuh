// A block of the backward over key lists that the query heads of a group share: what its warp groups share.
//
// It owns a tile of query rows, of all heads that share a key/value head, and a part of the list of keys that they see. The
// first warp group gathers the keys, the others multiply: with 64 keys each of a tile, or 64 that they share, they visit the
// rows, head after head. So dK and dV of the keys are summed over the heads in registers, and added to those in global memory
// once for all. dQ is summed in the workspace, in a slot that the parts of the list share: the last of them to end rounds it.
#pragma once

#include "params.h"
#include "cuda/plan.h"
#include "cuda/sm90/bwd/mma_atom_layout.cuh"
#include "per_head_shared_storage.cuh"
#include "grouped_config.h"
#include "key_fragment.cuh"
#include "cuda/arch/pipeline.cuh"

namespace flash_dmattn::cuda::sm90 {

// kRows: of a visit. More of them take too many registers above head dimension 64.
template <typename T_, int kHeadDim_, int kRows_>
struct GroupedSparseBwdKernelTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRows = kRows_, kKeys = grouped_block_n(kHeadDim);
    static constexpr int kConsumerWarpgroups = 2;  // warp groups that multiply
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    static constexpr int kStages = 2;  // of rows
    static constexpr bool kSharesKeys = kKeys == 64;
    static constexpr int kScoreRows = kSharesKeys ? kRows / kConsumerWarpgroups : kRows;  // of a group: of S and dP,
    static constexpr int kSumCols = kSharesKeys ? kHeadDim / kConsumerWarpgroups : kHeadDim;  // of dK and dV
    // Of dQ a group makes 64 rows, or of 64 rows its part of the columns.
    static constexpr bool kSplitsDqRows = kRows == 64 * kConsumerWarpgroups;
    static constexpr int kDqCols = kSplitsDqRows ? kHeadDim : kHeadDim / kConsumerWarpgroups;
    // Whether shared memory has room for dQ on its way to its sums: then the copy engine adds it.
    static constexpr bool kStagesDquery = kHeadDim == 192;
    static constexpr bool kIsLarge = kHeadDim > 64;
    static constexpr int kProducerRegisters = kIsLarge ? 40 : 56, kConsumerRegisters = kIsLarge ? 232 : 224;
    static_assert((kSplitsDqRows || kRows == 64) && (kSharesKeys || kKeys == 64 * kConsumerWarpgroups) &&
                  kKeys % KeyListsView::kAlign == 0);

    static constexpr int kSlabCols = kSumCols % 64 == 0 ? 64 : 32;  // a group's columns begin with a slab
    using RowsTile = SmemTile<T, kRows, kHeadDim, kSlabCols>;       // Q, dO
    using KeysTile = SmemTile<T, kKeys, kHeadDim, kSlabCols>;       // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;                   // dS, P
    using SumsStages = KeyGradientStages<64, 3>;
};

// The rows that a block owns, of each head of the group, and its part of their list. The parts are neighbours, then the rows
// that go by about the same keys; the last rows come first: under causality their lists are the longest.
struct GroupedSparseBwdWorkTile {
    Sequence s;
    int part, unit;                     // unit: which rows, counted over all
    int head, group;                    // the query heads [head, head + group)
    int first_row, end_row, tile_rows;  // the rows [first_row, end_row), of tile_rows at most

    __device__ GroupedSparseBwdWorkTile(const BwdArgs& p, int number)
        : s(p, 0), tile_rows(static_cast<int>(grouped_block_m(p))) {
        FlatIndex index(number);
        const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), tile_rows);
        part = index.take(p.list_splits);
        unit = index.rest;
        first_row = (num_m_blocks - 1 - index.take(num_m_blocks)) * tile_rows;
        group = static_cast<int>(p.heads / p.kv_heads);
        head = index.take(p.kv_heads) * group;
        s = Sequence(p, index.rest);
        end_row = min(first_row + tile_rows, s.rows);
    }
    __device__ bool empty() const { return first_row >= s.rows; }

    // With each tile of keys the rows are visited kRows at a time, those of a head one after the other.
    template <int kRows>
    __device__ __forceinline__ int visits() const {
        return group << shift<kRows>();
    }
    template <int kRows>
    __device__ __forceinline__ int head_of(int visit) const {
        return head + (visit >> shift<kRows>());
    }
    // Counted from first_row, the first row of a visit.
    template <int kRows>
    __device__ __forceinline__ int row_of(int visit) const {
        return (visit & ((1 << shift<kRows>()) - 1)) * kRows;
    }

private:
    template <int kRows>
    __device__ __forceinline__ int shift() const {
        static_assert(kRows == KeyListsView::kRows || kRows * 2 == KeyListsView::kRows);
        return kRows < KeyListsView::kRows && tile_rows > kRows ? 1 : 0;
    }
};

template <typename Traits>
struct GatherGroupSharedStorage {
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;

    // What comes with a tile of rows.
    struct RowInfo {
        alignas(16) float lse[kRows];  // times log2(e); inf where a row sees nothing, or lies beyond the sequence
        alignas(16) float delta[kRows];
        bool has_empty[kRows / 32];  // of 32 rows: some have an lse of inf
    };

    alignas(kSmemTileAlign) typename Traits::KeysTile key;
    alignas(kSmemTileAlign) typename Traits::KeysTile value;
    alignas(kSmemTileAlign) typename Traits::RowsTile query[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile dout[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::ScoresTile pairs[2];  // two stages of dS, or of shared keys dS and P
    struct Nothing {};
    std::conditional_t<Traits::kSharesKeys, Nothing, typename Traits::SumsStages[Traits::kConsumerWarpgroups * 4]>
        sums;  // of a warp
    GatheredKeys<kKeys> keys;
    RowInfo rows[Traits::kStages];
    alignas(GroupedSparseBwdWorkTile) unsigned char raw_work_tile[sizeof(GroupedSparseBwdWorkTile)];
    alignas(KeyList) unsigned char raw_list[sizeof(KeyList)];
    int first_tile, end_tile;  // of keys
    bool ends_last;            // of the parts
    PipelineBarriers<1> key_pipeline, value_pipeline;
    PipelineBarriers<Traits::kStages> query_pipeline, dout_pipeline;
    PipelineBarriers<1> pairs_pipeline;  // where keys are shared; nobody waits for it to be full
    // dQ of each warp on its way to its sums.
    using DqueryStage = typename MmaAtomLayout<Traits>::DqueryStage;
    alignas(
        128) std::conditional_t<Traits::kStagesDquery, DqueryStage[Traits::kConsumerWarpgroups * 4], Nothing> dquery;

    __device__ GroupedSparseBwdWorkTile& work_tile() {
        return reinterpret_cast<GroupedSparseBwdWorkTile&>(raw_work_tile);
    }
    __device__ KeyList& list() { return reinterpret_cast<KeyList&>(raw_list); }

    // By one thread.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        // A thread that gathers arrives twice: with what comes with the keys, and when these have been copied.
        key_pipeline.init(2 * 128, kConsumerWarps);
        value_pipeline.init(128, kConsumerWarps);
        query_pipeline.init(128, kConsumerWarps);
        dout_pipeline.init(1, kConsumerWarps);
        if (Traits::kSharesKeys) pairs_pipeline.init(1, kConsumerWarps);
    }
};

// Of dquery_semaphore: the tickets that blocks have drawn; behind them for each slot of dquery_accum how many parts have ended in
// it, and how often it has been emptied.
__device__ __forceinline__ int32_t* finished_splits(const BwdArgs& p, int slot) {
    return p.dquery_semaphore + 1 + 2 * slot;
}
__device__ __forceinline__ int32_t* slot_epoch(const BwdArgs& p, int slot) { return finished_splits(p, slot) + 1; }

}  // namespace flash_dmattn::cuda::sm90
