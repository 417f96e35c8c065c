// A block of the backward for compute capability 9.0: what its warp groups share.
//
// It owns a tile of keys of one key/value head and visits the tiles of query rows that see it, of every query head of the
// group. The first warp group loads, the others multiply. Scores stand transposed, keys by rows: so P and dS are operands of
// dV = P dO and dK = dS Q as they lie in registers, where a group has 64 keys of its own (bwd_config.h), and what is of a
// key is of two rows of a thread.
#pragma once

#include <cuda.h>

#include "cuda/arch/mbarrier.cuh"
#include "params.h"
#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"
#include "kernel_traits.h"
#include "dsmem_reduction.cuh"
#include "mma_atom_layout.cuh"
#include "cuda/arch/pipeline.cuh"

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

template <typename Traits, BiasKind kBias>
struct BwdSharedStorage {
    static constexpr int kRows = Traits::kRows;

    // What comes with a tile of query rows.
    struct RowInfo {
        static constexpr int kEnd = -1;  // as a tile: there is no other

        // What a visit begins with, read at once.
        struct alignas(16) Header {
            int head, m_block;
            bool mask_full;              // the mask hides nothing of the tile
            bool has_empty[kRows / 32];  // of 32 rows: some see nothing, or lie beyond the sequence
        };
        Header header;
        float* dquery;  // the sums of the tile
        // Where deterministic: of each group what shows whose turn it is to add to dQ, and how it shows this block's.
        int32_t* turns;
        int turn;
        alignas(16) float lse[kRows];  // times log2(e); inf where a row sees nothing
        alignas(16) float delta[kRows];
        alignas(16) uint32_t mask[Traits::kWords][kRows];  // bit j % 32 of word j / 32: whether the row sees key j
    };

    alignas(kSmemTileAlign) typename Traits::KeysTile key;
    alignas(kSmemTileAlign) typename Traits::KeysTile value;
    alignas(kSmemTileAlign) typename Traits::RowsTile query[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile dout[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::ScoresTile pairs[Traits::kStages];  // of a dense bias, then of dS
    alignas(kSmemTileAlign) std::conditional_t<Traits::kSharesKeys, typename Traits::ScoresTile, NoTile> probs;
    std::conditional_t<Traits::kClusterReduces, BwdExchangeSharedStorage<Traits>, NoReduction> reduction;
    // dQ of each warp on its way to its sums.
    using DqueryStage = typename MmaAtomLayout<Traits>::DqueryStage;
    alignas(128) std::conditional_t<Traits::kStagesDquery, DqueryStage[Traits::kConsumerWarpgroups * 4], NoTile> dquery;
    RowInfo rows[Traits::kStages];
    uint32_t seen[Traits::kWords];  // keys that some row sees
    Sequence sequence;
    int bias_batch;  // that the sequence goes by
    int rank;        // of the sequence among those that share a bias and exchange its gradient; else 0
    int ticket;
    int32_t* turn[Traits::kConsumerWarpgroups];  // where deterministic: of each group, the last that it has waited for
    alignas(8) uint64_t keys_full;
    PipelineBarriers<Traits::kStages> query_pipeline, dout_pipeline, bias_pipeline;
    PipelineBarriers<1> probs_pipeline;  // nobody waits for it to be full

    // By one thread.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        mbarrier_init(smem_address(&keys_full), 128);
        query_pipeline.init(128, kConsumerWarps);
        dout_pipeline.init(1, kConsumerWarps);
        bias_pipeline.init(1, kConsumerWarps);
        probs_pipeline.init(1, kConsumerWarps);
    }
};

// The keys that a block owns.
struct BwdWorkTile {
    int n_block, kv_head, first_head, group;  // the query heads [first_head, first_head + group)
    int first_batch;                          // the batch element, of a cluster its first block's
};

}  // namespace flash_dmattn::cuda::sm90
