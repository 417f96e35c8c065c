// A block of the backward over key lists that the query heads of a group share: what its warp groups share.
//
// It owns a tile of query rows, of all heads that share a key/value head, and a part of the list of keys that they see. The
// first warp group gathers the keys, the others multiply: with 64 keys each of a tile, or 64 that they share, they visit the
// rows, head after head. So dK and dV of the keys are summed over the heads in registers, and added to those in global memory
// once for all. dQ is summed in the workspace, in a slot that the parts of the list share: the last of them to end rounds it.
#pragma once

#include "../../params.h"
#include "../plan.h"
#include "bwd_part.cuh"
#include "gather_bwd_block.cuh"
#include "gather_group_config.h"
#include "lane_keys.cuh"
#include "ring.cuh"

namespace flash_dmattn::cuda::sm90 {

// kRows: of a visit. More of them take too many registers above head dimension 64.
template <typename T_, int kHeadDim_, int kRows_>
struct GatherGroupTile {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRows = kRows_, kKeys = gather_group_keys(kHeadDim);
    static constexpr int kConsumers = 2;  // warp groups that multiply
    static constexpr int kThreads = (1 + kConsumers) * 128;
    static constexpr int kStages = 2;  // of rows
    static constexpr bool kSharesKeys = kKeys == 64;
    static constexpr int kScoreRows = kSharesKeys ? kRows / kConsumers : kRows;       // of a group: of S and dP,
    static constexpr int kSumCols = kSharesKeys ? kHeadDim / kConsumers : kHeadDim;  // of dK and dV
    // Of dQ a group makes 64 rows, or of 64 rows its part of the columns.
    static constexpr bool kSplitsDqRows = kRows == 64 * kConsumers;
    static constexpr int kDqCols = kSplitsDqRows ? kHeadDim : kHeadDim / kConsumers;
    // Whether shared memory has room for dQ on its way to its sums: then the copy engine adds it.
    static constexpr bool kStagesDquery = kHeadDim == 192;
    static constexpr bool kIsLarge = kHeadDim > 64;
    static constexpr int kProducerRegisters = kIsLarge ? 40 : 56, kConsumerRegisters = kIsLarge ? 232 : 224;
    static_assert((kSplitsDqRows || kRows == 64) && (kSharesKeys || kKeys == 64 * kConsumers) &&
                  kKeys % KeyListsView::kAlign == 0);

    static constexpr int kPanelCols = kSumCols % 64 == 0 ? 64 : 32;  // a group's columns begin with a panel
    using RowsTile = SmemTile<T, kRows, kHeadDim, kPanelCols>;  // Q, dO
    using KeysTile = SmemTile<T, kKeys, kHeadDim, kPanelCols>;  // K, V
    using PairsTile = SmemTile<T, kRows, kKeys>;                // dS, P
    using SumsStages = KeySumsStages<64, 3>;
};

// The rows that a block owns, of each head of the group, and its part of their list. The parts are neighbours, then the rows
// that go by about the same keys; the last rows come first: under causality their lists are the longest.
struct GatherGroupWork {
    Sequence s;
    int part, unit;   // unit: which rows, counted over all
    int head, group;  // the query heads [head, head + group)
    int first_row, end_row, tile_rows;  // the rows [first_row, end_row), of tile_rows at most

    __device__ GatherGroupWork(const BwdArgs& p, int number)
        : s(p, 0), tile_rows(static_cast<int>(gather_group_rows(p))) {
        MixedIndex index(number);
        const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), tile_rows);
        part = index.take(p.list_parts);
        unit = index.rest;
        first_row = (row_tiles - 1 - index.take(row_tiles)) * tile_rows;
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

template <typename Tile>
struct GatherGroupSmem {
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys;

    // What comes with a tile of rows.
    struct RowInfo {
        alignas(16) float lse[kRows];  // times log2(e); inf where a row sees nothing, or lies beyond the sequence
        alignas(16) float delta[kRows];
        bool has_empty[kRows / 32];  // of 32 rows: some have an lse of inf
    };

    alignas(kTileAlign) typename Tile::KeysTile key;
    alignas(kTileAlign) typename Tile::KeysTile value;
    alignas(kTileAlign) typename Tile::RowsTile query[Tile::kStages];
    alignas(kTileAlign) typename Tile::RowsTile dout[Tile::kStages];
    alignas(kTileAlign) typename Tile::PairsTile pairs[2];  // two stages of dS, or of shared keys dS and P
    struct Nothing {};
    std::conditional_t<Tile::kSharesKeys, Nothing, typename Tile::SumsStages[Tile::kConsumers * 4]> sums;  // of a warp
    ListedKeys<kKeys> keys;
    RowInfo rows[Tile::kStages];
    alignas(GatherGroupWork) unsigned char raw_work[sizeof(GatherGroupWork)];
    alignas(KeyList) unsigned char raw_list[sizeof(KeyList)];
    int first_tile, end_tile;  // of keys
    bool ends_last;            // of the parts
    RingBarriers<1> key_ring, value_ring;
    RingBarriers<Tile::kStages> query_ring, dout_ring;
    RingBarriers<1> pairs_ring;  // where keys are shared; nobody waits for it to be full
    // dQ of each warp on its way to its sums.
    using DqueryStage = typename BwdPart<Tile>::DqueryStage;
    alignas(128) std::conditional_t<Tile::kStagesDquery, DqueryStage[Tile::kConsumers * 4], Nothing> dquery;

    __device__ GatherGroupWork& work() { return reinterpret_cast<GatherGroupWork&>(raw_work); }
    __device__ KeyList& list() { return reinterpret_cast<KeyList&>(raw_list); }

    // By one thread.
    __device__ void init_rings() {
        constexpr int kConsumerWarps = Tile::kConsumers * 4;
        // A thread that gathers arrives twice: with what comes with the keys, and when these have been copied.
        key_ring.init(2 * 128, kConsumerWarps);
        value_ring.init(128, kConsumerWarps);
        query_ring.init(128, kConsumerWarps);
        dout_ring.init(1, kConsumerWarps);
        if (Tile::kSharesKeys) pairs_ring.init(1, kConsumerWarps);
    }
};

// Of dquery_turns: the tickets that blocks have drawn; behind them for each slot of dquery_accum how many parts have ended in
// it, and how often it has been emptied.
__device__ __forceinline__ int32_t* ended_parts(const BwdArgs& p, int slot) { return p.dquery_turns + 1 + 2 * slot; }
__device__ __forceinline__ int32_t* times_emptied(const BwdArgs& p, int slot) { return ended_parts(p, slot) + 1; }

}  // namespace flash_dmattn::cuda::sm90
