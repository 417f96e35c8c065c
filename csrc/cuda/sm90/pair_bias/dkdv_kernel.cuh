// dK and dV of the pair bias backward.
//
// A CTA owns an n_block, 64 keys for each MMA warpgroup, and loops over the m_blocks of its batch elements. Scores are
// transposed, [keys, rows]: P and dS are the A operands of dV = P dO and dK = dS Q as registers hold them.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/gemm.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "row_stats.cuh"

namespace flash_dmattn::cuda::sm90 {

// kMaxSeqlenQ: rows whose biases fit in shared memory.
template <typename T_, typename Bias, int kConsumerWarpgroups_, int kMaxSeqlenQ_, int kRowStages_, int kKeyStages_>
struct PairBiasDkdvKernelTraits {
    using T = T_;
    using BiasBlock = PairBiasSmemBlock<T, Bias>;
    using BiasReader = PairBiasKeyReader<T, Bias>;
    static constexpr int kConsumerWarpgroups = kConsumerWarpgroups_, kKeys = kConsumerWarpgroups * 64,
                         kMaxSeqlenQ = kMaxSeqlenQ_, kRowStages = kRowStages_, kKeyStages = kKeyStages_;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
    static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 40 : 32,
                         kConsumerRegisters = kConsumerWarpgroups == 2 ? 232 : 160;
    using RowsTile = SmemTile<T, kPairBiasRows, kPairBiasHeadDim>;
    using KvTile = SmemTile<T, kKeys, kPairBiasHeadDim>;
};

template <typename Traits>
struct PairBiasDkdvSharedStorage {
    struct KeyMetadata {
        uint32_t active_m_blocks;                                // one bit each
        uint32_t visible_keys[Traits::kConsumerWarpgroups * 2];  // words
    };

    alignas(kSmemTileAlign) typename Traits::KvTile key[Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::KvTile value[Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile query[Traits::kRowStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile dout[Traits::kRowStages];
    PairBiasSmemRowStats row_stats[Traits::kRowStages];
    KeyMetadata metadata[Traits::kKeyStages];
    PipelineBarriers<Traits::kKeyStages> key_pipeline;
    PipelineBarriers<Traits::kRowStages> row_pipeline;
    // Complete when a stage has row stats and its empty rows are zero.
    alignas(8) uint64_t rows_ready[Traits::kRowStages];
    alignas(8) uint64_t bias_full;
    alignas(kSmemTileAlign) typename Traits::BiasBlock bias[1];  // [warpgroup][bias_blocks]

    static int64_t bytes(int bias_blocks) {
        return offsetof(PairBiasDkdvSharedStorage, bias) +
               Traits::kConsumerWarpgroups * bias_blocks * sizeof(typename Traits::BiasBlock);
    }
    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        key_pipeline.init(1, kConsumerWarps);
        mbarrier_init(smem_address(&bias_full), 1);
        row_pipeline.init(1, kConsumerWarps);
        for (auto& barrier : rows_ready) mbarrier_init(smem_address(&barrier), 1);
    }
};

// The first warp issues TMA loads. The second zeros empty rows and writes the row stats.
template <typename Traits>
class PairBiasDkdvProducer {
public:
    using SharedStorage = PairBiasDkdvSharedStorage<Traits>;

    __device__ PairBiasDkdvProducer(const BwdArgs& p, const PairBiasSchedule& schedule,
                                    const PairBiasBwdTensorMaps& maps, SharedStorage& smem,
                                    const PairBiasWorkTile& work_tile)
        : p_(p), schedule_(schedule), maps_(maps), smem_(smem), work_tile_(work_tile), key_pipeline_(smem.key_pipeline),
          row_pipeline_(smem.row_pipeline) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > 1) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            const PairBiasKeyMask<64> mask(p_, batch, work_tile_.head);
            typename SharedStorage::KeyMetadata metadata;
            uint32_t any = 0;
#pragma unroll
            for (int i = 0; i < Traits::kConsumerWarpgroups * 2; ++i)
                any |= metadata.visible_keys[i] =
                    mask.visible_keys(work_tile_.block * Traits::kConsumerWarpgroups + i / 2, i % 2);
            metadata.active_m_blocks = any != 0 ? (1u << schedule_.bias_blocks) - 1 : 0;  // all or none
            if (warp == 1) {
                produce_row_stats(Sequence(p_, batch), metadata.active_m_blocks);
            } else if (lane_id() == 0) {
                load(Sequence(p_, batch), metadata);
            }
        }
    }

private:
    __device__ void load_bias() {
        using BiasBlock = typename Traits::BiasBlock;
        const int blocks = schedule_.bias_blocks, head = shared_head(work_tile_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_and_expect_tx(full, Traits::kConsumerWarpgroups * blocks * static_cast<int>(sizeof(BiasBlock)));
        for (int i = 0; i < Traits::kConsumerWarpgroups * blocks; ++i) {
            const int key = work_tile_.block * Traits::kKeys + i / blocks * 64;
#pragma unroll
            for (int tile = 0; tile < BiasBlock::kTiles; ++tile)
                tma_load_4d(smem_address(&smem_.bias[i].tiles[tile]), &maps_.bias, full,
                            key * BiasBlock::kTiles + tile * kPairBiasCols, i % blocks * kPairBiasRows, head,
                            work_tile_.bias_batch);
        }
    }
    __device__ void load(const Sequence& s, const typename SharedStorage::KeyMetadata& metadata) {
        const int key = work_tile_.block * Traits::kKeys, stage = key_pipeline_.stage();
        key_pipeline_.producer_acquire();
        smem_.metadata[stage] = metadata;
        mbarrier_arrive_and_expect_tx(key_pipeline_.full(), 2 * sizeof(typename Traits::KvTile));
        tma_load_rows(smem_.key[stage], maps_.key, key_pipeline_.full(), p_, s, key, work_tile_.head);
        tma_load_rows(smem_.value[stage], maps_.value, key_pipeline_.full(), p_, s, key, work_tile_.head);
        key_pipeline_.advance();
        for (uint32_t left = metadata.active_m_blocks; left != 0; left &= left - 1, row_pipeline_.advance()) {
            const int row = (__ffs(left) - 1) * kPairBiasRows;
            row_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(row_pipeline_.full(), 2 * sizeof(typename Traits::RowsTile));
            tma_load_rows(smem_.query[row_pipeline_.stage()], maps_.query, row_pipeline_.full(), p_, s, row,
                          work_tile_.head);
            tma_load_rows(smem_.dout[row_pipeline_.stage()], maps_.dout, row_pipeline_.full(), p_, s, row,
                          work_tile_.head);
        }
    }

    __device__ void produce_row_stats(const Sequence& s, uint32_t active_m_blocks) {
        for (uint32_t left = active_m_blocks; left != 0; left &= left - 1, row_pipeline_.advance()) {
            const PairBiasRowStats stats(p_, p_.delta, s, work_tile_.head, (__ffs(left) - 1) * kPairBiasRows);
            row_pipeline_.consumer_wait();
            const int stage = row_pipeline_.stage();
            stats.zero_empty_rows(smem_.query[stage], smem_.dout[stage]);
            smem_.row_stats[stage].row_pairs[lane_id()] = {stats.lse[0], stats.lse[1], stats.delta[0], stats.delta[1]};
            fence_and_arrive(smem_.rows_ready[stage]);
        }
    }

    const BwdArgs& p_;
    const PairBiasSchedule& schedule_;
    const PairBiasBwdTensorMaps& maps_;
    SharedStorage& smem_;
    const PairBiasWorkTile& work_tile_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kRowStages> row_pipeline_;
};

// An MMA warpgroup: 64 keys.
template <typename Traits>
class PairBiasDkdvConsumer {
public:
    using SharedStorage = PairBiasDkdvSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDkdvConsumer(const BwdArgs& p, const PairBiasSchedule& schedule, SharedStorage& smem,
                                    const PairBiasWorkTile& work_tile)
        : p_(p), schedule_(schedule), smem_(smem), work_tile_(work_tile),
          warpgroup_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1)),
          warp_key_(warp_id() % 4 * 16),
          key_(work_tile.block * Traits::kKeys + warpgroup_ * 64 + warp_key_ + fragment_row()),
          dkey_rows_(first_row(p.dkey)), dvalue_rows_(first_row(p.dvalue)),
          bias_reader_(smem.bias[warpgroup_ * schedule.bias_blocks], warp_key_), key_pipeline_(smem.key_pipeline),
          row_pipeline_(smem.row_pipeline), released_rows_(smem.row_pipeline) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            key_pipeline_.consumer_wait();
            const auto& metadata = smem_.metadata[key_pipeline_.stage()];
            mainloop(metadata.active_m_blocks);
            const uint32_t visible =
                metadata.visible_keys[(warpgroup_ * 64 + warp_key_) / 32] >> (warp_key_ % 32 + fragment_row());
            key_pipeline_.consumer_release();
            key_pipeline_.advance();
            epilogue(visible);
            dkey_rows_ += p_.dkey.batch_stride;
            dvalue_rows_ += p_.dvalue.batch_stride;
        }
    }

private:
    static constexpr int kScoreFragments = kPairBiasRows / 8, kDimFragments = kPairBiasHeadDim / 8;
    using RowsTile = typename Traits::RowsTile;
    using KvTile = typename Traits::KvTile;
    using Scores = float[1][kScoreFragments][4];     // [keys, rows]
    using Accumulator = float[1][kDimFragments][4];  // [keys, D]
    using AOperand = uint32_t[kPairBiasRows / 16][4];

    __device__ T* first_row(const RowsView& view) const {
        return static_cast<T*>(view.data) + work_tile_.batch_begin * view.batch_stride +
               work_tile_.head * view.head_stride + key_ * view.row_stride;
    }

    __device__ __forceinline__ void mainloop(uint32_t active_m_blocks) {
        clear(dkey_);
        clear(dvalue_);
        Scores scores, dprobs;
        AOperand probs, dscores;
        const int key_stage = key_pipeline_.stage();
        const SmemDescriptor<KvTile> key(smem_.key[key_stage], warpgroup_ * 64),
            value(smem_.value[key_stage], warpgroup_ * 64);
        for (uint32_t left = active_m_blocks; left != 0; left &= left - 1) {
            const int stage = row_pipeline_.stage();
            row_pipeline_.consumer_wait();
            mbarrier_wait(smem_address(&smem_.rows_ready[stage]), row_pipeline_.phase());
            const SmemDescriptor<RowsTile> query(smem_.query[stage]), dout(smem_.dout[stage]);
            gemm_ss<true, Major::kK, Major::kK>(scores, key, query);   // S = K Q^T
            gemm_ss<true, Major::kK, Major::kK>(dprobs, value, dout);  // dP = V dO^T
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(dprobs);
            warpgroup_fence_operand(dkey_);
            warpgroup_fence_operand(dvalue_);
            if (left != active_m_blocks) release_rows();
            compute_dscores(scores, dprobs, smem_.row_stats[stage], __ffs(left) - 1);
            to_a_operand<T>(scores, probs);
            to_a_operand<T>(dprobs, dscores);
            gemm_rs<false, Major::kMN>(dvalue_, probs, dout);
            gemm_rs<false, Major::kMN>(dkey_, dscores, query);
            row_pipeline_.advance();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dkey_);
        warpgroup_fence_operand(dvalue_);
        if (active_m_blocks != 0) release_rows();
    }
    __device__ __forceinline__ void release_rows() {
        released_rows_.consumer_release();
        released_rows_.advance();
    }

    // S and dP to P and dS. Masked keys need no mask: their rows of dK and dV are zeroed in the epilogue.
    __device__ __forceinline__ void compute_dscores(Scores& s, Scores& dp, const PairBiasSmemRowStats& row_stats,
                                                    int m_block) const {
        constexpr bool kClamps = needs_clamp<T>(BiasKind::kDense);
        const float scale_log2 = schedule_.scale * kLog2E;
#pragma unroll
        for (int n = 0; n < kScoreFragments; n += 2) {
            float2 bias[4];
            bias_reader_.load(bias, m_block, n);
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float4 stats = row_stats.row_pairs[(m * 8 + fragment_col()) / 2];
                const float lse[2] = {stats.x, stats.y}, delta[2] = {stats.z, stats.w};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 b = bias[m % 2 * 2 + h];
                    float *x = s[0][m] + 2 * h, *dx = dp[0][m] + 2 * h;
                    score_gradient<false, kClamps>(x[0], dx[0], fmaf(b.x, kLog2E, -lse[0]), delta[0], scale_log2, 0,
                                                   true);
                    score_gradient<false, kClamps>(x[1], dx[1], fmaf(b.y, kLog2E, -lse[1]), delta[1], scale_log2, 0,
                                                   true);
                }
            }
        }
    }

    // Bits 0 and 8 of `visible`: whether this lane's two keys are.
    __device__ __forceinline__ void epilogue(uint32_t visible) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!(visible >> h * 8 & 1)) zero_key(h);
            store_row(dkey_, h, schedule_.scale, dkey_rows_ + h * 8 * p_.dkey.row_stride, static_cast<int>(p_.head_dim),
                      key_ + h * 8 < p_.seqlen_k);
            store_row(dvalue_, h, 1, dvalue_rows_ + h * 8 * p_.dvalue.row_stride, static_cast<int>(p_.head_dim),
                      key_ + h * 8 < p_.seqlen_k);
        }
    }
    __device__ __forceinline__ void zero_key(int h) {
#pragma unroll
        for (int n = 0; n < kDimFragments; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) dkey_[0][n][2 * h + e] = dvalue_[0][n][2 * h + e] = 0;
    }

    const BwdArgs& p_;
    const PairBiasSchedule& schedule_;
    SharedStorage& smem_;
    const PairBiasWorkTile& work_tile_;
    const int warpgroup_;
    const int warp_key_;           // this warp's first key in the warpgroup
    const int key_;                // this lane's first key of two, in the sequence
    T *dkey_rows_, *dvalue_rows_;  // at key_, in the current batch element
    const typename Traits::BiasReader bias_reader_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kRowStages> row_pipeline_, released_rows_;  // released_rows_: the stage of the GEMMs in flight
    Accumulator dkey_, dvalue_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_bias_dkdv_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ PairBiasSchedule schedule,
                          const __grid_constant__ PairBiasBwdTensorMaps maps) {
    grid_dependency_sync();
    auto& smem = init_shared_storage<PairBiasDkdvSharedStorage<Traits>>();
    const PairBiasWorkTile work_tile(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PairBiasDkdvProducer<Traits>(p, schedule, maps, smem, work_tile).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PairBiasDkdvConsumer<Traits>(p, schedule, smem, work_tile).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
