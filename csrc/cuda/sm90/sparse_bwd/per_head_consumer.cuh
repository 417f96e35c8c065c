// A warp group that multiplies, of the backward over key lists: what 64 keys of each tile get of dK, dV and the gradient of
// their bias, and dQ of 64 rows.
//
// Who waits for whom: both groups, at barrier 1, until dS of the tile is whole, since each makes its rows of dQ from all of
// it; and, before a group writes dS of the next tile, at barrier 2 + group, for the other to have read its own.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/zero_rows.cuh"
#include "per_head_shared_storage.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class PerHeadSparseBwdConsumer {
public:
    using T = typename Traits::T;
    using SharedStorage = GatherBwdSharedStorage<Traits>;

    __device__ PerHeadSparseBwdConsumer(const BwdArgs& p, SharedStorage& smem)
        : p_(p),
          smem_(smem),
          warpgroup_(static_cast<int>(threadIdx.x) / 128 - 1),
          warp_key_((warp_id() - 4) * 16),
          key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.value_pipeline) {
        const PerHeadSparseBwdWorkTile& work_tile = smem.work_tile();
        const int kv_head = shared_head(work_tile.head, p.heads, p.kv_heads);
        const int64_t first_key = p.cu_seqlens_k == nullptr ? work_tile.s.batch * p.seqlen_k : work_tile.s.first_key;
        dkey_ = p.dkv_accum + (first_key * p.kv_heads + kv_head) * kHeadDim;
    }

    __device__ __forceinline__ void run() {
        clear(dquery_);
        mbarrier_wait(smem_address(&smem_.rows_full), 0);
        clear_empty_rows();
        float* const dvalue = dkey_ + p_.dkv_rows * p_.kv_heads * kHeadDim;
        const int tiles = smem_.tiles;
        for (int tile = 0; tile < tiles; ++tile) {
            Pairs scores[2], dprobs[2];  // of the halves of the rows
            Operands probs[2], dscores;
            key_pipeline_.consumer_wait();
            fence_proxy_async();  // threads have written the keys
            issue_scores(scores[0], n_block(), smem_.query, 0);
            value_pipeline_.consumer_wait();
            fence_proxy_async();
            issue_scores(dprobs[0], value_tile(), smem_.dout, 0);
            issue_scores(scores[1], n_block(), smem_.query, 1);
            keys_.begin(smem_.keys[key_pipeline_.stage()], warp_key_);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(scores[0]);
            warpgroup_fence_operand(dprobs[0]);
            differentiate(scores[0], dprobs[0], 0);
            to_a_operand<T>(scores[0], probs[0]);
            to_a_operand<T>(dprobs[0], dscores);
            if (tile > 0) named_barrier_sync(2 + warpgroup_, kThreads);  // the other group has read the dS before
            store_dscores(dscores, 0);
            issue_scores(dprobs[1], value_tile(), smem_.dout, 1);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores[1]);
            warpgroup_fence_operand(dprobs[1]);
            value_pipeline_.release();
            value_pipeline_.advance();
            differentiate(scores[1], dprobs[1], 1);
            to_a_operand<T>(scores[1], probs[1]);
            to_a_operand<T>(dprobs[1], dscores);
            store_dscores(dscores, 1);
            fence_proxy_async();
            keys_.add_dbias(p_, smem_.work_tile().s, smem_.work_tile().head);

            DimSum dvalue_of_tile, dkey_of_tile;
            gemm_dv(dvalue_of_tile, probs);
            named_barrier_sync(1, kThreads);  // dS of the tile is whole
            gemm_dq();
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dvalue_of_tile);
            warpgroup_fence_operand(dquery_);
            if (tile + 1 < tiles) named_barrier_arrive(2 + (warpgroup_ ^ 1), kThreads);
            key_pipeline_.release();
            key_pipeline_.advance();
            add_to_keys(dvalue, dvalue_of_tile);
            gemm_dk(dkey_of_tile);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dkey_of_tile);
            add_to_keys(dkey_, dkey_of_tile);
        }
        store_dquery();
        tma_store_wait_group();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim;
    static constexpr int kThreads = Traits::kConsumerWarpgroups * 128;
    static constexpr int kHalf = kRows / 2, kTiles = kHalf / 8, kDimTiles = kHeadDim / 8;
    using RowsTile = typename Traits::RowsTile;
    using KeysTile = typename Traits::KeysTile;
    using ScoresTile = typename Traits::ScoresTile;
    using Pairs = float[1][kTiles][4];  // keys by half of the rows
    using Operands = uint32_t[kHalf / 16][4];
    using DimSum = float[1][kDimTiles][4];  // keys, or rows, by columns

    __device__ const KeysTile& n_block() const { return smem_.key[key_pipeline_.stage()]; }
    __device__ const KeysTile& value_tile() const { return smem_.value[value_pipeline_.stage()]; }
    // A row that sees nothing may hold anything.
    __device__ __forceinline__ void clear_empty_rows() const {
        if (!any_of(smem_.has_empty)) return;
        const auto is_empty = [&](int r) { return smem_.lse[r] == kInfinity; };
        clear_rows<kRows, kThreads>(smem_.query, 0, static_cast<int>(threadIdx.x) - 128, is_empty);
        clear_rows<kRows, kThreads>(smem_.dout, 0, static_cast<int>(threadIdx.x) - 128, is_empty);
        named_barrier_sync(1, kThreads);
    }

    // A product that begins anew is cleared nevertheless, here and below: else it would hold its registers from the last one
    // on.
    // S = K Q^T, or dP = V dO^T, of half of the rows.
    __device__ __forceinline__ void issue_scores(Pairs& pairs, const KeysTile& keys, const RowsTile& rows,
                                                 int half) const {
        const SmemDescriptor<KeysTile> a(keys, warpgroup_ * 64);
        const SmemDescriptor<RowsTile> b(rows, half * kHalf);
        clear(pairs);
        warpgroup_fence_operand(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16)
            Wgmma<kHalf>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit_group();
    }
    // dV = P dO, of the tile alone.
    __device__ __forceinline__ void gemm_dv(DimSum& sum, const Operands (&probs)[2]) const {
        const SmemDescriptor<RowsTile> b(smem_.dout);
        clear(sum);
        warpgroup_fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<kHeadDim>::template multiply<T, true>(sum, probs[r / kHalf][r % kHalf / 16], b.down(r), r > 0);
        wgmma_commit_group();
    }
    // dK = dS Q, of the tile alone.
    __device__ __forceinline__ void gemm_dk(DimSum& sum) const {
        const SmemDescriptor<ScoresTile> a(smem_.dscores);
        const SmemDescriptor<RowsTile> b(smem_.query);
        clear(sum);
        warpgroup_fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<kHeadDim>::template multiply<T, true, true>(sum, a.down(r, warpgroup_ * 64), b.down(r), r > 0);
        wgmma_commit_group();
    }
    // dQ += dS^T K.
    __device__ __forceinline__ void gemm_dq() {
        const SmemDescriptor<ScoresTile> a(smem_.dscores, warpgroup_ * 64);
        const SmemDescriptor<KeysTile> b(n_block());
        warpgroup_fence_operand(dquery_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kHeadDim>::template multiply<T, false, true>(dquery_, a.across(k), b.down(k), true);
        wgmma_commit_group();
    }

    // Rows by keys, transposed by stmatrix.
    __device__ __forceinline__ void store_dscores(const Operands& dscores, int half) const {
        const int row = lane_id() % 8 + lane_id() / 16 * 8, chunk = warp_key_ / 8 + lane_id() / 8 % 2;
        const uint32_t to = smem_address(smem_.dscores.data + ScoresTile::offset(row, chunk));
#pragma unroll
        for (int r = 0; r < kHalf / 16; ++r)
            stmatrix_x4_trans(to + (half * kHalf + r * 16) * ScoresTile::kSlabCols * sizeof(T), dscores[r]);
    }

    // S and dP to P and dS, of half of the rows.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int w = half * 2 + i;
            keys_.differentiate(p_, smem_.keys[key_pipeline_.stage()], w, s, dp, i * 4, smem_.lse + w * 32,
                                smem_.delta + w * 32);
        }
    }

    __device__ __forceinline__ void add_to_keys(float* to, const DimSum& sum) {
        keys_.add_staged(sum, to, p_.kv_heads * kHeadDim, smem_.sums[warp_id() - 4], sums_part_);
    }

    __device__ __forceinline__ void store_dquery() const {
        const PerHeadSparseBwdWorkTile& work_tile = smem_.work_tile();
        T* to = static_cast<T*>(p_.dquery.data) + query_offset(p_.dquery, work_tile.s, work_tile.head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work_tile.first_row + warp_key_ + h * 8 + fragment_row();
            store_row(dquery_, h, static_cast<float>(p_.softmax_scale), to + row * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim), row < work_tile.s.rows);
        }
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const int warpgroup_;
    const int warp_key_;  // this warp's first key of the tile's, and first row of dQ
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    float* dkey_;  // the sums of the sequence's first key
    int sums_part_ = 0;
    KeyFragment<kBias> keys_;
    DimSum dquery_;
};

}  // namespace flash_dmattn::cuda::sm90
