// Shared memory of the recompute kernel of dbias: the pipelines between the producer and the MMA warpgroups.
#pragma once

#include <cuda.h>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/pipeline.cuh"
#include "cuda/arch/shared_storage.cuh"
#include "cuda/arch/smem_descriptor.cuh"
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
        typename Traits::KvTile keys;
    };
    // A contributor, its row stats and its mask.
    struct ContributorInfo {
        static constexpr int kEnd = -1;  // as a head: there is no other contributor

        int batch, head;
        bool is_full;                // the mask masks no score, and no row is empty
        const uint32_t* mask_words;  // of the tile's first row; null without a packed mask
        float lse[Traits::kRows];    // times log2(e); inf for rows that see no key or lie beyond the sequence
        float delta[Traits::kRows];
    };
    static constexpr int kContributorStages = 2;

    alignas(kSmemTileAlign) Operands operands[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::BiasTile bias;
    ContributorInfo contributors[kContributorStages];
    PipelineBarriers<Traits::kStages> operands_pipeline;
    PipelineBarriers<kContributorStages> contributor_pipeline;
    alignas(8) uint64_t bias_full;

    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        operands_pipeline.init(1, kConsumerWarps);
        contributor_pipeline.init(32, kConsumerWarps);  // the lanes of the warp that writes ContributorInfo
        mbarrier_init(smem_address(&bias_full), 1);
    }
};

}  // namespace flash_dmattn::cuda::sm90
