// Shared memory of the sm90 forward: the pipelines between the producer warpgroup and the MMA warpgroups.
#pragma once

#include <cuda.h>

#include "params.h"
#include "cuda/arch/pipeline.cuh"
#include "cuda/arch/shared_storage.cuh"
#include "cuda/arch/smem_descriptor.cuh"
#include "cuda/softmax/relative_bias_segment.cuh"
#include "kernel_traits.h"
#include "key_bias.cuh"
#include "tile_scheduler.cuh"

namespace flash_dmattn::cuda::sm90 {

// Threads that produce K, V and their metadata. With a dense bias, the producer's last warp loads the bias instead.
template <BiasKind kBias>
constexpr int kProducerThreads = kBias == BiasKind::kDense ? 96 : kWarpgroupThreads;

struct FwdSoftmaxParams {
    float scale;
    float scale_log2;      // scores of the softmax times this are exponents of 2
    bool unscaled_scores;  // the softmax runs on unscaled Q K^T, accumulated onto bias / scale: scaling keeps the order
    float inverse_scale;   // of the bias that S is accumulated onto; 0: S starts from 0
    float softcap;         // 0: none
};

// One kernel parameter: the compiler loads neighbouring fields together.
struct FwdKernelParams {
    FwdTileSchedulerParams scheduler;
    FwdSoftmaxParams softmax;
};

// TMA descriptors: Q, K, V as [D, heads, S, B], a dense bias as [Sk, Sq, heads, B].
struct FwdTensorMaps {
    CUtensorMap query, key, value, bias;
};

// Entries that end in WG1 start one barrier per MMA warpgroup, of which there are at most four.
struct FwdNamedBarriers {
    enum : int {
        kWarpSchedulerWG1 = 1,  // ping-pong: the warpgroup may issue GEMMs
        kWarpgroupSyncWG1 = 5,  // the threads of one MMA warpgroup
    };
};

template <typename T, BiasKind kBias, typename Traits>
struct FwdSharedStorage {
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWords = kKeys / 32;
    static constexpr int kBiasKeys = 64;  // keys of a dense bias tile
    // Whether the metadata says which keys are visible. Otherwise they are those below a bound, or gathered.
    static constexpr bool kHasVisibleKeys = !Traits::kCountsBlocks || (kBias == BiasKind::kKey && !Traits::kGathers);
    // One more than Q: the epilogue reads its work tile while the producer loads the next Q.
    static constexpr int kWorkTileStages = Traits::kQueryStages + 1;

    using QueryTile = SmemTile<T, kRows, Traits::kHeadDim>;
    using KvTile = SmemTile<T, kKeys, Traits::kHeadDim>;
    using BiasTile = SmemTile<T, kWarpgroupRows, kBiasKeys>;
    using RelativeSegment = SegmentOf<kBias, kRows, kKeys>;
    using MaskWords = std::conditional_t<kWords == 4, uint4, uint2>;  // of one row

    // What the producer writes beside a K stage.
    struct BlockMetadata {
        static constexpr int kNoBlock = -1;  // n_block: the work tile has no active n_block

        // The next three: unless kCountsBlocks.
        int n_block;
        bool full;     // mask, causality and lengths mask no score
        bool is_last;  // the work tile's last n_block
        // A relative bias of one dimension, of this n_block and the work tile's next one: -1 or 1 if all scores share the
        // segment's first entry, the low or the high end of the table; else 0.
        int8_t shared_end, next_shared_end;
        // Keys that some row sees and that no key bias masks; if kHasVisibleKeys.
        alignas(16) uint32_t visible_keys[kWords];
        // Masks that differ by row, unless full: [row][word], the keys that a row sees. Gathered keys: [word][key], the
        // rows that see a key.
        alignas(16) std::conditional_t<Traits::kGathers, uint32_t[kRows / 32][kKeys], uint32_t[kRows][kWords]> mask;
        std::conditional_t<kBias == BiasKind::kKey, KeyBiasTile<kKeys>, Empty> key_bias;
        std::conditional_t<is_relative(kBias), RelativeSegment, Empty> relative_bias;
    };

    alignas(kSmemTileAlign) QueryTile query[Traits::kQueryStages];
    alignas(kSmemTileAlign) KvTile key[Traits::kKeyStages];
    alignas(kSmemTileAlign) KvTile value[Traits::kValueStages];
    using BiasTiles = std::conditional_t<kBias == BiasKind::kDense,
                                         BiasTile[Traits::kConsumerWarpgroups][Traits::kBiasStages], Empty>;
    alignas(kSmemTileAlign) BiasTiles bias;
    BlockMetadata metadata[Traits::kKeyStages];
    alignas(FwdWorkTile) unsigned char work_tiles[kWorkTileStages][sizeof(FwdWorkTile)];
    FwdWorkTilePipeline next_work_tiles;
    PipelineBarriers<Traits::kQueryStages> query_pipeline;
    PipelineBarriers<Traits::kKeyStages> key_pipeline;
    PipelineBarriers<Traits::kValueStages> value_pipeline;
    PipelineBarriers<Traits::kBiasStages> bias_pipelines[Traits::kConsumerWarpgroups];

    // At the barrier of a K stage. A thread that copies by cp.async, gathered keys or a relative bias of a grid, arrives
    // twice: after it has written the metadata, and when its copies have completed.
    static constexpr int kKeyArrivals =
        Traits::kGathers || kBias == BiasKind::kRelativeGrid ? 2 * kWarpgroupThreads : kProducerThreads<kBias>;

    static __device__ int next_work_tile_stage(int stage) { return stage == kWorkTileStages - 1 ? 0 : stage + 1; }
    __device__ FwdWorkTile& work_tile(int stage) { return reinterpret_cast<FwdWorkTile&>(work_tiles[stage]); }

    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        next_work_tiles.init();
        query_pipeline.init(1, kConsumerWarps);
        key_pipeline.init(kKeyArrivals, kConsumerWarps);
        value_pipeline.init(Traits::kGathers ? kWarpgroupThreads : 1, kConsumerWarps);
        for (auto& pipeline : bias_pipelines) pipeline.init(1, 4);
    }
};

}  // namespace flash_dmattn::cuda::sm90
