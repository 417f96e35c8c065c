// An MMA warpgroup of the backward: dK and dV of an n_block, and its share of dQ and of the bias's gradient.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "scores.cuh"
#include "shared_storage.cuh"
#include "workspace.cuh"
#include "cuda/arch/zero_rows.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class BwdConsumer : BwdScores<Traits, kBias> {
    using Base = BwdScores<Traits, kBias>;
    using Base::has_key_dbias, Base::store_key_dbias, Base::state_, Base::header_, Base::m_block_info,
        Base::bias_dscores;
    using Base::key, Base::begin_head;
    using Base::p_, Base::scale_, Base::smem_, Base::work_tile_, Base::warpgroup_, Base::tiled_mma_, Base::warp_key_;

public:
    using T = typename Traits::T;
    using SharedStorage = BwdSharedStorage<Traits, kBias>;

    __device__ BwdConsumer(const BwdArgs& p, const BwdScale& scale, SharedStorage& smem, const BwdWorkTile& work_tile)
        : Base(p, scale, smem, work_tile), probs_pipeline_(smem.probs_pipeline) {}

    __device__ __forceinline__ void run() {
        clear(dk_);
        clear(dv_);
        if constexpr (kBias == BiasKind::kRelative) relative_bias_ends()[0] = relative_bias_ends()[1] = 0;
        mbarrier_wait(smem_address(&smem_.keys_full), 0);
        zero_invisible_keys();
        mainloop();
        epilogue();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;
    using RowsTile = typename Traits::RowsTile;
    using ScoresTile = typename Traits::ScoresTile;
    using TiledMma = BwdTiledMma<Traits>;
    using ScoresFragment = typename TiledMma::ScoresFragment;
    using ScoresOperand = typename TiledMma::ScoresOperand;
    using DkvFragment = typename TiledMma::DkvFragment;
    using DqFragment = typename TiledMma::DqFragment;
    using MBlockInfo = typename SharedStorage::MBlockInfo;
    using RowStatsFragment = typename Base::RowStatsFragment;
    // Whether dS is stored before the GEMM of dV is issued. The stores are slower while it reads shared memory. But with
    // a dense bias dS first would spill registers, and the tall tile is as fast, or up to 4 % faster, with the GEMM first.
    static constexpr bool kStoresFirst = !Traits::kSharesKeys && kBias != BiasKind::kDense && !Traits::kIsTall;
    // Whether dQ is added in the next step, while S is computed: 3 % faster with a dense bias, slower without.
    static constexpr bool kAddsDqLate = Traits::kStagesDq && kBias == BiasKind::kDense;
    using RowSums = SumsOfRows8Apart<Traits::kScoreRows / 8>;
    using DiagonalSums = float[kDiagonalSums<Traits::kScoreRows / 8>];

    __device__ __forceinline__ void mainloop() {
        int head = -1;
        ScoresFragment scores, dprobs;  // inside the loop they would push dK and dV out of the registers
        ScoresOperand probs, dscores;
        // A test before the loop and one at its end, so that wgmma groups stay in flight from one step to the next.
        if (wait_for_m_block()) {
            do {
                if (header_.head != head) {
                    if (head >= 0) end_head(head);
                    begin_head(head = header_.head);
                }
            } while (step(scores, dprobs, probs, dscores));
            wait_for_dk();
            if constexpr (kAddsDqLate) add_staged_dq();
            if (p_.deterministic) {
                wait_for_dq_additions();
                sync_warpgroup();
                if (is_warpgroup_leader()) release_held_dq_semaphore();
            }
        }
        if (head >= 0) end_head(head);
    }
    __device__ __forceinline__ void epilogue() {
        if (has_key_dbias() && p_.dbias.heads != p_.heads) store_key_dbias(work_tile_.first_head);
        store_dkv(p_.dkey, dk_, scale_.scale);
        store_dkv(p_.dvalue, dv_, 1);
        tma_store_wait_group();
    }

    // Returns whether there is another m_block.
    __device__ __forceinline__ bool wait_for_m_block() {
        smem_.query_pipeline.consumer_wait(state_);
        header_ = m_block_info().header;
        return header_.m_block != MBlockInfo::kEnd;
    }
    __device__ __forceinline__ bool wait_for_next_m_block() {
        state_.advance();
        return wait_for_m_block();
    }
    // One m_block: S and dP, then P and dS, then dV, dQ and dK. Returns whether there is another one.
    __device__ __forceinline__ bool step(ScoresFragment& scores, ScoresFragment& dprobs, ScoresOperand& probs,
                                         ScoresOperand& dscores) {
        const bool has_empty_rows = header_.has_empty_rows();
        if (has_empty_rows) zero_empty_rows(query());
        constexpr bool kStartsFromBias = SharedStorage::kStartsFromBias;
        const RowStatsFragment lse(m_block_info().lse + tiled_mma_.first_row());
        if constexpr (!kStartsFromBias) tiled_mma_.gemm_scores(scores, smem_.key, query());
        if constexpr (kAddsDqLate) add_staged_dq();
        smem_.dout_pipeline.consumer_wait(state_);
        if (has_empty_rows) zero_empty_rows(dout());
        // The GEMM of dP overlaps the reads of the bias.
        if constexpr (kStartsFromBias)
            m_block_info().relative_bias.entries.load_ahead(scores, Base::relative_bias_lane_);
        tiled_mma_.gemm_scores(dprobs, smem_.value, dout());
        if constexpr (kStartsFromBias) tiled_mma_.template gemm_scores<false>(scores, smem_.key, query());
        if constexpr (Traits::kSharesKeys) finish_previous_dk();
        if constexpr (kBias == BiasKind::kDense) smem_.bias_pipeline.consumer_wait(state_);
        const bool has_softcap = Traits::kServesMasksAndSoftcap && !is_relative(kBias) && scale_.softcap > 0;
        if constexpr (Base::kEarlyFragments > 0) {
            wgmma_wait_group<1>();  // S
            warpgroup_fence_operand(scores);
            if (!has_softcap) Base::compute_early_p(scores, lse);
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(scores);
        warpgroup_fence_operand(dprobs);
        const auto finish = [&] {
            to_a_operand<T>(scores, probs);
            to_a_operand<T>(dprobs, dscores);
            if (kBias == BiasKind::kDense && Base::has_masked_keys_) {
                Base::zero_masked_keys(probs);
                Base::zero_masked_keys(dscores);
            }
            if constexpr (kStoresFirst) store_scores(bias_dscores(), dscores);
        };
        if (has_softcap) {
            Base::compute_p_ds_softcap(scores, dprobs, lse);
        } else {
            Base::compute_late_p_ds(scores, dprobs, lse, finish);
        }
        if constexpr (!Base::kFinishesInBranches) finish();
        if constexpr (Traits::kSharesKeys) {
            gemm_dkv_dq_of_shared_keys(probs, dscores, dprobs);
            return wait_for_next_m_block();
        } else {
            return gemm_dkv_dq_of_own_keys(probs, dscores, dprobs);
        }
    }
    // P and dS of the warpgroup's own keys are A operands in registers; only dQ needs dS of both warpgroups. Waits for
    // the next m_block while GEMMs run.
    __device__ __forceinline__ bool gemm_dkv_dq_of_own_keys(const ScoresOperand& probs, const ScoresOperand& dscores,
                                                            ScoresFragment& ds) {
        tiled_mma_.gemm_dkv(dv_, probs, dout());
        if constexpr (!kStoresFirst) store_scores(bias_dscores(), dscores);
        fence_proxy_async();
        commit_dense_dbias();
        add_drelative_bias(ds, dscores);
        if (p_.deterministic) wait_for_dq_additions();
        sync_consumers();  // dS is complete, and the previous one has been read
        DqFragment dq;
        tiled_mma_.gemm_dq(dq, bias_dscores(), smem_.key);
        tiled_mma_.gemm_dkv(dk_, dscores, query());
        if (p_.deterministic) acquire_dq_semaphore();
        const int stage = state_.stage();
        float* const dq_accum = m_block_info().dq_accum;
        const bool has_next = wait_for_next_m_block();
        wgmma_wait_group<1>();  // dV and dQ
        warpgroup_fence_operand(dv_);
        warpgroup_fence_operand(dq);
        smem_.dout_pipeline.consumer_release(stage);
        release_bias(stage);
        add_dq(dq, dq_accum);
        wait_for_dk();
        smem_.query_pipeline.consumer_release(stage);
        return has_next;
    }
    // Each warpgroup has P and dS of some rows of the shared keys and needs those of the other, too. finish_previous_dk
    // waits for dK in the next step, so that its GEMM overlaps the addition of dQ.
    __device__ __forceinline__ void gemm_dkv_dq_of_shared_keys(const ScoresOperand& probs, const ScoresOperand& dscores,
                                                               ScoresFragment& ds) {
        probs_pipeline_.producer_acquire();
        store_scores(smem_.probs, probs);
        store_scores(bias_dscores(), dscores);
        fence_proxy_async();
        commit_dense_dbias();
        sync_consumers();  // P and dS are complete
        tiled_mma_.gemm_dkv(dv_, smem_.probs, dout());
        add_drelative_bias(ds, dscores);
        DqFragment dq;
        tiled_mma_.gemm_dq(dq, bias_dscores(), smem_.key);
        tiled_mma_.gemm_dkv(dk_, bias_dscores(), query());
        if (p_.deterministic) acquire_dq_semaphore();
        wgmma_wait_group<1>();  // dV and dQ
        warpgroup_fence_operand(dv_);
        warpgroup_fence_operand(dq);
        smem_.dout_pipeline.consumer_release(state_.stage());
        probs_pipeline_.consumer_release();
        probs_pipeline_.advance();
        add_dq(dq, m_block_info().dq_accum);
        dk_in_flight_ = true;
    }
    __device__ __forceinline__ void wait_for_dk() {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dk_);
    }
    // Two GEMMs, S and dP, have been issued since.
    __device__ __forceinline__ void finish_previous_dk() {
        wgmma_wait_group<2>();
        warpgroup_fence_operand(dk_);
        if (!dk_in_flight_) return;
        smem_.query_pipeline.consumer_release(state_.previous_stage());
        release_bias(state_.previous_stage());
    }

    static __device__ bool is_warpgroup_leader() { return threadIdx.x % kWarpgroupThreads == 0; }
    static __device__ __forceinline__ void sync_consumers() {
        named_barrier_sync(BwdNamedBarriers::kConsumers, Traits::kConsumerWarpgroups * kWarpgroupThreads);
    }
    __device__ __forceinline__ void sync_warpgroup() const {
        named_barrier_sync(BwdNamedBarriers::kWarpgroupSyncWG1 + warpgroup_, kWarpgroupThreads);
    }
    __device__ RowsTile& query() const { return smem_.query[state_.stage()]; }
    __device__ RowsTile& dout() const { return smem_.dout[state_.stage()]; }

    __device__ void end_head(int head) {
        if (has_key_dbias() && p_.dbias.heads == p_.heads) store_key_dbias(head);
        if constexpr (kBias == BiasKind::kRelative) {
            if (p_.drelative_bias == nullptr) return;
            if constexpr (Traits::kSharesKeys) wait_for_dk();  // before a function that is not inlined
            RelativeBiasGradient(p_, smem_.sequence, head).add_ends(relative_bias_ends());
        }
    }

    __device__ auto& relative_bias_ends() const { return smem_.relative_bias_ends[threadIdx.x - kWarpgroupThreads]; }
    // Adds the sums over the diagonals of dS to the gradient of the relative bias. Overlaps the GEMM of dV.
    __device__ __forceinline__ void add_drelative_bias(const ScoresFragment& ds, const ScoresOperand& dscores) {
        if constexpr (kBias == BiasKind::kRelativeGrid) {
            if (p_.drelative_bias == nullptr) return;
            const RelativeBiasGradient gradient = m_block_info().relative_bias.gradient;
            const int first_row = header_.m_block * kRows + tiled_mma_.first_row(),
                      first_key = work_tile_.n_block * kKeys + warp_key_;
            // Longer runs spill registers.
            if (p_.relative_bias.grid_width % 32 == 0) {
                gradient.add_grid_diagonals<4>(ds[0], first_row, first_key);
            } else {
                gradient.add_grid_diagonals<2>(ds[0], first_row, first_key);
            }
        }
        if constexpr (kBias == BiasKind::kRelative) {
            if (p_.drelative_bias == nullptr) return;
            if (Base::is_clamped()) {
                RelativeBiasGradient::add_clamped(Base::clamped_sum(), header_.clamped_end > 0, relative_bias_ends());
                return;
            }
            // With 128 rows no registers are left for dS in float32 beside the operands.
            RowSums rows_8_apart;
            if constexpr (Traits::kScoreRows > 64) {
                add_rows_8_apart<T>(dscores, rows_8_apart);
            } else {
                add_rows_8_apart(ds[0], rows_8_apart);
            }
            DiagonalSums sums;
            sum_diagonals(rows_8_apart, sums);
            const RelativeBiasGradient gradient = m_block_info().relative_bias.gradient;
            const int position = m_block_info().relative_bias.position + warp_key_ - tiled_mma_.first_row();
            gradient.add_diagonals(sums, position, relative_bias_ends());
        }
    }

    // Keys that no row sees may hold NaN, and 0 * NaN would enter a sum.
    __device__ __forceinline__ void zero_invisible_keys() const {
        const auto is_invisible = [&](int k) { return !(smem_.visible_keys[k / 32] >> k % 32 & 1); };
        bool any = false;
        for (int w = 0; w < Traits::kWords; ++w) any |= smem_.visible_keys[w] != ~0u;
        if (!any) return;
        constexpr int kCount = kKeys / Traits::kConsumerWarpgroups;
        zero_rows<kCount, kWarpgroupThreads>(smem_.key, warpgroup_ * kCount, threadIdx.x % kWarpgroupThreads,
                                             is_invisible);
        zero_rows<kCount, kWarpgroupThreads>(smem_.value, warpgroup_ * kCount, threadIdx.x % kWarpgroupThreads,
                                             is_invisible);
        sync_consumers();
    }
    // Rows that see no key may hold NaN. Both warpgroups write the same zeros.
    __device__ __forceinline__ void zero_empty_rows(RowsTile& rows) const {
        zero_rows<kRows, kWarpgroupThreads>(rows, 0, threadIdx.x % kWarpgroupThreads,
                                            [&](int r) { return m_block_info().lse[r] == kInfinity; });
        sync_warpgroup();
    }

    __device__ __forceinline__ void store_scores(ScoresTile& to, const ScoresOperand& scores) const {
#pragma unroll
        for (int r = 0; r < Traits::kScoreRows / 16; ++r)
            stmatrix_x4_trans(Base::scores_address(to, r * 16), scores[r]);
    }

    __device__ __forceinline__ void add_dq(const DqFragment& dq, float* dq_accum) {
        using Layout = DqueryLayout<Traits>;
        const int warp = warp_id() - 4, lane = lane_id();
        float* to = dq_accum + Layout::offset(warp, 0, 0);
        if constexpr (kAddsDqLate) {
            tiled_mma_.stage_dq(dq, smem_.dq[warp], elect_one_sync());
            staged_dq_accum_ = to;
        } else if constexpr (Traits::kStagesDq) {
            tiled_mma_.tma_reduce_add_dq(dq, smem_.dq[warp], to);
        } else {
#pragma unroll
            for (int n = 0; n < Layout::kFragments; ++n) reduce_add(to + Layout::offset(0, n, lane), dq[0][n]);
        }
    }
    __device__ __forceinline__ void add_staged_dq() {
        if (staged_dq_accum_ != nullptr)
            tiled_mma_.tma_reduce_add_staged_dq(smem_.dq[warp_id() - 4], staged_dq_accum_, elect_one_sync());
        staged_dq_accum_ = nullptr;
    }
    // With deterministic=True the CTAs of one head add to dQ of an m_block in the order of their n_blocks. The previous
    // semaphore is released here, while GEMMs run: a barrier of both warpgroups has followed the additions that it
    // guards.
    __device__ __forceinline__ void acquire_dq_semaphore() const {
        if (is_warpgroup_leader()) {
            release_held_dq_semaphore();
            int32_t* semaphore = m_block_info().dq_semaphore + warpgroup_;
            while (load_acquire(semaphore) != m_block_info().dq_semaphore_value) {}
            smem_.held_dq_semaphore[warpgroup_] = semaphore;
        }
        sync_warpgroup();
        if (Traits::kStagesDq) fence_proxy_async_global();  // orders the additions by TMA behind the acquire, too
    }
    __device__ __forceinline__ void wait_for_dq_additions() const {
        if (Traits::kStagesDq && elect_one_sync()) tma_store_wait_group();
    }
    // The release orders the additions of the warpgroup's threads; wait_for_dq_additions has waited for those of TMA.
    __device__ __forceinline__ void release_held_dq_semaphore() const {
        if (smem_.held_dq_semaphore[warpgroup_] != nullptr)
            store_release(smem_.held_dq_semaphore[warpgroup_], work_tile_.n_block + 1);
    }

    // Signals DenseDbiasStore that the warp has written its part of dS.
    __device__ __forceinline__ void commit_dense_dbias() const {
        if constexpr (kBias == BiasKind::kDense) {
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(smem_address(&smem_.dense_dbias.dscores_full[state_.stage()]));
        }
    }
    __device__ __forceinline__ void release_bias(int stage) const {
        if constexpr (kBias == BiasKind::kDense) smem_.bias_pipeline.consumer_release(stage);
    }

    __device__ __forceinline__ void store_dkv(const RowsView& view, const DkvFragment& acc, float factor) const {
        const Sequence& s = smem_.sequence;
        T* to = key_rows<T>(view, s, work_tile_.kv_head) + tiled_mma_.first_col();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_row(acc, h, factor, to + key(h) * view.row_stride,
                      static_cast<int>(p_.head_dim) - tiled_mma_.first_col(), key(h) < s.keys);
    }

    Pipeline<1> probs_pipeline_;
    bool dk_in_flight_ = false;
    float* staged_dq_accum_ = nullptr;  // where dQ in shared memory is to be added
    DkvFragment dk_, dv_;
};

}  // namespace flash_dmattn::cuda::sm90
