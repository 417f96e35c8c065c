// Shared memory and producer warpgroup of the pair bias kernel for dQ and dbias.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "row_stats.cuh"

namespace flash_dmattn::cuda::sm90 {

// kNBlocks: n_blocks of 64 keys of an MMA warpgroup.
template <typename T_, typename Bias_, int kNBlocks_>
struct PairBiasDqDbiasKernelTraits {
    using T = T_;
    using Bias = Bias_;
    using BiasBlock = PairBiasSmemBlock<T, Bias>;
    using BiasReader = PairBiasRowReader<T, Bias>;
    static constexpr int kConsumerWarpgroups = 2, kNBlocks = kNBlocks_, kAllNBlocks = kConsumerWarpgroups * kNBlocks;
    static constexpr int kRowStages = 2, kKeyStages = sizeof(Bias) == 4 ? 4 : 6;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    using RowsTile = SmemTile<T, kPairBiasRows, kPairBiasHeadDim>;
    using KvTile = SmemTile<T, 64, kPairBiasHeadDim>;
};

template <typename Traits>
struct PairBiasDqDbiasSharedStorage {
    // A stage is the m_block of one batch element.
    struct Rows {
        typename Traits::RowsTile query, out, dout;
    };
    struct RowMetadata {
        PairBiasActiveBlocks blocks;
        PairBiasSmemRowStats stats;
    };
    struct Keys {
        typename Traits::KvTile key, value;
    };

    alignas(kSmemTileAlign) Rows rows[Traits::kRowStages];
    alignas(kSmemTileAlign) Keys keys[Traits::kConsumerWarpgroups][Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::BiasBlock bias[Traits::kAllNBlocks];
    // Partial dQ of each warpgroup, of the last two batch elements: [batch % 2][warpgroup][fragment][thread].
    float4 dquery[2][Traits::kConsumerWarpgroups][kPairBiasHeadDim / 8][kWarpgroupThreads];
    RowMetadata row_metadata[Traits::kRowStages];
    PairBiasKeyFactors<64> factors[Traits::kConsumerWarpgroups][Traits::kKeyStages];  // of n_blocks that are not full
    PipelineBarriers<Traits::kRowStages> row_pipeline;
    PipelineBarriers<Traits::kKeyStages> key_pipelines[Traits::kConsumerWarpgroups];
    // rows_ready completes when a stage has row stats and its empty rows are zero, keys_zeroed when it has key factors
    // and its masked keys and values are zero.
    alignas(8) uint64_t rows_ready[Traits::kRowStages];
    alignas(8) uint64_t keys_zeroed[Traits::kConsumerWarpgroups][Traits::kKeyStages];
    alignas(8) uint64_t bias_full;

    // One thread calls.
    __device__ void init_pipelines() {
        row_pipeline.init(1, Traits::kConsumerWarpgroups * 4);
        mbarrier_init(smem_address(&bias_full), 1);
        for (auto& barrier : rows_ready) mbarrier_init(smem_address(&barrier), 1);
        for (auto& pipeline : key_pipelines) pipeline.init(1, 4);
        for (auto& pipeline : keys_zeroed)
            for (auto& barrier : pipeline) mbarrier_init(smem_address(&barrier), 1);
    }
};

// Entries that end in WG1 start one barrier per MMA warpgroup.
struct PairBiasDqDbiasNamedBarriers {
    enum : int {
        kDqueryPartialWG1 = 1,  // the other warpgroup has written its partial dQ
    };
};

// A partial dbias in the workspace: [splits, biases, heads, m_blocks, n_blocks, 64 x 64 in the order of registers].
template <typename Traits>
__device__ __forceinline__ float* pair_bias_dbias_partial(const BwdArgs& p, int64_t split, int64_t m_block,
                                                          int n_block) {
    return p.dbias_partials +
           ((split * p.dbias_tiles + m_block) * Traits::kAllNBlocks + n_block) * kPairBiasDbiasBlockSize;
}

// The first warp issues TMA loads. The second zeros empty rows and computes the row stats. The others zero masked keys,
// each of one MMA warpgroup.
template <typename Traits>
class PairBiasDqDbiasProducer {
public:
    using SharedStorage = PairBiasDqDbiasSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDqDbiasProducer(const BwdArgs& p, const PairBiasBwdTensorMaps& maps, SharedStorage& smem,
                                       const PairBiasWorkTile& work_tile)
        : p_(p), maps_(maps), smem_(smem), work_tile_(work_tile) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp == 0) return load();
        if (warp == 1) return produce_row_stats();
        if (pair_bias_masks_keys<64>(p_)) zero_masked_keys(warp - 2);
    }

private:
    using KeyPipeline = Pipeline<Traits::kKeyStages>;

    __device__ void load() {
        Pipeline<Traits::kRowStages> row_pipeline(smem_.row_pipeline);
        KeyPipeline key_pipelines[Traits::kConsumerWarpgroups] = {KeyPipeline(smem_.key_pipelines[0]),
                                                                  KeyPipeline(smem_.key_pipelines[1])};
        const int head = shared_head(work_tile_.head, p_.heads, p_.kv_heads);
        if (lane_id() == 0) load_bias();
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            const Sequence s(p_, batch);
            const PairBiasActiveBlocks blocks = PairBiasKeyMask<64>(p_, batch, work_tile_.head).blocks;
            if (lane_id() != 0) continue;
            row_pipeline.producer_acquire();
            smem_.row_metadata[row_pipeline.stage()].blocks = blocks;
            load_rows(s, smem_.rows[row_pipeline.stage()], row_pipeline.full());
            row_pipeline.advance();
#pragma unroll
            for (int i = 0; i < Traits::kNBlocks; ++i)
#pragma unroll
                for (int wg = 0; wg < Traits::kConsumerWarpgroups; ++wg) {
                    const int n_block = wg * Traits::kNBlocks + i;
                    if (!(blocks.active >> n_block & 1)) continue;
                    KeyPipeline& pipeline = key_pipelines[wg];
                    auto& keys = smem_.keys[wg][pipeline.stage()];
                    pipeline.producer_acquire();
                    mbarrier_arrive_and_expect_tx(pipeline.full(), sizeof(keys));
                    tma_load_rows(keys.key, maps_.key, pipeline.full(), p_, s, n_block * 64, head);
                    tma_load_rows(keys.value, maps_.value, pipeline.full(), p_, s, n_block * 64, head);
                    pipeline.advance();
                }
        }
    }
    __device__ void load_bias() {
        const int head = shared_head(work_tile_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_and_expect_tx(full, sizeof(smem_.bias));
        for (int tile = 0; tile < Traits::kAllNBlocks * Traits::BiasBlock::kTiles; ++tile)
            tma_load_4d(smem_address(&Traits::BiasBlock::tile(smem_.bias, tile)), &maps_.bias, full,
                        tile * kPairBiasCols, work_tile_.block * kPairBiasRows, head, work_tile_.bias_batch);
    }
    __device__ void load_rows(const Sequence& s, typename SharedStorage::Rows& rows, uint32_t full) {
        const int row = work_tile_.block * kPairBiasRows;
        mbarrier_arrive_and_expect_tx(full, sizeof(rows));
        tma_load_rows(rows.query, maps_.query, full, p_, s, row, work_tile_.head);
        tma_load_rows(rows.out, maps_.out, full, p_, s, row, work_tile_.head);
        tma_load_rows(rows.dout, maps_.dout, full, p_, s, row, work_tile_.head);
    }

    // Writes lse and D_i to shared memory, and D_i to global memory for the dK and dV kernel.
    __device__ void produce_row_stats() {
        Pipeline<Traits::kRowStages> pipeline(smem_.row_pipeline);
        const int first_row = work_tile_.block * kPairBiasRows;
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch, pipeline.advance()) {
            const Sequence s(p_, batch);
            const PairBiasRowStats stats(p_, p_.dlse, s, work_tile_.head, first_row);
            auto& rows = smem_.rows[pipeline.stage()];
            auto& row_stats = smem_.row_metadata[pipeline.stage()].stats;
            pipeline.consumer_wait();
            stats.zero_empty_rows(rows.query, rows.out, rows.dout);
            __syncwarp();
            dot_out_dout(rows, row_stats);
            float* delta = static_cast<float*>(p_.delta.data) + stat_offset(p_.delta, s, work_tile_.head) + first_row;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * lane_id() + i;
                row_stats.lse(row) = stats.lse[i];
                row_stats.delta(row) -= stats.delta[i];
                if (first_row + row < s.rows) delta[row] = row_stats.delta(row);
            }
            fence_and_arrive(smem_.rows_ready[pipeline.stage()]);
        }
    }
    // <dO_i, O_i>: the diagonal of dO O^T.
    __device__ void dot_out_dout(const typename SharedStorage::Rows& rows, PairBiasSmemRowStats& row_stats) {
        using RowsTile = typename Traits::RowsTile;
        const uint32_t dout = rows.dout.ldmatrix_lane_a(), out = rows.out.ldmatrix_lane_b();
#pragma unroll
        for (int first = 0; first < kPairBiasRows; first += 16) {
            float products[2][4] = {};  // with the first and the last eight rows of O
#pragma unroll
            for (int d = 0; d < kPairBiasHeadDim; d += 16) {
                uint32_t a[4], b[4];
                RowsTile::load_a(a, dout, first, d);
                RowsTile::load_b(b, out, first, d);
                mma_m16n8k16<T>(products[0], a, b[0], b[1]);
                mma_m16n8k16<T>(products[1], a, b[2], b[3]);
            }
            const int row = fragment_row();
            if (row / 2 * 2 == fragment_col()) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    row_stats.delta(first + h * 8 + row) = row % 2 == 0 ? products[h][2 * h] : products[h][2 * h + 1];
            }
            __syncwarp();
        }
    }

    // Writes which keys of the warpgroup's n_blocks are visible, and zeros the others.
    __device__ void zero_masked_keys(int wg) {
        KeyPipeline pipeline(smem_.key_pipelines[wg]);
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            const PairBiasKeyMask<64> mask(p_, batch, work_tile_.head);
            for (int i = 0; i < Traits::kNBlocks; ++i) {
                const int n_block = wg * Traits::kNBlocks + i;
                if (!(mask.blocks.active >> n_block & 1)) continue;
                pipeline.consumer_wait();
                zero_masked_keys(smem_.keys[wg][pipeline.stage()], smem_.factors[wg][pipeline.stage()], mask, n_block);
                fence_and_arrive(smem_.keys_zeroed[wg][pipeline.stage()]);
                pipeline.advance();
            }
        }
    }
    __device__ void zero_masked_keys(typename SharedStorage::Keys& stage, PairBiasKeyFactors<64>& factors,
                                     const PairBiasKeyMask<64>& mask, int n_block) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int key = w * 32 + lane_id();
            const bool is_visible = mask.visible_keys(n_block, w) >> lane_id() & 1;
            factors.set(key, is_visible);
            if (is_visible) continue;
            zero_row(stage.key, key);
            zero_row(stage.value, key);
        }
    }

    const BwdArgs& p_;
    const PairBiasBwdTensorMaps& maps_;
    SharedStorage& smem_;
    const PairBiasWorkTile& work_tile_;
};

}  // namespace flash_dmattn::cuda::sm90
