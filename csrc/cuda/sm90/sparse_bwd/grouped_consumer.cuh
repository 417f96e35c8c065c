// A warp group that multiplies, of the backward over key lists that heads share: its part of what each tile's keys get of
// dK, dV and the gradient of their bias, and of dQ. Of dK and dV that is what 64 keys of its own get; or, of 64 keys that the
// groups share, half of the columns.
//
// Who waits for whom: both groups, at barrier 1, until dS of the visit is whole, and P of shared keys; a group for itself at
// barrier 2 + group.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/arch/zero_rows.cuh"
#include "grouped_shared_storage.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class GroupedSparseBwdConsumer {
public:
    using T = typename Traits::T;
    using SharedStorage = GatherGroupSharedStorage<Traits>;

    __device__ GroupedSparseBwdConsumer(const BwdArgs& p, SharedStorage& smem)
        : p_(p),
          smem_(smem),
          warpgroup_(static_cast<int>(threadIdx.x) / 128 - 1),
          part_(warpgroup_),
          warp_key_((Traits::kSharesKeys ? warp_id() % 4 : warp_id() - 4) * 16),
          key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.value_pipeline),
          query_pipeline_(smem.query_pipeline),
          dout_pipeline_(smem.dout_pipeline),
          pairs_pipeline_(smem.pairs_pipeline) {
        const GroupedSparseBwdWorkTile& work_tile = smem.work_tile();
        slot_ = work_tile.unit % static_cast<int>(p.dquery_slots);
        visits_ = work_tile.visits<kRows>();
        const int64_t first_visit = static_cast<int64_t>(slot_) * visits_;
        const int owner = Traits::kStagesDquery ? warp_id() - 4 : warpgroup_;
        dquery_sums_ = reinterpret_cast<float4*>(p.dquery_accum) + first_visit * kVisitSums +
                       owner * kDqTiles * kDqStride + threadIdx.x % kDqStride;
    }

    __device__ __forceinline__ void run() {
        Pairs scores, dprobs;  // declared in the loop, they would drive the sums out of the registers
        ScoresDescriptor probs, dscores;
        const int tiles = smem_.end_tile - smem_.first_tile;
        for (int tile = 0; tile < tiles; ++tile) {
            key_pipeline_.consumer_wait();
            value_pipeline_.consumer_wait();
            fence_proxy_async();  // threads have written the keys
            keys_.begin(smem_.keys, warp_key_);
            clear(dkey_);
            clear(dvalue_);
            for (int i = 0; i < visits_; ++i) visit(scores, dprobs, probs, dscores, i);
            if constexpr (Traits::kSharesKeys) end_sums<0>(true);
            add_to_keys();
        }
        tma_store_wait_group();
        end_part();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim;
    static constexpr int kThreads = Traits::kConsumerWarpgroups * 128;
    static constexpr int kScoreRows = Traits::kScoreRows, kDqTiles = Traits::kDqCols / 8;
    static constexpr int kVisitSums = kRows * kHeadDim / 4;  // of dQ, by four
    // Between a thread's sums: those of a warp lie together where the copy engine adds to them, else those of a group.
    static constexpr int kDqStride = Traits::kStagesDquery ? 32 : 128;
    using RowsTile = typename Traits::RowsTile;
    using KeysTile = typename Traits::KeysTile;
    using ScoresTile = typename Traits::ScoresTile;
    using Part = MmaAtomLayout<Traits>;
    using Pairs = typename Part::Pairs;
    using ScoresDescriptor = typename Part::ScoresDescriptor;
    using DimSum = typename Part::DimSum;
    using DquerySum = typename Part::DquerySum;

    // Rows of a head, with the tile's keys.
    __device__ __forceinline__ void visit(Pairs& scores, Pairs& dprobs, ScoresDescriptor& probs,
                                          ScoresDescriptor& dscores, int i) {
        query_pipeline_.consumer_wait();
        const bool has_empty = any_of(info().has_empty);
        if (has_empty) clear_empty_rows(query());
        part_.issue_scores(scores, smem_.key, query());
        dout_pipeline_.consumer_wait();
        if (has_empty) clear_empty_rows(dout());
        part_.issue_scores(dprobs, smem_.value, dout());
        if constexpr (Traits::kSharesKeys) end_sums<2>(i > 0);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(scores);
        warpgroup_fence_operand(dprobs);
        if (i == visits_ - 1) {
            value_pipeline_.release();
            value_pipeline_.advance();
        }
        differentiate(scores, dprobs, i);
        to_a_operand<T>(scores, probs);
        to_a_operand<T>(dprobs, dscores);
        if constexpr (Traits::kSharesKeys) {
            add_of_shared_keys(probs, dscores, i);
        } else {
            add_of_own_keys(probs, dscores, i);
        }
    }
    // P and dS of the group's own keys: operands as they lie in registers.
    __device__ __forceinline__ void add_of_own_keys(const ScoresDescriptor& probs, const ScoresDescriptor& dscores,
                                                    int i) {
        part_.issue_sum(dvalue_, probs, dout());
        store_pairs(dscores_tile(), dscores);
        fence_proxy_async();
        named_barrier_sync(1, kThreads);  // dS has come whole, and nobody reads the one before
        DquerySum dquery;
        part_.gemm_dq(dquery, dscores_tile(), smem_.key);
        part_.issue_sum(dkey_, dscores, query());
        wgmma_wait_group<1>();  // dV and dQ
        warpgroup_fence_operand(dvalue_);
        warpgroup_fence_operand(dquery);
        dout_pipeline_.release();
        dout_pipeline_.advance();
        if (i == visits_ - 1) release_keys();
        add_dquery(dquery, i);
        dscores_stage_ ^= 1;
        wgmma_wait_group<0>();  // dK
        warpgroup_fence_operand(dkey_);
        query_pipeline_.release();
        query_pipeline_.advance();
    }
    // Of the keys that the groups share each has some rows: it needs the others' P and dS, too. dV and dK are awaited in the
    // next visit, so that their products run while dQ is added to its sums.
    __device__ __forceinline__ void add_of_shared_keys(const ScoresDescriptor& probs, const ScoresDescriptor& dscores,
                                                       int i) {
        pairs_pipeline_.producer_acquire();
        store_pairs(probs_tile(), probs);
        store_pairs(dscores_tile(), dscores);
        fence_proxy_async();
        named_barrier_sync(1, kThreads);  // P and dS have come whole
        DquerySum dquery;
        part_.gemm_dq(dquery, dscores_tile(), smem_.key);
        part_.issue_sum(dvalue_, probs_tile(), dout());
        part_.issue_sum(dkey_, dscores_tile(), query());
        wgmma_wait_group<2>();  // dQ
        warpgroup_fence_operand(dquery);
        if (i == visits_ - 1) release_keys();
        add_dquery(dquery, i);
        query_pipeline_.advance();
        dout_pipeline_.advance();
    }
    // Of dV and dK of the visit before, if any: kPending products have been issued since.
    template <int kPending>
    __device__ __forceinline__ void end_sums(bool any) {
        wgmma_wait_group<kPending>();
        warpgroup_fence_operand(dvalue_);
        warpgroup_fence_operand(dkey_);
        if (!any) return;
        query_pipeline_.consumer_release_previous();
        dout_pipeline_.consumer_release_previous();
        pairs_pipeline_.release();
        pairs_pipeline_.advance();
    }
    __device__ __forceinline__ void release_keys() {
        key_pipeline_.release();
        key_pipeline_.advance();
    }

    __device__ const typename SharedStorage::RowInfo& info() const { return smem_.rows[query_pipeline_.stage()]; }
    __device__ RowsTile& query() const { return smem_.query[query_pipeline_.stage()]; }
    __device__ RowsTile& dout() const { return smem_.dout[dout_pipeline_.stage()]; }
    __device__ ScoresTile& dscores_tile() const { return smem_.pairs[dscores_stage_]; }
    __device__ ScoresTile& probs_tile() const { return smem_.pairs[1]; }

    // A row that sees nothing may hold anything. Both groups clear alike.
    __device__ __forceinline__ void clear_empty_rows(RowsTile& rows) const {
        clear_rows<kRows, 128>(rows, 0, threadIdx.x % 128, [&](int r) { return info().lse[r] == kInfinity; });
        named_barrier_sync(2 + warpgroup_, 128);
    }

    // Rows by keys, transposed by stmatrix.
    __device__ __forceinline__ void store_pairs(ScoresTile& tile, const ScoresDescriptor& pairs) const {
        const int row = part_.first_row() + lane_id() % 8 + lane_id() / 16 * 8,
                  chunk = warp_key_ / 8 + lane_id() / 8 % 2;
        const uint32_t to = smem_address(tile.data + ScoresTile::offset(row, chunk));
#pragma unroll
        for (int r = 0; r < kScoreRows / 16; ++r)
            stmatrix_x4_trans(to + r * 16 * ScoresTile::kSlabCols * sizeof(T), pairs[r]);
    }

    // S and dP to P and dS.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, int visit) {
        const int first_word = (smem_.work_tile().template row_of<kRows>(visit) + part_.first_row()) / 32;
        const float *lse = info().lse + part_.first_row(), *delta = info().delta + part_.first_row();
#pragma unroll
        for (int w = 0; w < kScoreRows / 32; ++w)
            keys_.differentiate(p_, smem_.keys, first_word + w, s, dp, w * 4, lse + w * 32, delta + w * 32);
    }

    // This thread's of the slot, in the order in which registers hold them: four numbers, and kDqStride on the next.
    __device__ __forceinline__ float4* dquery_sums(int visit) const { return dquery_sums_ + visit * kVisitSums; }
    __device__ __forceinline__ void add_dquery(const DquerySum& dquery, int visit) const {
        float4* to = dquery_sums(visit);
        if constexpr (Traits::kStagesDquery) {
            part_.add_staged(dquery, smem_.dquery[warp_id() - 4], reinterpret_cast<float*>(to));
        } else {
#pragma unroll
            for (int n = 0; n < kDqTiles; ++n) reduce_add(reinterpret_cast<float*>(to + n * kDqStride), dquery[0][n]);
        }
    }

    // What the tile's keys get, to their sums in global memory.
    __device__ __forceinline__ void add_to_keys() {
        const GroupedSparseBwdWorkTile& work_tile = smem_.work_tile();
        const int64_t first_key = p_.cu_seqlens_k == nullptr ? work_tile.s.batch * p_.seqlen_k : work_tile.s.first_key;
        float* const dkey =
            p_.dkv_accum + (first_key * p_.kv_heads + work_tile.head / work_tile.group) * kHeadDim + part_.first_col();
        const int64_t row_stride = p_.kv_heads * kHeadDim;
        float* const dvalue = dkey + p_.dkv_rows * row_stride;
        if constexpr (Traits::kSharesKeys) {
            keys_.add(dvalue_, dvalue, row_stride);
            keys_.add(dkey_, dkey, row_stride);
        } else {
            auto& stages = smem_.sums[warp_id() - 4];
            keys_.add_staged(dvalue_, dvalue, row_stride, stages, sums_part_);
            keys_.add_staged(dkey_, dkey, row_stride, stages, sums_part_);
        }
        keys_.add_dbias(p_, work_tile.s, work_tile.head);
    }

    // The last part of the list to end makes dQ of the slot's sums, and leaves zeros to the next rows that go by it.
    __device__ __forceinline__ void end_part() const {
        const GroupedSparseBwdWorkTile& work_tile = smem_.work_tile();
        const int parts = static_cast<int>(p_.list_splits);
        const bool leads = threadIdx.x == 128;
        __threadfence();
        named_barrier_sync(1, kThreads);
        if (leads) smem_.ends_last = atomicAdd(finished_splits(p_, slot_), 1) % parts == parts - 1;
        named_barrier_sync(1, kThreads);
        if (!smem_.ends_last) return;
        __threadfence();
        constexpr int kAtOnce = 2;  // they come from far
        for (int first = 0; first < visits_; first += kAtOnce) {
            DquerySum dquery[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int n = 0; n < kDqTiles; ++n) {
                    float4 x{};
                    if (first + i < visits_) x = __ldcg(dquery_sums(first + i) + n * kDqStride);
                    float (&sum)[4] = dquery[i][0][n];
                    sum[0] = x.x, sum[1] = x.y, sum[2] = x.z, sum[3] = x.w;
                }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i == visits_) break;
#pragma unroll
                for (int n = 0; n < kDqTiles; ++n) __stcg(dquery_sums(first + i) + n * kDqStride, float4{});
                store_dquery(dquery[i], first + i);
            }
        }
        if (Traits::kStagesDquery) fence_proxy_async_global();  // the copy engine adds to these zeros
        __threadfence();
        named_barrier_sync(1, kThreads);
        if (leads) store_release(slot_epoch(p_, slot_), work_tile.unit / static_cast<int>(p_.dquery_slots) + 1);
    }
    __device__ __forceinline__ void store_dquery(const DquerySum& dquery, int visit) const {
        const GroupedSparseBwdWorkTile& work_tile = smem_.work_tile();
        const int first = work_tile.first_row + work_tile.row_of<kRows>(visit) + part_.dquery_row();
        T* to = static_cast<T*>(p_.dquery.data) +
                query_offset(p_.dquery, work_tile.s, work_tile.head_of<kRows>(visit)) + part_.dquery_col();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first + warp_id() % 4 * 16 + h * 8 + fragment_row();
            store_row(dquery, h, static_cast<float>(p_.softmax_scale), to + row * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim) - part_.dquery_col(), row < work_tile.s.rows);
        }
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const int warpgroup_;
    const Part part_;
    const int warp_key_;  // this warp's first key of the tile's
    int slot_, visits_;
    float4* dquery_sums_;
    Pipeline<1> key_pipeline_, value_pipeline_;
    Pipeline<Traits::kStages> query_pipeline_, dout_pipeline_;
    Pipeline<1> pairs_pipeline_;
    int dscores_stage_ = 0, sums_part_ = 0;
    KeyFragment<kBias> keys_;
    DimSum dkey_, dvalue_;
};

}  // namespace flash_dmattn::cuda::sm90
