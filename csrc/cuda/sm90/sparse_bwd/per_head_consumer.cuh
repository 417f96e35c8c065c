// An MMA warpgroup of the per-head sparse backward: dK, dV and the bias's gradient of 64 keys of each n_block, and dQ
// of 64 rows.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/gemm.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/zero_rows.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/common/dkv_accum.cuh"
#include "per_head_shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class PerHeadSparseBwdConsumer {
public:
    using T = typename Traits::T;
    using SharedStorage = PerHeadSparseBwdSharedStorage<Traits>;

    __device__ PerHeadSparseBwdConsumer(const BwdArgs& p, const BwdScale& scale, SharedStorage& smem)
        : p_(p), scale_(scale), smem_(smem), warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1),
          warp_key_((warp_id() - 4) * 16), key_pipeline_(smem.key_pipeline), value_pipeline_(smem.value_pipeline) {}

    __device__ __forceinline__ void run() {
        clear(dq_);
        mbarrier_wait(smem_address(&smem_.rows_full), 0);
        zero_empty_rows();
        const PerHeadSparseBwdWorkTile& work_tile = smem_.work_tile();
        const DkvAccum accum(p_, work_tile.s, shared_head(work_tile.head, p_.heads, p_.kv_heads), kHeadDim);
        const int num_n_blocks = smem_.num_n_blocks;
        for (int n_block = 0; n_block < num_n_blocks; ++n_block) step(n_block, num_n_blocks, accum);
        store_dq();
        tma_store_wait_group();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim;
    static constexpr int kThreads = Traits::kConsumerWarpgroups * kWarpgroupThreads;
    static constexpr int kHalf = kRows / 2;
    using RowsTile = typename Traits::RowsTile;
    using KvTile = typename Traits::KvTile;
    using ScoresTile = typename Traits::ScoresTile;
    using ScoresFragment = float[1][kHalf / 8][4];  // keys x half of the rows
    using ScoresOperand = uint32_t[kHalf / 16][4];
    using DimFragment = float[1][kHeadDim / 8][4];  // dK, dV: keys x head_dim; dQ: rows x head_dim

    __device__ void sync_consumers() const { named_barrier_sync(BwdNamedBarriers::kConsumers, kThreads); }

    // One n_block. S and dP are computed in halves of the rows: all of them would not fit the registers beside dQ and
    // P.
    __device__ __forceinline__ void step(int n_block, int num_n_blocks, const DkvAccum& accum) {
        ScoresFragment scores[2], dprobs[2];
        ScoresOperand probs[2], dscores;
        key_pipeline_.consumer_wait();
        fence_proxy_async();  // cp.async wrote the keys
        gemm_scores(scores[0], key(), smem_.query, 0);
        value_pipeline_.consumer_wait();
        fence_proxy_async();
        gemm_scores(dprobs[0], value(), smem_.dout, 0);
        gemm_scores(scores[1], key(), smem_.query, 1);
        keys_.begin(smem_.keys[key_pipeline_.stage()], warp_key_);
        wgmma_wait_group<1>();
        warpgroup_fence_operand(scores[0]);
        warpgroup_fence_operand(dprobs[0]);
        compute_p_ds_gathered(scores[0], dprobs[0], 0);
        to_a_operand<T>(scores[0], probs[0]);
        to_a_operand<T>(dprobs[0], dscores);
        if (n_block > 0) named_barrier_sync(BwdNamedBarriers::kDscoresReadWG1 + warpgroup_, kThreads);
        store_dscores(dscores, 0);
        gemm_scores(dprobs[1], value(), smem_.dout, 1);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(scores[1]);
        warpgroup_fence_operand(dprobs[1]);
        value_pipeline_.consumer_release();
        value_pipeline_.advance();
        compute_p_ds_gathered(scores[1], dprobs[1], 1);
        to_a_operand<T>(scores[1], probs[1]);
        to_a_operand<T>(dprobs[1], dscores);
        store_dscores(dscores, 1);
        fence_proxy_async();
        keys_.add_dbias(p_, smem_.work_tile().s, smem_.work_tile().head);

        DimFragment dv, dk;
        auto& stages = smem_.dkv[warp_id() - 4];
        gemm_dv(dv, probs);
        sync_consumers();  // each warpgroup's dQ needs dS of all keys
        gemm_dq();
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dv);
        warpgroup_fence_operand(dq_);
        if (n_block + 1 < num_n_blocks)
            named_barrier_arrive(BwdNamedBarriers::kDscoresReadWG1 + (warpgroup_ ^ 1), kThreads);
        key_pipeline_.consumer_release();
        key_pipeline_.advance();
        keys_.tma_reduce_add_dkv(dv, accum.dvalue, accum.row_stride, stages, dkv_stage_);
        gemm_dk(dk);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dk);
        keys_.tma_reduce_add_dkv(dk, accum.dkey, accum.row_stride, stages, dkv_stage_);
    }

    __device__ const KvTile& key() const { return smem_.key[key_pipeline_.stage()]; }
    __device__ const KvTile& value() const { return smem_.value[value_pipeline_.stage()]; }

    // Rows that see no key may hold NaN, and 0 * NaN would enter a sum.
    __device__ __forceinline__ void zero_empty_rows() const {
        if (!any_of(smem_.has_empty_rows)) return;
        const auto is_empty = [&](int r) { return smem_.lse[r] == kInfinity; };
        zero_rows<kRows, kThreads>(smem_.query, 0, static_cast<int>(threadIdx.x) - kWarpgroupThreads, is_empty);
        zero_rows<kRows, kThreads>(smem_.dout, 0, static_cast<int>(threadIdx.x) - kWarpgroupThreads, is_empty);
        sync_consumers();
    }

    // The GEMMs clear accumulators that they overwrite: else the registers would stay live from the previous n_block
    // on. S = K Q^T or dP = V dO^T of half of the rows: both operands are K-major.
    __device__ __forceinline__ void gemm_scores(ScoresFragment& scores, const KvTile& keys, const RowsTile& rows,
                                                int half) const {
        const SmemDescriptor<KvTile> a(keys, warpgroup_ * 64);
        const SmemDescriptor<RowsTile> b(rows, half * kHalf);
        clear(scores);
        gemm_ss<true, Major::kK, Major::kK>(scores, a, b);
    }
    // dV = P dO: P is in registers, dO is MN-major.
    __device__ __forceinline__ void gemm_dv(DimFragment& dv, ScoresOperand (&probs)[2]) const {
        clear(dv);
        gemm_rs<true, Major::kMN>(dv, reinterpret_cast<uint32_t (&)[kRows / 16][4]>(probs),
                                  SmemDescriptor<RowsTile>(smem_.dout));
    }
    // dK = dS Q: both operands are MN-major.
    __device__ __forceinline__ void gemm_dk(DimFragment& dk) const {
        const SmemDescriptor<ScoresTile> a(smem_.dscores, 0, warpgroup_ * 64);
        const SmemDescriptor<RowsTile> b(smem_.query);
        clear(dk);
        gemm_ss<true, Major::kMN, Major::kMN>(dk, a, b);
    }
    // dQ += dS^T K: dS is K-major, K is MN-major.
    __device__ __forceinline__ void gemm_dq() {
        const SmemDescriptor<ScoresTile> a(smem_.dscores, warpgroup_ * 64);
        const SmemDescriptor<KvTile> b(key());
        gemm_ss<false, Major::kK, Major::kMN>(dq_, a, b);
    }

    // stmatrix transposes to rows x keys.
    __device__ __forceinline__ void store_dscores(const ScoresOperand& dscores, int half) const {
        const int row = lane_id() % 8 + lane_id() / 16 * 8, chunk = warp_key_ / 8 + lane_id() / 8 % 2;
        const uint32_t to = smem_address(smem_.dscores.data + ScoresTile::offset(row, chunk));
#pragma unroll
        for (int r = 0; r < kHalf / 16; ++r)
            stmatrix_x4_trans(to + (half * kHalf + r * 16) * ScoresTile::kSlabCols * sizeof(T), dscores[r]);
    }

    // S and dP to P and dS of half of the rows.
    __device__ __forceinline__ void compute_p_ds_gathered(ScoresFragment& s, ScoresFragment& dp, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int w = half * 2 + i;
            typename KeyFragment<kBias>::VisibleRowBits visible_rows;
            keys_.load_visible_rows(smem_.keys[key_pipeline_.stage()], w, visible_rows);
            keys_.compute_p_ds_gathered(scale_, visible_rows, s, dp, i * 4, smem_.lse + w * 32, smem_.delta + w * 32);
        }
    }

    __device__ __forceinline__ void store_dq() const {
        const PerHeadSparseBwdWorkTile& work_tile = smem_.work_tile();
        T* to = query_rows<T>(p_.dquery, work_tile.s, work_tile.head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work_tile.first_row + warp_key_ + h * 8 + fragment_row();
            store_row(dq_, h, scale_.scale, to + row * p_.dquery.row_stride, static_cast<int>(p_.head_dim),
                      row < work_tile.s.rows);
        }
    }

    const BwdArgs& p_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const int warpgroup_;
    const int warp_key_;  // the warp's first key of the n_block, and its first row of dQ
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    int dkv_stage_ = 0;
    KeyFragment<kBias> keys_;
    DimFragment dq_;
};

}  // namespace flash_dmattn::cuda::sm90
