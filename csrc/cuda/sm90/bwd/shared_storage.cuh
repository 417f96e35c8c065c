// Shared memory of the backward.
//
// A CTA owns an n_block of one key/value head. Its mainloop iterates over the m_blocks that see the n_block, for every
// query head of the GQA group. Warpgroup 0 is the producer, two MMA warpgroups are the consumers. They compute S and dP
// transposed (kernel_traits.h).
#pragma once

#include <cuda.h>

#include "cuda/arch/mbarrier.cuh"
#include "params.h"
#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"
#include "kernel_traits.h"
#include "tiled_mma.cuh"
#include "cuda/arch/pipeline.cuh"
#include "cuda/arch/shared_storage.cuh"
#include "cuda/softmax/relative_bias_segment.cuh"

namespace flash_dmattn::cuda::sm90 {

// TMA tensor maps: [D, heads, S, B]; of a dense bias and its gradient [Sk, Sq, heads, B].
struct BwdTensorMaps {
    CUtensorMap query, dout, key, value, bias, dbias;
};

// The gradient of a dense bias (dense_dbias.cuh).
template <int kStages>
struct DenseDbiasSharedStorage {
    struct Tile {
        int head, m_block;
    };
    Tile tiles[kStages];                        // the m_block of each stage; -1: none to be stored
    int stores;                                 // that have been issued
    int position;                               // one past the last one, in the order of m_blocks
    alignas(8) uint64_t dscores_full[kStages];  // dS is complete in the stage

    // One thread calls. Warps of the consumers arrive.
    __device__ void init(int consumer_warps) {
        stores = position = 0;
        for (int stage = 0; stage < kStages; ++stage) {
            tiles[stage].m_block = -1;
            mbarrier_init(smem_address(&dscores_full[stage]), consumer_warps);
        }
    }
};

// Whether the packed mask acts on scores. Beside a dense bias, a mask that does not differ by row acts on P and dS
// instead (BwdScores::zero_masked_keys). Without a mask the row stride is 0.
template <typename Traits, BiasKind kBias>
__device__ __forceinline__ bool masks_scores(const BwdArgs& p) {
    if constexpr (!Traits::kServesMasksAndSoftcap) return false;
    return kBias == BiasKind::kDense ? p.packed_mask.bits_row_stride != 0 : p.packed_mask.present();
}

template <typename Traits, BiasKind kBias>
struct BwdSharedStorage {
    static constexpr int kRows = Traits::kRows;
    // Threads of the producer that write MBlockInfo.
    static constexpr int kRowDataThreads = kBias == BiasKind::kDense ? kRows : kWarpgroupThreads;
    // Whether S starts from the relative bias, divided by the softmax scale, or it is added after Q K^T, times log2(e).
    static constexpr bool kStartsFromBias = kBias == BiasKind::kRelativeGrid && Traits::kScoreRows > 64;
    // Scores are transposed: keys x rows.
    using RelativeSegment = SegmentOf<kBias, Traits::kKeys, kRows>;
    struct RelativeBlock {
        RelativeSegment entries;
        RelativeBiasGradient gradient;
        int position;  // of the first row and key
    };

    // Row data of an m_block, a stage of the query pipeline.
    struct MBlockInfo {
        static constexpr int kEnd = -1;  // as an m_block: the mainloop ends

        // Read at once.
        struct alignas(16) Header {
            int head, m_block;
            bool is_full_block;                    // the mask masks no score
            int8_t clamped_end;                    // RelativePosition::clamped_end
            alignas(4) bool has_empty_rows_of[4];  // of 32 rows each: some see no key or lie beyond the sequence

            __device__ bool has_empty_rows() const {
                constexpr uint32_t kWritten = ~0u >> (4 - ceil_div(kRows, 32)) * 8;
                return (reinterpret_cast<const uint32_t&>(has_empty_rows_of) & kWritten) != 0;
            }
        };
        Header header;
        float* dq_accum;  // the m_block's tile of dquery_accum
        // With deterministic=True: the semaphore of each warpgroup, and the value at which this CTA may add to dQ.
        int32_t* dq_semaphore;
        int dq_semaphore_value;
        // Times log2(e); inf where a row sees no key. In a clamped block minus the relative bias that all scores share.
        alignas(16) float lse[kRows];
        alignas(16) float delta[kRows];
        // Bit j % 32 of word j / 32: the row sees key j.
        alignas(16) std::conditional_t<Traits::kServesMasksAndSoftcap, uint32_t[Traits::kWords][kRows], Empty> mask;
        std::conditional_t<is_relative(kBias), RelativeBlock, Empty> relative_bias;
    };

    alignas(kSmemTileAlign) typename Traits::KvTile key;
    alignas(kSmemTileAlign) typename Traits::KvTile value;
    alignas(kSmemTileAlign) typename Traits::RowsTile query[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile dout[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::ScoresTile bias_dscores[Traits::kStages];  // a dense bias, then dS
    alignas(kSmemTileAlign) std::conditional_t<Traits::kSharesKeys, typename Traits::ScoresTile, Empty> probs;
    using DqStage = typename BwdTiledMma<Traits>::DqStage;
    // Per warp.
    alignas(128) std::conditional_t<Traits::kStagesDq, DqStage[Traits::kConsumerWarpgroups * 4], Empty> dq;
    MBlockInfo m_blocks[Traits::kStages];
    // Each MMA thread's share of the gradient of the table's two ends; no registers are free for it.
    std::conditional_t<kBias == BiasKind::kRelative, float[Traits::kConsumerWarpgroups * kWarpgroupThreads][2], Empty>
        relative_bias_ends;
    uint32_t visible_keys[Traits::kWords];  // bit j % 32 of word j / 32: some row sees key j
    // Aligned, so that no load of 16 bytes also covers visible_keys, which another warp may write meanwhile.
    alignas(16) Sequence sequence;
    int bias_batch;                                           // the batch element of the bias
    int work_index;                                           // where an atomic counter assigns work tiles
    int32_t* held_dq_semaphore[Traits::kConsumerWarpgroups];  // the last one acquired and not yet released, or null
    alignas(8) uint64_t keys_full;
    PipelineBarriers<Traits::kStages> query_pipeline, dout_pipeline, bias_pipeline;
    PipelineBarriers<1> probs_pipeline;  // only its empty barrier is used
    std::conditional_t<kBias == BiasKind::kDense, DenseDbiasSharedStorage<Traits::kStages>, Empty> dense_dbias;

    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        mbarrier_init(smem_address(&keys_full), kWarpgroupThreads);
        query_pipeline.init(kRowDataThreads + 1, kConsumerWarps);  // 1: the thread that loads Q
        dout_pipeline.init(1, kConsumerWarps);
        bias_pipeline.init(1, kConsumerWarps);
        probs_pipeline.init(1, kConsumerWarps);
        if constexpr (kBias == BiasKind::kDense) dense_dbias.init(kConsumerWarps);
    }
};

}  // namespace flash_dmattn::cuda::sm90
