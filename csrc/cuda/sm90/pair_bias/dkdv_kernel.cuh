// dK and dV with a dense bias that batch elements share.
//
// A block owns 64 keys for each warp group that multiplies, and goes over all rows; scores stand transposed, keys by rows.
// The first warp group loads: its first warp by the copy engine, its second what comes with rows.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "row_stats.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T_, int kConsumerWarpgroups_>
struct PairBiasDkeyKernelTraits {
    using T = T_;
    static constexpr int kConsumerWarpgroups = kConsumerWarpgroups_, kKeys = kConsumerWarpgroups * 64, kRowStages = 3,
                         kKeyStages = 2;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 40 : 32,
                         kConsumerRegisters = kConsumerWarpgroups == 2 ? 232 : 160;
    using RowsTile = SmemTile<T, kPairBiasRows, kPairBiasHeadDim>;
    using KeysTile = SmemTile<T, kKeys, kPairBiasHeadDim>;
};

template <typename Traits>
struct PairDkeySharedStorage {
    using T = typename Traits::T;
    struct KeyInfo {
        uint32_t visited_rows;                              // a bit for each tile of them
        uint32_t columns[Traits::kConsumerWarpgroups * 2];  // keys that are visible
    };

    alignas(kSmemTileAlign) typename Traits::KeysTile key[Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::KeysTile value[Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile query[Traits::kRowStages];
    alignas(kSmemTileAlign) typename Traits::RowsTile dout[Traits::kRowStages];
    PairBiasRowInfo rows[Traits::kRowStages];
    KeyInfo keys[Traits::kKeyStages];
    PipelineBarriers<Traits::kKeyStages> key_pipeline;
    PipelineBarriers<Traits::kRowStages> row_pipeline;
    alignas(8) uint64_t cleared[Traits::kRowStages];  // completes when what comes with the rows of a stage is there
    alignas(8) uint64_t bias_full;
    alignas(kSmemTileAlign) PairBiasSmemTile<T> bias[1];  // [groups][bias_tiles]

    static size_t bytes(int bias_tiles) {
        return offsetof(PairDkeySharedStorage, bias) +
               Traits::kConsumerWarpgroups * bias_tiles * sizeof(PairBiasSmemTile<T>);
    }
    // By one thread.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        key_pipeline.init(1, kConsumerWarps);
        mbarrier_init(smem_address(&bias_full), 1);
        row_pipeline.init(1, kConsumerWarps);
        for (auto& barrier : cleared) mbarrier_init(smem_address(&barrier), 1);
    }
};

template <typename Traits>
class PairBiasDkeyProducer {
public:
    using SharedStorage = PairDkeySharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDkeyProducer(const BwdArgs& p, const PairBiasSchedule& schedule, const PairBiasBwdMaps& maps,
                                    SharedStorage& smem, const PairBiasWorkTile& block)
        : p_(p),
          schedule_(schedule),
          maps_(maps),
          smem_(smem),
          block_(block),
          key_pipeline_(smem.key_pipeline),
          row_pipeline_(smem.row_pipeline) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > 1) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            const PairBiasKeys<64> keys(p_, batch, block_.head);
            typename SharedStorage::KeyInfo info;
            uint32_t any = 0;
#pragma unroll
            for (int i = 0; i < Traits::kConsumerWarpgroups * 2; ++i)
                any |= info.columns[i] = keys.columns(block_.tile * Traits::kConsumerWarpgroups + i / 2, i % 2);
            info.visited_rows = any != 0 ? (1u << schedule_.bias_tiles) - 1 : 0;  // all, or none
            if (warp == 1) {
                produce_row_stats(Sequence(p_, batch), info.visited_rows);
            } else if (lane_id() == 0) {
                load(Sequence(p_, batch), info);
            }
        }
    }

private:
    __device__ void load_bias() {
        const int tiles = schedule_.bias_tiles, head = shared_head(block_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_and_expect_tx(
            full, Traits::kConsumerWarpgroups * tiles * static_cast<int>(sizeof(PairBiasSmemTile<T>)));
        for (int i = 0; i < Traits::kConsumerWarpgroups * tiles; ++i)
            tma_load_4d(smem_address(&smem_.bias[i]), &maps_.bias, full, block_.tile * Traits::kKeys + i / tiles * 64,
                        i % tiles * kPairBiasRows, head, block_.bias_batch);
    }
    __device__ void load(const Sequence& s, const typename SharedStorage::KeyInfo& info) {
        const int key = block_.tile * Traits::kKeys, stage = key_pipeline_.stage();
        key_pipeline_.producer_acquire();
        smem_.keys[stage] = info;
        mbarrier_arrive_and_expect_tx(key_pipeline_.full(), 2 * sizeof(typename Traits::KeysTile));
        copy_rows(smem_.key[stage], maps_.key, key_pipeline_.full(), p_, s, key, block_.head);
        copy_rows(smem_.value[stage], maps_.value, key_pipeline_.full(), p_, s, key, block_.head);
        key_pipeline_.advance();
        for (uint32_t left = info.visited_rows; left != 0; left &= left - 1, row_pipeline_.advance()) {
            const int row = (__ffs(left) - 1) * kPairBiasRows;
            row_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(row_pipeline_.full(), 2 * sizeof(typename Traits::RowsTile));
            copy_rows(smem_.query[row_pipeline_.stage()], maps_.query, row_pipeline_.full(), p_, s, row, block_.head);
            copy_rows(smem_.dout[row_pipeline_.stage()], maps_.dout, row_pipeline_.full(), p_, s, row, block_.head);
        }
    }

    __device__ void produce_row_stats(const Sequence& s, uint32_t visited) {
        for (uint32_t left = visited; left != 0; left &= left - 1, row_pipeline_.advance()) {
            const PairBiasRowStats stats(p_, p_.delta, s, block_.head, (__ffs(left) - 1) * kPairBiasRows);
            row_pipeline_.consumer_wait();
            const int stage = row_pipeline_.stage();
            stats.clear_empty(smem_.query[stage], smem_.dout[stage]);
            smem_.rows[stage].twos[lane_id()] = {stats.lse[0], stats.lse[1], stats.delta[0], stats.delta[1]};
            fence_proxy_async();
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(smem_address(&smem_.cleared[stage]));
        }
    }

    const BwdArgs& p_;
    const PairBiasSchedule& schedule_;
    const PairBiasBwdMaps& maps_;
    SharedStorage& smem_;
    const PairBiasWorkTile& block_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kRowStages> row_pipeline_;
};

template <typename Traits>
class PairBiasDkeyConsumer {
public:
    using SharedStorage = PairDkeySharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDkeyConsumer(const BwdArgs& p, const PairBiasSchedule& schedule, SharedStorage& smem,
                                    const PairBiasWorkTile& block)
        : p_(p),
          schedule_(schedule),
          smem_(smem),
          block_(block),
          warpgroup_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
          warp_key_(warp_id() % 4 * 16),
          key_(block.tile * Traits::kKeys + warpgroup_ * 64 + warp_key_ + fragment_row()),
          dkey_rows_(first_row(p.dkey)),
          dvalue_rows_(first_row(p.dvalue)),
          bias_lane_(opaque(bias_lane())),
          key_pipeline_(smem.key_pipeline),
          row_pipeline_(smem.row_pipeline),
          multiplied_pipeline_(smem.row_pipeline) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            key_pipeline_.consumer_wait();
            const auto& info = smem_.keys[key_pipeline_.stage()];
            sum(info.visited_rows);
            const uint32_t visible =
                info.columns[(warpgroup_ * 64 + warp_key_) / 32] >> (warp_key_ % 32 + fragment_row());
            key_pipeline_.release();
            key_pipeline_.advance();
            store(visible);
            dkey_rows_ += p_.dkey.batch_stride;
            dvalue_rows_ += p_.dvalue.batch_stride;
        }
    }

private:
    static constexpr int kTiles = kPairBiasRows / 8, kDimTiles = kPairBiasHeadDim / 8;
    using RowsTile = typename Traits::RowsTile;
    using KeysTile = typename Traits::KeysTile;
    using BiasTile = PairBiasSmemTile<T>;
    using Pairs = float[1][kTiles][4];      // keys by rows
    using DimSum = float[1][kDimTiles][4];  // keys by columns
    using Packed = uint32_t[kPairBiasRows / 16][4];

    __device__ T* first_row(const RowsView& view) const {
        return static_cast<T*>(view.data) + block_.begin * view.batch_stride + block_.head * view.head_stride +
               key_ * view.row_stride;
    }
    // Where this lane reads the group's biases: of 16 rows and this warp's 16 keys, transposed to what two neighbouring
    // tiles of the accumulator hold.
    __device__ uint32_t bias_lane() const {
        const int lane = lane_id();
        const BiasTile& bias = smem_.bias[warpgroup_ * schedule_.bias_tiles];
        return bias.address(lane % 8 + lane / 16 * 8, warp_key_ / 8 + lane / 8 % 2);
    }

    __device__ __forceinline__ void sum(uint32_t visited) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dkey_[0][n][i] = dvalue_[0][n][i] = 0;
        Pairs scores, dprobs;
        Packed probs, dscores;
        const int key_stage = key_pipeline_.stage();
        const SmemDescriptor<KeysTile> key(smem_.key[key_stage], warpgroup_ * 64),
            value(smem_.value[key_stage], warpgroup_ * 64);
        for (uint32_t left = visited; left != 0; left &= left - 1) {
            const int stage = row_pipeline_.stage();
            row_pipeline_.consumer_wait();
            mbarrier_wait(smem_address(&smem_.cleared[stage]), row_pipeline_.phase());
            const SmemDescriptor<RowsTile> query(smem_.query[stage]), dout(smem_.dout[stage]);
            issue_scores(scores, key, query);
            issue_scores(dprobs, value, dout);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(dprobs);
            warpgroup_fence_operand(dkey_);
            warpgroup_fence_operand(dvalue_);
            if (left != visited) release_rows();
            differentiate(scores, dprobs, smem_.rows[stage],
                          bias_lane_ + (__ffs(left) - 1) * static_cast<uint32_t>(sizeof(BiasTile)));
            to_a_operand<T>(scores, probs);
            to_a_operand<T>(dprobs, dscores);
            issue_sum(dvalue_, probs, dout);
            issue_sum(dkey_, dscores, query);
            row_pipeline_.advance();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dkey_);
        warpgroup_fence_operand(dvalue_);
        if (visited != 0) release_rows();
    }
    __device__ __forceinline__ void release_rows() {
        multiplied_pipeline_.release();
        multiplied_pipeline_.advance();
    }

    // S = K Q^T, or dP = V dO^T.
    static __device__ __forceinline__ void issue_scores(Pairs& pairs, const SmemDescriptor<KeysTile>& keys,
                                                        const SmemDescriptor<RowsTile>& rows) {
        warpgroup_fence_operand(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kPairBiasHeadDim; d += 16)
            Wgmma<kPairBiasRows>::template multiply<T, false, false>(pairs, keys.across(d), rows.across(d), d > 0);
        wgmma_commit_group();
    }
    // dV += P dO, or dK += dS Q.
    static __device__ __forceinline__ void issue_sum(DimSum& sum, const Packed& pairs,
                                                     const SmemDescriptor<RowsTile>& rows) {
        warpgroup_fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kPairBiasRows; r += 16)
            Wgmma<kPairBiasHeadDim>::template multiply<T, true>(sum, pairs[r / 16], rows.down(r), true);
        wgmma_commit_group();
    }

    // S and dP to P and dS; `at`: where this lane reads the biases. A key that a mask hides has rows of its own, in
    // whose place zeros are stored.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, const PairBiasRowInfo& rows, uint32_t at) const {
        const float scale_log2 = schedule_.scale * kLog2E;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            ldmatrix_x4_trans(dense, at + n * 8 * kPairBiasCols * sizeof(T));
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float4 two = rows.twos[(m * 8 + fragment_col()) / 2];
                const float lse[2] = {two.x, two.y}, delta[2] = {two.z, two.w};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 b = unpack<T>(dense[m % 2 * 2 + h]);
                    float *x = s[0][m] + 2 * h, *dx = dp[0][m] + 2 * h;
                    score_gradient<false>(x[0], dx[0], fmaf(b.x, kLog2E, -lse[0]), delta[0], scale_log2, 0, true);
                    score_gradient<false>(x[1], dx[1], fmaf(b.y, kLog2E, -lse[1]), delta[1], scale_log2, 0, true);
                }
            }
        }
    }

    // Bits 0 and 8: whether this lane's keys are visible.
    __device__ __forceinline__ void store(uint32_t visible) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!(visible >> h * 8 & 1)) clear_row(h);
            store_row(dkey_, h, schedule_.scale, dkey_rows_ + h * 8 * p_.dkey.row_stride, static_cast<int>(p_.head_dim),
                      key_ + h * 8 < p_.seqlen_k);
            store_row(dvalue_, h, 1, dvalue_rows_ + h * 8 * p_.dvalue.row_stride, static_cast<int>(p_.head_dim),
                      key_ + h * 8 < p_.seqlen_k);
        }
    }
    __device__ __forceinline__ void clear_row(int h) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) dkey_[0][n][2 * h + e] = dvalue_[0][n][2 * h + e] = 0;
    }

    const BwdArgs& p_;
    const PairBiasSchedule& schedule_;
    SharedStorage& smem_;
    const PairBiasWorkTile& block_;
    const int warpgroup_;
    const int warp_key_;           // this warp's first key of the group's
    const int key_;                // this lane's first of two, of the sequence
    T *dkey_rows_, *dvalue_rows_;  // from there on, in the current batch element
    const uint32_t bias_lane_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kRowStages> row_pipeline_, multiplied_pipeline_;
    DimSum dkey_, dvalue_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_bias_dkey_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ PairBiasSchedule schedule,
                          const __grid_constant__ PairBiasBwdMaps maps) {
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PairDkeySharedStorage<Traits>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_pipelines();
    __syncthreads();
    const PairBiasWorkTile block(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PairBiasDkeyProducer<Traits>(p, schedule, maps, smem, block).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PairBiasDkeyConsumer<Traits>(p, schedule, smem, block).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
