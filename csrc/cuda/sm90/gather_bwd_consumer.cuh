// A warp group that multiplies, of the backward over key lists: what 64 keys of each tile get of dK, dV and the gradient of
// their bias, and dQ of 64 rows.
//
// Who waits for whom: both groups, at barrier 1, until dS of the tile is whole, since each makes its rows of dQ from all of
// it; and, before a group writes dS of the next tile, at barrier 2 + group, for the other to have read its own.
#pragma once

#include "clear_rows.cuh"
#include "gather_bwd_block.cuh"
#include "rows_out.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
class GatherBwdConsumer {
public:
    using T = typename Tile::T;
    using Smem = GatherBwdSmem<Tile>;

    __device__ GatherBwdConsumer(const BwdArgs& p, Smem& smem)
        : p_(p), smem_(smem), group_(static_cast<int>(threadIdx.x) / 128 - 1), warp_key_((warp_id() - 4) * 16),
          key_ring_(smem.key_ring), value_ring_(smem.value_ring) {
        const GatherBwdWork& work = smem.work();
        const int kv_head = shared_head(work.head, p.heads, p.kv_heads);
        const int64_t first_key = p.cu_seqlens_k == nullptr ? work.s.batch * p.seqlen_k : work.s.first_key;
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
            key_ring_.wait_full();
            fence_async();  // threads have written the keys
            issue_scores(scores[0], key_tile(), smem_.query, 0);
            value_ring_.wait_full();
            fence_async();
            issue_scores(dprobs[0], value_tile(), smem_.dout, 0);
            issue_scores(scores[1], key_tile(), smem_.query, 1);
            keys_.begin(smem_.keys[key_ring_.stage()], warp_key_);
            wgmma_wait<1>();
            kept_in_flight(scores[0]);
            kept_in_flight(dprobs[0]);
            differentiate(scores[0], dprobs[0], 0);
            to_operand<T>(scores[0], probs[0]);
            to_operand<T>(dprobs[0], dscores);
            if (tile > 0) barrier_sync(2 + group_, kThreads);  // the other group has read the dS before
            store_dscores(dscores, 0);
            issue_scores(dprobs[1], value_tile(), smem_.dout, 1);
            wgmma_wait<0>();
            kept_in_flight(scores[1]);
            kept_in_flight(dprobs[1]);
            value_ring_.release();
            value_ring_.advance();
            differentiate(scores[1], dprobs[1], 1);
            to_operand<T>(scores[1], probs[1]);
            to_operand<T>(dprobs[1], dscores);
            store_dscores(dscores, 1);
            fence_async();
            keys_.add_dbias(p_, smem_.work().s, smem_.work().head);

            DimSum dvalue_of_tile, dkey_of_tile;
            issue_dvalue(dvalue_of_tile, probs);
            barrier_sync(1, kThreads);  // dS of the tile is whole
            issue_dquery();
            wgmma_wait<0>();
            kept_in_flight(dvalue_of_tile);
            kept_in_flight(dquery_);
            if (tile + 1 < tiles) barrier_arrive(2 + (group_ ^ 1), kThreads);
            key_ring_.release();
            key_ring_.advance();
            add_to_keys(dvalue, dvalue_of_tile);
            issue_dkey(dkey_of_tile);
            wgmma_wait<0>();
            kept_in_flight(dkey_of_tile);
            add_to_keys(dkey_, dkey_of_tile);
        }
        store_dquery();
        store_box_wait();
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kHeadDim = Tile::kHeadDim;
    static constexpr int kThreads = Tile::kConsumers * 128;
    static constexpr int kHalf = kRows / 2, kTiles = kHalf / 8, kDimTiles = kHeadDim / 8;
    using RowsTile = typename Tile::RowsTile;
    using KeysTile = typename Tile::KeysTile;
    using PairsTile = typename Tile::PairsTile;
    using Pairs = float[1][kTiles][4];      // keys by half of the rows
    using Operands = uint32_t[kHalf / 16][4];
    using DimSum = float[1][kDimTiles][4];  // keys, or rows, by columns

    __device__ const KeysTile& key_tile() const { return smem_.key[key_ring_.stage()]; }
    __device__ const KeysTile& value_tile() const { return smem_.value[value_ring_.stage()]; }
    // A row that sees nothing may hold anything.
    __device__ __forceinline__ void clear_empty_rows() const {
        if (!any_of(smem_.has_empty)) return;
        const auto is_empty = [&](int r) { return smem_.lse[r] == kInfinity; };
        clear_rows<kRows, kThreads>(smem_.query, 0, static_cast<int>(threadIdx.x) - 128, is_empty);
        clear_rows<kRows, kThreads>(smem_.dout, 0, static_cast<int>(threadIdx.x) - 128, is_empty);
        barrier_sync(1, kThreads);
    }

    // A product that begins anew is cleared nevertheless, here and below: else it would hold its registers from the last one
    // on.
    // S = K Q^T, or dP = V dO^T, of half of the rows.
    __device__ __forceinline__ void issue_scores(Pairs& pairs, const KeysTile& keys, const RowsTile& rows, int half) const {
        const Operand<KeysTile> a(keys, group_ * 64);
        const Operand<RowsTile> b(rows, half * kHalf);
        clear(pairs);
        kept_in_flight(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16)
            Wgmma<kHalf>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit();
    }
    // dV = P dO, of the tile alone.
    __device__ __forceinline__ void issue_dvalue(DimSum& sum, const Operands (&probs)[2]) const {
        const Operand<RowsTile> b(smem_.dout);
        clear(sum);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<kHeadDim>::template multiply<T, true>(sum, probs[r / kHalf][r % kHalf / 16], b.down(r), r > 0);
        wgmma_commit();
    }
    // dK = dS Q, of the tile alone.
    __device__ __forceinline__ void issue_dkey(DimSum& sum) const {
        const Operand<PairsTile> a(smem_.dscores);
        const Operand<RowsTile> b(smem_.query);
        clear(sum);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<kHeadDim>::template multiply<T, true, true>(sum, a.down(r, group_ * 64), b.down(r), r > 0);
        wgmma_commit();
    }
    // dQ += dS^T K.
    __device__ __forceinline__ void issue_dquery() {
        const Operand<PairsTile> a(smem_.dscores, group_ * 64);
        const Operand<KeysTile> b(key_tile());
        kept_in_flight(dquery_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kHeadDim>::template multiply<T, false, true>(dquery_, a.across(k), b.down(k), true);
        wgmma_commit();
    }

    // Rows by keys, transposed by stmatrix.
    __device__ __forceinline__ void store_dscores(const Operands& dscores, int half) const {
        const int row = lane_id() % 8 + lane_id() / 16 * 8, chunk = warp_key_ / 8 + lane_id() / 8 % 2;
        const uint32_t to = smem_address(smem_.dscores.data + PairsTile::offset(row, chunk));
#pragma unroll
        for (int r = 0; r < kHalf / 16; ++r)
            stmatrix_x4_trans(to + (half * kHalf + r * 16) * PairsTile::kPanelCols * sizeof(T), dscores[r]);
    }

    // S and dP to P and dS, of half of the rows.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int w = half * 2 + i;
            keys_.differentiate(p_, smem_.keys[key_ring_.stage()], w, s, dp, i * 4, smem_.lse + w * 32, smem_.delta + w * 32);
        }
    }

    __device__ __forceinline__ void add_to_keys(float* to, const DimSum& sum) {
        keys_.add_staged(sum, to, p_.kv_heads * kHeadDim, smem_.sums[warp_id() - 4], sums_part_);
    }

    __device__ __forceinline__ void store_dquery() const {
        const GatherBwdWork& work = smem_.work();
        T* to = static_cast<T*>(p_.dquery.data) + query_offset(p_.dquery, work.s, work.head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work.first_row + warp_key_ + h * 8 + fragment_row();
            store_row(dquery_, h, static_cast<float>(p_.softmax_scale), to + row * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim), row < work.s.rows);
        }
    }

    const BwdArgs& p_;
    Smem& smem_;
    const int group_;
    const int warp_key_;  // this warp's first key of the tile's, and first row of dQ
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kValueStages> value_ring_;
    float* dkey_;  // the sums of the sequence's first key
    int sums_part_ = 0;
    LaneKeys<kBias> keys_;
    DimSum dquery_;
};

}  // namespace flash_dmattn::cuda::sm90
