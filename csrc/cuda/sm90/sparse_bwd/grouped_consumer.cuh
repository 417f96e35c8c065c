// An MMA warpgroup of the grouped sparse backward: its share of dK, dV and the bias's gradient of each n_block, and of
// dQ.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/arch/zero_rows.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/common/dkv_accum.cuh"
#include "grouped_shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class GroupedSparseBwdConsumer {
public:
    using T = typename Traits::T;
    using SharedStorage = GroupedSparseBwdSharedStorage<Traits>;

    __device__ GroupedSparseBwdConsumer(const BwdArgs& p, const BwdScale& scale, SharedStorage& smem)
        : p_(p), scale_(scale), smem_(smem), warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1),
          tiled_mma_(warpgroup_), warp_key_(TiledMma::warp_key()), key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.value_pipeline), query_pipeline_(smem.query_pipeline),
          dout_pipeline_(smem.dout_pipeline), scores_pipeline_(smem.scores_pipeline) {
        const GroupedSparseBwdWorkTile& work_tile = smem.work_tile();
        num_steps_ = work_tile.num_steps<kRows>();
        const int64_t first_step = static_cast<int64_t>(work_tile.slot) * num_steps_;
        const int owner = Traits::kStagesDq ? warp_id() - 4 : warpgroup_;
        dq_accum_ = reinterpret_cast<float4*>(p.dquery_accum) + first_step * kStepSize +
                    owner * kDqFragments * kDqStride + threadIdx.x % kDqStride;
    }

    __device__ __forceinline__ void run() {
        ScoresFragment scores, dprobs;  // inside the loop they would push dK and dV out of the registers
        ScoresOperand probs, dscores;
        wait_for_slot();
        const int num_n_blocks = smem_.end_n_block - smem_.first_n_block;
        for (int n_block = 0; n_block < num_n_blocks; ++n_block) {
            key_pipeline_.consumer_wait();
            value_pipeline_.consumer_wait();
            fence_proxy_async();  // cp.async wrote the keys
            keys_.begin(smem_.keys, warp_key_);
            clear(dk_);
            clear(dv_);
            wait_for_query();
            for (int i = 0; i < num_steps_; ++i) step(scores, dprobs, probs, dscores, i);
            if constexpr (Traits::kSharesKeys) finish_previous_dkv<0>(true);
            add_dkv();
        }
        tma_store_wait_group();
        finish_split();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim;
    static constexpr int kThreads = Traits::kConsumerWarpgroups * kWarpgroupThreads;
    static constexpr int kScoreRows = Traits::kScoreRows, kDqFragments = Traits::kDqCols / 8;
    static constexpr int kStepSize = kRows * kHeadDim / 4;  // of dQ, in float4
    // Between a thread's float4: TMA adds a warp's contiguous memory, threads that of a warpgroup.
    static constexpr int kDqStride = Traits::kStagesDq ? 32 : 128;
    using RowsTile = typename Traits::RowsTile;
    using ScoresTile = typename Traits::ScoresTile;
    using TiledMma = BwdTiledMma<Traits>;
    using ScoresFragment = typename TiledMma::ScoresFragment;
    using ScoresOperand = typename TiledMma::ScoresOperand;
    using DkvFragment = typename TiledMma::DkvFragment;
    using DqFragment = typename TiledMma::DqFragment;
    using VisibleRowBits = typename KeyFragment<kBias>::VisibleRowBits;

    static __device__ bool is_leader() { return threadIdx.x == kWarpgroupThreads; }
    __device__ DquerySlotState& slot_state() const { return p_.dquery_slot_states[smem_.work_tile().slot]; }
    __device__ void sync_consumers() const { named_barrier_sync(BwdNamedBarriers::kConsumers, kThreads); }

    // Waits until the slot of dQ is empty, while the producer loads.
    __device__ __forceinline__ void wait_for_slot() const {
        if (is_leader())
            while (load_acquire(&slot_state().epoch) < smem_.work_tile().epoch) {}
        sync_consumers();
    }
    __device__ __forceinline__ void wait_for_query() {
        query_pipeline_.consumer_wait();
        has_empty_rows_ = any_of(row_info().has_empty_rows);
    }
    // kRows rows of one head with the n_block: S and dP, then P and dS, then dV, dQ and dK. Waits for the Q of the next
    // step.
    __device__ __forceinline__ void step(ScoresFragment& scores, ScoresFragment& dprobs, ScoresOperand& probs,
                                         ScoresOperand& dscores, int i) {
        if (has_empty_rows_) zero_empty_rows(query());
        tiled_mma_.gemm_scores(scores, smem_.key, query());
        dout_pipeline_.consumer_wait();
        if (has_empty_rows_) zero_empty_rows(dout());
        tiled_mma_.gemm_scores(dprobs, smem_.value, dout());
        if constexpr (Traits::kSharesKeys) finish_previous_dkv<2>(i > 0);
        VisibleRowBits visible_rows[kScoreRows / 32];
        load_visible_rows(visible_rows, i);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(scores);
        warpgroup_fence_operand(dprobs);
        if (i == num_steps_ - 1) {
            value_pipeline_.consumer_release();
            value_pipeline_.advance();
        }
        compute_p_ds_gathered(scores, dprobs, visible_rows);
        to_a_operand<T>(scores, probs);
        to_a_operand<T>(dprobs, dscores);
        if constexpr (Traits::kSharesKeys) {
            gemm_dkv_dq_of_shared_keys(probs, dscores, i);
            if (i < num_steps_ - 1) wait_for_query();
        } else {
            gemm_dkv_dq_of_own_keys(probs, dscores, i);
        }
    }
    // P and dS of the warpgroup's own keys are A operands in registers; only dQ needs dS of both warpgroups.
    __device__ __forceinline__ void gemm_dkv_dq_of_own_keys(const ScoresOperand& probs, const ScoresOperand& dscores,
                                                            int i) {
        store_scores(dscores_tile(), dscores);
        tiled_mma_.gemm_dkv(dv_, probs, dout());
        fence_proxy_async();
        sync_consumers();  // dS is complete, and the previous one has been read
        DqFragment dq;
        tiled_mma_.gemm_dq(dq, dscores_tile(), smem_.key);
        tiled_mma_.gemm_dkv(dk_, dscores, query());
        query_pipeline_.advance();
        if (i < num_steps_ - 1) wait_for_query();  // while GEMMs run
        wgmma_wait_group<1>();                     // dV and dQ
        warpgroup_fence_operand(dv_);
        warpgroup_fence_operand(dq);
        dout_pipeline_.consumer_release();
        dout_pipeline_.advance();
        if (i == num_steps_ - 1) release_key();
        add_dq(dq, i);
        dscores_stage_ ^= 1;
        wgmma_wait_group<0>();  // dK
        warpgroup_fence_operand(dk_);
        query_pipeline_.consumer_release_previous();
    }
    // Each warpgroup has P and dS of some rows of the shared keys and needs those of the other, too.
    // finish_previous_dkv waits for dV and dK in the next step, so that their GEMMs overlap the addition of dQ.
    __device__ __forceinline__ void gemm_dkv_dq_of_shared_keys(const ScoresOperand& probs, const ScoresOperand& dscores,
                                                               int i) {
        scores_pipeline_.producer_acquire();
        store_scores(probs_tile(), probs);
        store_scores(dscores_tile(), dscores);
        fence_proxy_async();
        sync_consumers();  // P and dS are complete
        DqFragment dq;
        tiled_mma_.gemm_dq(dq, dscores_tile(), smem_.key);
        tiled_mma_.gemm_dkv(dv_, probs_tile(), dout());
        tiled_mma_.gemm_dkv(dk_, dscores_tile(), query());
        wgmma_wait_group<2>();  // dQ
        warpgroup_fence_operand(dq);
        if (i == num_steps_ - 1) release_key();
        add_dq(dq, i);
        query_pipeline_.advance();
        dout_pipeline_.advance();
    }
    // kPending wgmma groups have been issued since. has_previous: the n_block has a previous step.
    template <int kPending>
    __device__ __forceinline__ void finish_previous_dkv(bool has_previous) {
        wgmma_wait_group<kPending>();
        warpgroup_fence_operand(dv_);
        warpgroup_fence_operand(dk_);
        if (!has_previous) return;
        query_pipeline_.consumer_release_previous();
        dout_pipeline_.consumer_release_previous();
        scores_pipeline_.consumer_release();
        scores_pipeline_.advance();
    }
    __device__ __forceinline__ void release_key() {
        key_pipeline_.consumer_release();
        key_pipeline_.advance();
    }

    __device__ const typename SharedStorage::RowInfo& row_info() const { return smem_.rows[query_pipeline_.stage()]; }
    __device__ RowsTile& query() const { return smem_.query[query_pipeline_.stage()]; }
    __device__ RowsTile& dout() const { return smem_.dout[dout_pipeline_.stage()]; }
    __device__ ScoresTile& dscores_tile() const { return smem_.scores[dscores_stage_]; }
    __device__ ScoresTile& probs_tile() const { return smem_.scores[1]; }

    // Rows that see no key may hold NaN, and 0 * NaN would enter a sum. Both warpgroups write the same zeros.
    __device__ __forceinline__ void zero_empty_rows(RowsTile& rows) const {
        zero_rows<kRows, kWarpgroupThreads>(rows, 0, threadIdx.x % kWarpgroupThreads,
                                            [&](int r) { return row_info().lse[r] == kInfinity; });
        named_barrier_sync(BwdNamedBarriers::kWarpgroupSyncWG1 + warpgroup_, kWarpgroupThreads);
    }

    // stmatrix transposes to rows x keys.
    __device__ __forceinline__ void store_scores(ScoresTile& tile, const ScoresOperand& scores) const {
        const int row = tiled_mma_.first_row() + lane_id() % 8 + lane_id() / 16 * 8,
                  chunk = warp_key_ / 8 + lane_id() / 8 % 2;
        const uint32_t to = smem_address(tile.data + ScoresTile::offset(row, chunk));
#pragma unroll
        for (int r = 0; r < kScoreRows / 16; ++r)
            stmatrix_x4_trans(to + r * 16 * ScoresTile::kSlabCols * sizeof(T), scores[r]);
    }

    __device__ __forceinline__ void load_visible_rows(VisibleRowBits (&visible_rows)[kScoreRows / 32], int step) const {
        const int first_word = (smem_.work_tile().template row_of<kRows>(step) + tiled_mma_.first_row()) / 32;
#pragma unroll
        for (int w = 0; w < kScoreRows / 32; ++w) keys_.load_visible_rows(smem_.keys, first_word + w, visible_rows[w]);
    }
    // S and dP to P and dS.
    __device__ __forceinline__ void compute_p_ds_gathered(ScoresFragment& s, ScoresFragment& dp,
                                                          const VisibleRowBits (&visible_rows)[kScoreRows / 32]) {
        const float *lse = row_info().lse + tiled_mma_.first_row(), *delta = row_info().delta + tiled_mma_.first_row();
#pragma unroll
        for (int w = 0; w < kScoreRows / 32; ++w)
            keys_.compute_p_ds_gathered(scale_, visible_rows[w], s, dp, w * 4, lse + w * 32, delta + w * 32);
    }

    // This thread's first float4 of a step's dQ in the slot, in accumulator order; the next is kDqStride further.
    __device__ __forceinline__ float4* dq_accum(int step) const { return dq_accum_ + step * kStepSize; }
    __device__ __forceinline__ void add_dq(const DqFragment& dq, int step) const {
        float4* to = dq_accum(step);
        if constexpr (Traits::kStagesDq) {
            tiled_mma_.tma_reduce_add_dq(dq, smem_.dq[warp_id() - 4], reinterpret_cast<float*>(to));
        } else {
#pragma unroll
            for (int n = 0; n < kDqFragments; ++n) reduce_add(reinterpret_cast<float*>(to + n * kDqStride), dq[0][n]);
        }
    }

    // Adds dK, dV and dbias of the n_block to global memory.
    __device__ __forceinline__ void add_dkv() {
        const GroupedSparseBwdWorkTile& work_tile = smem_.work_tile();
        const DkvAccum accum(p_, work_tile.s, work_tile.head / work_tile.qheads_per_kv, kHeadDim);
        float *const dk = accum.dkey + tiled_mma_.first_col(), *const dv = accum.dvalue + tiled_mma_.first_col();
        if constexpr (Traits::kSharesKeys) {
            keys_.reduce_add_dkv(dv_, dv, accum.row_stride);
            keys_.reduce_add_dkv(dk_, dk, accum.row_stride);
        } else {
            auto& stages = smem_.dkv[warp_id() - 4];
            keys_.tma_reduce_add_dkv(dv_, dv, accum.row_stride, stages, dkv_stage_);
            keys_.tma_reduce_add_dkv(dk_, dk, accum.row_stride, stages, dkv_stage_);
        }
        keys_.add_dbias(p_, work_tile.s, work_tile.head);
    }

    // The last split of the list to finish converts dQ, empties the slot and publishes its next epoch.
    __device__ __forceinline__ void finish_split() const {
        const int num_splits = static_cast<int>(p_.list_splits);
        __threadfence();
        sync_consumers();
        if (is_leader())
            smem_.is_last_split = atomicAdd(&slot_state().finished_splits, 1) % num_splits == num_splits - 1;
        sync_consumers();
        if (!smem_.is_last_split) return;
        __threadfence();
        convert_dq();
        if (Traits::kStagesDq) fence_proxy_async_global();  // TMA adds to the zeros
        __threadfence();
        sync_consumers();
        if (is_leader()) store_release(&slot_state().epoch, smem_.work_tile().epoch + 1);
    }
    // Converts dQ of all steps and leaves zeros in the slot.
    __device__ __forceinline__ void convert_dq() const {
        constexpr int kAtOnce = kHeadDim == 128 ? 4 : 2;  // loads in flight together hide the latency
        for (int first = 0; first < num_steps_; first += kAtOnce) {
            DqFragment dq[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int n = 0; n < kDqFragments; ++n) {
                    float4 x{};
                    if (first + i < num_steps_) x = __ldcg(dq_accum(first + i) + n * kDqStride);
                    float (&sum)[4] = dq[i][0][n];
                    sum[0] = x.x, sum[1] = x.y, sum[2] = x.z, sum[3] = x.w;
                }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i == num_steps_) break;
#pragma unroll
                for (int n = 0; n < kDqFragments; ++n) __stcg(dq_accum(first + i) + n * kDqStride, float4{});
                store_dq(dq[i], first + i);
            }
        }
    }
    __device__ __forceinline__ void store_dq(const DqFragment& dq, int step) const {
        const GroupedSparseBwdWorkTile& work_tile = smem_.work_tile();
        const int first_row = work_tile.first_row + work_tile.row_of<kRows>(step) + tiled_mma_.dq_row();
        T* to = query_rows<T>(p_.dquery, work_tile.s, work_tile.head_of<kRows>(step)) + tiled_mma_.dq_col();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + warp_id() % 4 * 16 + h * 8 + fragment_row();
            store_row(dq, h, scale_.scale, to + row * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim) - tiled_mma_.dq_col(), row < work_tile.s.rows);
        }
    }

    const BwdArgs& p_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const int warpgroup_;
    const TiledMma tiled_mma_;
    const int warp_key_;  // the warp's first key of the n_block
    int num_steps_;
    bool has_empty_rows_;  // of the step's Q and dO
    float4* dq_accum_;
    Pipeline<1> key_pipeline_, value_pipeline_;
    Pipeline<Traits::kStages> query_pipeline_, dout_pipeline_;
    Pipeline<1> scores_pipeline_;
    int dscores_stage_ = 0, dkv_stage_ = 0;
    KeyFragment<kBias> keys_;
    DkvFragment dk_, dv_;
};

}  // namespace flash_dmattn::cuda::sm90
