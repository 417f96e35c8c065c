// A block of the backward for compute capability 9.0: what its warp groups share.
//
// It owns a tile of keys of one key/value head and visits the tiles of query rows that see it, of every query head of the
// group. The first warp group loads, the others multiply. Scores stand transposed, keys by rows: so P and dS are operands of
// dV = P dO and dK = dS Q as they lie in registers, where a group has 64 keys of its own (bwd_config.h), and what is of a
// key is of two rows of a thread.
#pragma once

#include <cuda.h>

#include "../../params.h"
#include "../common/sequence.cuh"
#include "../plan.h"
#include "bwd_config.h"
#include "bwd_exchange.cuh"
#include "bwd_part.cuh"
#include "ring.cuh"

namespace flash_dmattn::cuda::sm90 {

// How the copy engine finds the tensors: [D, heads, S, B], of a dense bias and its gradient [Sk, Sq, heads, B].
struct BwdMaps {
    CUtensorMap query, dout, key, value, bias, dbias;
};

// Factors of scores, in float32.
struct BwdScale {
    float scale, scale_log2;  // the softmax scale; times log2(e)
    float softcap;            // 0: none
};

struct NoTile {};

template <typename Tile, BiasKind kBias>
struct BwdSmem {
    static constexpr int kRows = Tile::kRows;

    // What comes with a tile of query rows.
    struct RowInfo {
        static constexpr int kEnd = -1;  // as a tile: there is no other

        // What a visit begins with, read at once.
        struct alignas(16) Header {
            int head, row_tile;
            bool mask_full;  // the mask hides nothing of the tile
            bool has_empty[kRows / 32];  // of 32 rows: some see nothing, or lie beyond the sequence
        };
        Header header;
        float* dquery;  // the sums of the tile
        // Where deterministic: of each group what shows whose turn it is to add to dQ, and how it shows this block's.
        int32_t* turns;
        int turn;
        alignas(16) float lse[kRows];  // times log2(e); inf where a row sees nothing
        alignas(16) float delta[kRows];
        alignas(16) uint32_t mask[Tile::kWords][kRows];  // bit j % 32 of word j / 32: whether the row sees key j
    };

    alignas(kTileAlign) typename Tile::KeysTile key;
    alignas(kTileAlign) typename Tile::KeysTile value;
    alignas(kTileAlign) typename Tile::RowsTile query[Tile::kStages];
    alignas(kTileAlign) typename Tile::RowsTile dout[Tile::kStages];
    alignas(kTileAlign) typename Tile::PairsTile pairs[Tile::kStages];  // of a dense bias, then of dS
    alignas(kTileAlign) std::conditional_t<Tile::kSharesKeys, typename Tile::PairsTile, NoTile> probs;
    std::conditional_t<Tile::kExchanges, BwdExchangeSmem<Tile>, NoExchange> exchange;
    // dQ of each warp on its way to its sums.
    using DqueryStage = typename BwdPart<Tile>::DqueryStage;
    alignas(128) std::conditional_t<Tile::kStagesDquery, DqueryStage[Tile::kConsumers * 4], NoTile> dquery;
    RowInfo rows[Tile::kStages];
    uint32_t seen[Tile::kWords];  // keys that some row sees
    Sequence sequence;
    int bias_batch;  // that the sequence goes by
    int rank;        // of the sequence among those that share a bias and exchange its gradient; else 0
    int ticket;
    int32_t* turn[Tile::kConsumers];  // where deterministic: of each group, the last that it has waited for
    alignas(8) uint64_t keys_full;
    RingBarriers<Tile::kStages> query_ring, dout_ring, bias_ring;
    RingBarriers<1> probs_ring;  // nobody waits for it to be full

    // By one thread.
    __device__ void init_rings() {
        constexpr int kConsumerWarps = Tile::kConsumers * 4;
        mbarrier_init(smem_address(&keys_full), 128);
        query_ring.init(128, kConsumerWarps);
        dout_ring.init(1, kConsumerWarps);
        bias_ring.init(1, kConsumerWarps);
        probs_ring.init(1, kConsumerWarps);
    }
};

// The keys that a block owns.
struct BwdWork {
    int key_tile, kv_head, first_head, group;  // the query heads [first_head, first_head + group)
    int first_batch;  // the batch element, of a cluster its first block's
};

}  // namespace flash_dmattn::cuda::sm90
