// Shared memory and producer warpgroup of the pair bias forward.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "bias_block.cuh"
#include "work_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

// TMA descriptors: rows as [D, heads, S, B], the bias as [Sk, Sq, heads, 1].
struct PairBiasFwdTensorMaps {
    CUtensorMap query, key, value, bias;
};

// kWhich: the index in kPairBiasFwdTiles.
template <typename T_, typename Bias_, int kWhich>
struct PairBiasFwdKernelTraits {
    using T = T_;
    using Bias = Bias_;
    using BiasBlock = PairBiasSmemBlock<T, Bias>;
    using BiasReader = PairBiasRowReader<T, Bias>;
    static constexpr float kLowestBias = kLowest<Bias>;
    static constexpr PairBiasFwdTileSizes kSizes = kPairBiasFwdTiles[kWhich];
    static constexpr int kConsumerWarpgroups = kSizes.warpgroups, kRows = kConsumerWarpgroups * 64, kKeys = kSizes.keys,
                         kStages = kSizes.stages;
    static constexpr int kWords = kKeys / 32, kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
    static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 56 : 32,
                         kConsumerRegisters = kConsumerWarpgroups == 2 ? 224 : 160;
    using QueryTile = SmemTile<T, kRows, kPairBiasHeadDim>;
    using KvTile = SmemTile<T, kKeys, kPairBiasHeadDim>;
};

template <typename Traits>
struct PairBiasFwdSharedStorage {
    struct KeyMetadata {
        uint32_t visible_keys[Traits::kWords];
        PairBiasKeyFactors<Traits::kKeys> factors;
    };

    alignas(kSmemTileAlign) typename Traits::QueryTile query;
    alignas(kSmemTileAlign) typename Traits::KvTile key[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::KvTile value[Traits::kStages];
    KeyMetadata metadata[Traits::kStages];  // of n_blocks that are not full
    PairBiasActiveBlocks blocks;            // of the current batch element
    PipelineBarriers<1> query_pipeline;
    PipelineBarriers<Traits::kStages> key_pipeline;
    alignas(8) uint64_t keys_zeroed[Traits::kStages];  // complete when masked keys and values of the stage are zero
    alignas(8) uint64_t bias_full;
    alignas(kSmemTileAlign) typename Traits::BiasBlock bias[1];  // [warpgroup][bias_blocks]

    static int64_t bytes(int bias_blocks) {
        return offsetof(PairBiasFwdSharedStorage, bias) +
               Traits::kConsumerWarpgroups * bias_blocks * sizeof(typename Traits::BiasBlock);
    }
    // One thread calls.
    __device__ void init_pipelines() {
        query_pipeline.init(1, Traits::kConsumerWarpgroups * 4);
        mbarrier_init(smem_address(&bias_full), 1);
        key_pipeline.init(1, Traits::kConsumerWarpgroups * 4);
        for (auto& barrier : keys_zeroed) mbarrier_init(smem_address(&barrier), 1);
    }
};

// The first warp issues TMA loads. The second zeros masked keys and values, and writes which keys are visible.
template <typename Traits>
class PairBiasFwdProducer {
public:
    using SharedStorage = PairBiasFwdSharedStorage<Traits>;

    __device__ PairBiasFwdProducer(const FwdArgs& p, const PairBiasSchedule& schedule,
                                   const PairBiasFwdTensorMaps& maps, SharedStorage& smem,
                                   const PairBiasWorkTile& work_tile)
        : p_(p), schedule_(schedule), maps_(maps), smem_(smem), work_tile_(work_tile),
          query_pipeline_(smem.query_pipeline), key_pipeline_(smem.key_pipeline) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > (pair_bias_masks_keys<Traits::kKeys>(p_) ? 1 : 0)) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            const PairBiasKeyMask<Traits::kKeys> mask(p_, batch, work_tile_.head);
            if (warp == 1) {
                zero_masked_keys(mask);
            } else if (lane_id() == 0) {
                load(Sequence(p_, batch), mask.blocks);
            }
        }
    }

private:
    __device__ void load_bias() {
        using BiasBlock = typename Traits::BiasBlock;
        const int tiles = schedule_.bias_blocks * BiasBlock::kTiles;
        const int head = shared_head(work_tile_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_and_expect_tx(
            full, Traits::kConsumerWarpgroups * tiles * static_cast<int>(sizeof(typename BiasBlock::Tile)));
        for (int i = 0; i < Traits::kConsumerWarpgroups * tiles; ++i)
            tma_load_4d(smem_address(&BiasBlock::tile(smem_.bias, i)), &maps_.bias, full, i % tiles * kPairBiasCols,
                        work_tile_.block * Traits::kRows + i / tiles * 64, head, work_tile_.bias_batch);
    }
    __device__ void load(const Sequence& s, const PairBiasActiveBlocks& blocks) {
        query_pipeline_.producer_acquire();
        smem_.blocks = blocks;
        mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename Traits::QueryTile));
        tma_load_rows(smem_.query, maps_.query, query_pipeline_.full(), p_, s, work_tile_.block * Traits::kRows,
                      work_tile_.head);
        query_pipeline_.advance();
        const int head = shared_head(work_tile_.head, p_.heads, p_.kv_heads);
        for (uint32_t left = blocks.active; left != 0; left &= left - 1, key_pipeline_.advance()) {
            const int key = (__ffs(left) - 1) * Traits::kKeys;
            key_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(key_pipeline_.full(), 2 * sizeof(typename Traits::KvTile));
            tma_load_rows(smem_.key[key_pipeline_.stage()], maps_.key, key_pipeline_.full(), p_, s, key, head);
            tma_load_rows(smem_.value[key_pipeline_.stage()], maps_.value, key_pipeline_.full(), p_, s, key, head);
        }
    }

    __device__ void zero_masked_keys(const PairBiasKeyMask<Traits::kKeys>& mask) {
        for (uint32_t left = mask.blocks.active; left != 0; left &= left - 1, key_pipeline_.advance()) {
            const int n_block = __ffs(left) - 1;
            key_pipeline_.consumer_wait();
            const int stage = key_pipeline_.stage();
            auto& metadata = smem_.metadata[stage];
#pragma unroll
            for (int w = 0; w < Traits::kWords; ++w) {
                const uint32_t visible_keys = mask.visible_keys(n_block, w);
                const int key = w * 32 + lane_id();
                const bool is_visible = visible_keys >> lane_id() & 1;
                if (lane_id() == 0) metadata.visible_keys[w] = visible_keys;
                metadata.factors.set(key, is_visible);
                if (is_visible) continue;
                zero_row(smem_.key[stage], key);
                zero_row(smem_.value[stage], key);
            }
            fence_and_arrive(smem_.keys_zeroed[stage]);
        }
    }

    const FwdArgs& p_;
    const PairBiasSchedule& schedule_;
    const PairBiasFwdTensorMaps& maps_;
    SharedStorage& smem_;
    const PairBiasWorkTile& work_tile_;
    Pipeline<1> query_pipeline_;
    Pipeline<Traits::kStages> key_pipeline_;
};

}  // namespace flash_dmattn::cuda::sm90
