// A block of the backward over key lists for compute capability 9.0: what its warp groups share.
//
// It owns a tile of query rows of one head and goes over the list of keys that they see. The first warp group gathers the
// keys, the others multiply, 64 keys each of a tile. Scores stand transposed, keys by rows: so P and dS are operands of
// dV = P dO and dK = dS Q as they lie in registers. What the tile adds to a key's dK and dV is summed in global memory;
// dQ stays in registers, 64 rows in each group.
#pragma once

#include <cuda.h>

#include "../../params.h"
#include "../plan.h"
#include "lane_keys.cuh"
#include "operand.cuh"
#include "ring.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T_, int kHeadDim_>
struct GatherBwdTile {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRows = KeyListsView::kRows, kKeys = 128;
    static constexpr int kConsumers = 2;  // warp groups that multiply
    static constexpr int kThreads = (1 + kConsumers) * 128;
    static constexpr int kKeyStages = kHeadDim > 64 ? 1 : 2, kValueStages = kKeyStages;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    static_assert(kRows == 64 * kConsumers && kKeys == 64 * kConsumers && kKeys % KeyListsView::kAlign == 0);

    using RowsTile = SmemTile<T, kRows, kHeadDim>;  // Q, dO
    using KeysTile = SmemTile<T, kKeys, kHeadDim>;  // K, V
    using PairsTile = SmemTile<T, kRows, kKeys>;    // dS
    using SumsStages = KeySumsStages<64, 3>;
};

// How the copy engine finds the rows: [D, heads, S, B].
struct GatherBwdMaps {
    CUtensorMap query, dout;
};

// The rows that a block owns. Blocks that add to the same keys are neighbours; the last rows come first: under causality
// their lists are the longest.
struct GatherBwdWork {
    Sequence s;
    int head, first_row;

    __device__ GatherBwdWork(const BwdArgs& p, unsigned number, int tile_rows) : s(p, 0) {
        MixedIndex index(number);
        const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.heads) / kv_heads;
        const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), tile_rows);
        head = index.take(group);
        first_row = (row_tiles - 1 - index.take(row_tiles)) * tile_rows;
        head += index.take(kv_heads) * group;
        s = Sequence(p, static_cast<int>(index.rest));
    }
    __device__ bool empty() const { return first_row >= s.rows; }
};

template <typename Tile>
struct GatherBwdSmem {
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kRowWords = kRows / 32;

    alignas(kTileAlign) typename Tile::RowsTile query;
    alignas(kTileAlign) typename Tile::RowsTile dout;
    alignas(kTileAlign) typename Tile::KeysTile key[Tile::kKeyStages];
    alignas(kTileAlign) typename Tile::KeysTile value[Tile::kValueStages];
    alignas(kTileAlign) typename Tile::PairsTile dscores;
    typename Tile::SumsStages sums[Tile::kConsumers * 4];  // of a warp
    ListedKeys<kKeys> keys[Tile::kKeyStages];
    alignas(16) float lse[kRows];  // times log2(e); inf where a row sees nothing, or lies beyond the sequence
    alignas(16) float delta[kRows];
    bool has_empty[kRowWords];  // of 32 rows: some have an lse of inf
    alignas(GatherBwdWork) unsigned char raw_work[sizeof(GatherBwdWork)];
    alignas(KeyList) unsigned char raw_list[sizeof(KeyList)];
    int tiles;  // of keys
    alignas(8) uint64_t rows_full;
    RingBarriers<Tile::kKeyStages> key_ring;
    RingBarriers<Tile::kValueStages> value_ring;

    __device__ GatherBwdWork& work() { return reinterpret_cast<GatherBwdWork&>(raw_work); }
    __device__ KeyList& list() { return reinterpret_cast<KeyList&>(raw_list); }

    // By one thread.
    __device__ void init_rings() {
        constexpr int kConsumerWarps = Tile::kConsumers * 4;
        mbarrier_init(smem_address(&rows_full), 128);
        // A thread that gathers arrives twice: with what comes with the keys, and when these have been copied.
        key_ring.init(2 * 128, kConsumerWarps);
        value_ring.init(128, kConsumerWarps);
    }
};

}  // namespace flash_dmattn::cuda::sm90
