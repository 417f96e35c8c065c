// A warp group that multiplies, of the backward: dK and dV of its 64 keys, and its part of dQ and of the bias's gradient.
#pragma once

#include "../common/intervals.cuh"
#include "../common/reduce_add.cuh"
#include "../common/scores.cuh"
#include "bwd_block.cuh"
#include "bwd_scratch.cuh"
#include "rows_out.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
class BwdConsumer {
public:
    using T = typename Tile::T;
    using Smem = BwdSmem<Tile, kBias>;

    __device__ BwdConsumer(const BwdArgs& p, const BwdMaps& maps, Smem& smem, const BwdWork& work)
        : p_(p), maps_(maps), smem_(smem), work_(work), group_(static_cast<int>(threadIdx.x) / 128 - 1),
          warp_key_((warp_id() - 4) * 16),
          exchange_(smem.exchange, group_, smem.rank, static_cast<int>(p.dbias.batch_sharers)), query_ring_(smem.query_ring),
          dout_ring_(smem.dout_ring), bias_ring_(smem.bias_ring) {}

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dkey_[0][n][i] = dvalue_[0][n][i] = 0;
        mbarrier_wait(smem_address(&smem_.keys_full), 0);
        clear_unseen_keys();
        int head = -1;
        Pairs scores, dprobs;
        uint32_t probs[kRows / 16][4], dscores[kRows / 16][4];
        for (;;) {
            query_ring_.wait_full();
            const int row_tile = info().row_tile;
            if (row_tile == Smem::RowInfo::kEnd) break;
            if (info().head != head) {
                if (head >= 0) end_head(head);
                begin_head(head = info().head);
            }
            const bool has_empty = clear_empty_rows(smem_.query[query_ring_.stage()]);
            issue_scores(scores, smem_.key, smem_.query[query_ring_.stage()]);
            dout_ring_.wait_full();
            if (has_empty) clear_empty_rows(smem_.dout[dout_ring_.stage()]);
            issue_scores(dprobs, smem_.value, smem_.dout[dout_ring_.stage()]);
            wgmma_wait<0>();
            kept_in_flight(scores);
            kept_in_flight(dprobs);
            differentiate(scores, dprobs, row_tile);
            if constexpr (Tile::kExchanges) exchange_.send(dprobs);
            to_operand(scores, probs);
            to_operand(dprobs, dscores);

            issue_sum(dvalue_, probs, smem_.dout[dout_ring_.stage()]);
            store_dscores(dscores);
            if (Tile::kExchanges && leads_group()) store_box_wait_read();  // of the sums of the visit before
            fence_async();
            barrier_sync(1, Tile::kConsumers * 128);  // dS has come whole, and nobody reads the one before
            store_dbias(row_tile);
            DquerySum dquery;
            issue_dquery(dquery);
            issue_sum(dkey_, dscores, smem_.query[query_ring_.stage()]);
            wgmma_wait<1>();  // dV and dQ
            kept_in_flight(dvalue_);
            kept_in_flight(dquery);
            dout_ring_.release();
            dout_ring_.advance();
            add_dquery(dquery, row_tile);
            end_pairs();
            if constexpr (Tile::kExchanges) store_exchanged(row_tile);
            wgmma_wait<0>();  // dK
            kept_in_flight(dkey_);
            query_ring_.release();
            query_ring_.advance();
        }
        if (head >= 0) end_head(head);
        if (has_key_dbias() && p_.dbias.heads != p_.heads) store_key_sums(work_.first_head);
        store_keys(p_.dkey, dkey_, static_cast<float>(p_.softmax_scale));
        store_keys(p_.dvalue, dvalue_, 1);
        if (kBias == BiasKind::kDense) store_box_wait();
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kHeadDim = Tile::kHeadDim;
    static constexpr int kTiles = kRows / 8, kDimTiles = kHeadDim / 8, kDqTiles = Tile::kDqCols / 8;
    using RowsTile = typename Tile::RowsTile;
    using KeysTile = typename Tile::KeysTile;
    using PairsTile = typename Tile::PairsTile;
    using Pairs = float[1][kTiles][4];      // keys by rows
    using DimSum = float[1][kDimTiles][4];  // keys by columns
    using DquerySum = float[1][kDqTiles][4];

    __device__ const Sequence& sequence() const { return smem_.sequence; }
    static __device__ bool leads_group() { return threadIdx.x % 128 == 0; }
    __device__ const typename Smem::RowInfo& info() const { return smem_.rows[query_ring_.stage()]; }
    // Of the sequence: key h of this lane's two.
    __device__ int key(int h) const { return work_.key_tile * kKeys + warp_key_ + h * 8 + fragment_row(); }

    // What is of a head and of this lane's keys: their bias, and the rows that may see them.
    __device__ void begin_head(int head) {
        const Sequence& s = sequence();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int k = key(h);
            rows_[h] = {p_.is_causal ? s.causal_begin(k) : 0, k < s.keys ? s.rows : 0};
            if (k < s.keys && p_.interval_tiles.tiles != nullptr)
                rows_[h] = rows_of_key(p_, s, interval_offset(p_.intervals, s, head, p_.heads), k);
            if constexpr (kBias == BiasKind::kKey) {
                key_bias_[h] = 0;
                if (k < s.keys) {
                    const char* bias = bias_data(p_.bias, pair_offset(p_.bias, s, head, p_.heads));
                    key_bias_[h] = key_bias_of<T>(p_.bias, load_key_bias(p_.bias, bias, k * p_.bias.col_stride)) * kLog2E;
                }
            }
        }
    }
    __device__ void end_head(int head) {
        if (has_key_dbias() && p_.dbias.heads == p_.heads) store_key_sums(head);
    }
    __device__ bool has_key_dbias() const { return kBias == BiasKind::kKey && p_.dbias.data != nullptr; }
    // The gradient of a key's bias is its sum of dx over the rows.
    __device__ void store_key_sums(int head) {
        const Sequence& s = sequence();
        float* to = static_cast<float*>(p_.dbias.data) + pair_offset(p_.dbias, s, head, p_.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(key_sums_[h]);
            if (leads_row() && key(h) < s.keys) to[key(h) * p_.dbias.col_stride] = sum;
            key_sums_[h] = 0;
        }
    }

    // Rows [first, first + kCount) of a tile of 16-bit elements to 0 where is_empty(row); a warp group calls together.
    template <int kCount, typename Rows, typename IsEmpty>
    __device__ __forceinline__ void clear_rows(Rows& tile, int first, const IsEmpty& is_empty) const {
        constexpr int kChunks = kHeadDim / 8;
        for (int i = threadIdx.x % 128; i < kCount * kChunks; i += 128)
            if (is_empty(first + i / kChunks))
                *reinterpret_cast<uint4*>(tile.data + Rows::offset(first + i / kChunks, i % kChunks)) = {};
        fence_async();
    }
    __device__ __forceinline__ void clear_unseen_keys() const {
        const auto is_unseen = [&](int k) { return !(smem_.seen[k / 32] >> k % 32 & 1); };
        bool any = false;
        for (int w = 0; w < Tile::kWords; ++w) any |= smem_.seen[w] != ~0u;
        if (!any) return;
        clear_rows<64>(smem_.key, group_ * 64, is_unseen);
        clear_rows<64>(smem_.value, group_ * 64, is_unseen);
        barrier_sync(1, Tile::kConsumers * 128);
    }
    // A row that sees nothing may hold anything, and zero times NaN would reach a sum. Gives whether there is one.
    __device__ __forceinline__ bool clear_empty_rows(RowsTile& rows) const {
        bool any = false;
#pragma unroll
        for (int w = 0; w < kRows / 32; ++w) any |= info().has_empty[w];
        if (!any) return false;
        clear_rows<kRows>(rows, 0, [&](int r) { return info().lse[r] == kInfinity; });
        barrier_sync(2 + group_, 128);
        return true;
    }

    // S = K Q^T, or dP = V dO^T.
    __device__ __forceinline__ void issue_scores(Pairs& pairs, const KeysTile& keys, const RowsTile& rows) const {
        const Operand<KeysTile> a(keys, group_ * 64);
        const Operand<RowsTile> b(rows);
        kept_in_flight(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16)
            Wgmma<kRows>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit();
    }
    // dV += P dO, or dK += dS Q.
    __device__ __forceinline__ void issue_sum(DimSum& sum, const uint32_t (&pairs)[kRows / 16][4], const RowsTile& rows) {
        const Operand<RowsTile> b(rows);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<kHeadDim>::template multiply<T, true>(sum, pairs[r / 16], b.down(r), true);
        wgmma_commit();
    }
    // dQ = dS^T K.
    __device__ __forceinline__ void issue_dquery(DquerySum& dquery) const {
        const Operand<PairsTile> a(smem_.pairs[bias_ring_.stage()], Tile::kSplitsDqRows ? group_ * 64 : 0);
        const Operand<KeysTile> b(smem_.key);
        const int col = Tile::kSplitsDqRows ? 0 : group_ * Tile::kDqCols;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<Tile::kDqCols>::template multiply<T, false, true>(dquery, a.across(k), b.down(k, col), k > 0);
        wgmma_commit();
    }

    static __device__ __forceinline__ void to_operand(const Pairs& pairs, uint32_t (&operand)[kRows / 16][4]) {
#pragma unroll
        for (int r = 0; r < kRows / 16; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = pairs[0][2 * r + i / 2] + i % 2 * 2;
                operand[r][i] = pack<T>(pair[0], pair[1]);
            }
    }

    // Of the lane, in a tile of pairs: 16 rows from 0 on and this warp's 16 keys, transposed by ldmatrix and stmatrix to
    // what two neighbouring tiles of the accumulator hold.
    __device__ __forceinline__ uint32_t pairs_at(int row) const {
        const int lane = lane_id();
        return smem_address(smem_.pairs[bias_ring_.stage()].data +
                            PairsTile::offset(row + lane % 8 + lane / 16 * 8, warp_key_ / 8 + lane / 8 % 2));
    }
    __device__ __forceinline__ void store_dscores(const uint32_t (&dscores)[kRows / 16][4]) const {
#pragma unroll
        for (int r = 0; r < kRows / 16; ++r) stmatrix_x4_trans(pairs_at(r * 16), dscores[r]);
    }

    // S and dP to P and dS.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, int row_tile) {
        if constexpr (kBias == BiasKind::kDense) bias_ring_.wait_full();
        // Whether all rows of the tile that there are may see this warp's keys, by causality, lengths and intervals.
        const int first_row = row_tile * kRows, end_row = min(first_row + kRows, sequence().rows);
        const auto covers = [&](const RowRange& rows) { return rows.begin <= first_row && rows.end >= end_row; };
        const bool in_range = __all_sync(~0u, covers(rows_[0]) && covers(rows_[1]));
        const bool has_bits = p_.packed_mask.bits != nullptr && !info().mask_full;
        if (p_.softcap > 0) {
            differentiate_pairs<true, true, true>(s, dp, row_tile, has_bits);
        } else if (has_bits) {
            in_range ? differentiate_pairs<false, true, false>(s, dp, row_tile, true)
                     : differentiate_pairs<true, true, false>(s, dp, row_tile, true);
        } else {
            in_range ? differentiate_pairs<false, false, false>(s, dp, row_tile, false)
                     : differentiate_pairs<true, false, false>(s, dp, row_tile, false);
        }
    }
    template <bool kRanges, bool kBits, bool kSoftcap>
    __device__ __forceinline__ void differentiate_pairs(Pairs& s, Pairs& dp, int row_tile, bool has_bits) {
        const auto& rows = info();
        const float scale = static_cast<float>(p_.softmax_scale), softcap = static_cast<float>(p_.softcap);
        const float scale_log2 = (kSoftcap ? softcap : scale) * kLog2E, scale_of_capped = kSoftcap ? scale / softcap : 0;
        const int first_row = row_tile * kRows + fragment_col(), bit = warp_key_ % 32 + fragment_row();
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            if (kBias == BiasKind::kDense) ldmatrix_x4_trans(dense, pairs_at(n * 8));
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float2 lse = *reinterpret_cast<const float2*>(rows.lse + m * 8 + fragment_col());
                const float2 delta = *reinterpret_cast<const float2*>(rows.delta + m * 8 + fragment_col());
                uint2 bits = {~0u, ~0u};
                if (kBits && has_bits)
                    bits = *reinterpret_cast<const uint2*>(rows.mask[warp_key_ / 32] + m * 8 + fragment_col());
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float2 bias = {0, 0};
                    if (kBias == BiasKind::kDense) {
                        bias = unpack<T>(dense[m % 2 * 2 + h]);
                        bias = {bias.x * kLog2E, bias.y * kLog2E};
                    } else if (kBias == BiasKind::kKey) {
                        bias = {key_bias_[h], key_bias_[h]};
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = first_row + m * 8 + e;
                        bool is_visible = true;
                        if (kRanges) is_visible = row >= rows_[h].begin && row < rows_[h].end;
                        if (kBits) is_visible = is_visible && (e ? bits.y : bits.x) >> (bit + h * 8) & 1;
                        const float shift = (e ? bias.y : bias.x) - (e ? lse.y : lse.x);
                        const float dx =
                            differentiate_pair<kSoftcap>(s[0][m][2 * h + e], dp[0][m][2 * h + e], shift,
                                                         e ? delta.y : delta.x, scale_log2, scale_of_capped, is_visible);
                        if (kBias == BiasKind::kKey) key_sums_[h] += is_visible ? dx : 0.f;
                    }
                }
            }
        }
    }

    // To the sums of the tile, in the order in which registers hold it.
    __device__ __forceinline__ void add_dquery(const DquerySum& dquery, int row_tile) const {
        const int64_t tile = dquery_tile<kRows>(p_, sequence(), head_of_visit_, row_tile);
        float* to = p_.dquery_accum + tile * kRows * kHeadDim + (group_ * kDqTiles * 128 + threadIdx.x % 128) * 4;
#pragma unroll
        for (int n = 0; n < kDqTiles; ++n) reduce_add(to + n * 128 * 4, dquery[0][n]);
    }

    // dS of the group's keys, once it lies in shared memory.
    __device__ __forceinline__ void store_dbias(int row_tile) {
        head_of_visit_ = info().head;
        if constexpr (kBias == BiasKind::kDense) {
            if (Tile::kExchanges || p_.dense_dbias != DenseDbias::kByEntry || !leads_group()) return;
            store_box(&maps_.dbias, smem_address(smem_.pairs[bias_ring_.stage()].data + group_ * kRows * 64),
                      work_.key_tile * kKeys + group_ * 64, row_tile * kRows, head_of_visit_,
                      p_.dbias.batches > 1 ? smem_.bias_batch : 0);
            store_box_commit();
        }
    }
    // The part of the tile that this block sums.
    __device__ __forceinline__ void store_exchanged(int row_tile) {
        exchange_.template receive<T>(warp_key_);
        fence_async();
        barrier_sync(2 + group_, 128);
        if (!leads_group()) return;
        store_box(&maps_.dbias, exchange_.sums(), work_.key_tile * kKeys + group_ * 64,
                  row_tile * kRows + exchange_.first_row(), head_of_visit_,
                  p_.dbias.batches > 1 ? smem_.bias_batch : 0);
        store_box_commit();
    }
    __device__ __forceinline__ void end_pairs() {
        if constexpr (kBias == BiasKind::kDense) {
            if (leads_group()) store_box_wait_read();
            bias_ring_.release();
        }
        bias_ring_.advance();
    }

    __device__ __forceinline__ void store_keys(const RowsView& view, const DimSum& sum, float factor) const {
        const Sequence& s = sequence();
        T* to = static_cast<T*>(view.data) + key_offset(view, s, work_.kv_head);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_row(sum, h, factor, to + key(h) * view.row_stride, static_cast<int>(p_.head_dim), key(h) < s.keys);
    }

    const BwdArgs& p_;
    const BwdMaps& maps_;
    Smem& smem_;
    const BwdWork& work_;
    const int group_;
    const int warp_key_;  // this warp's first key of the block's
    std::conditional_t<Tile::kExchanges, BwdExchange<Tile>, NoExchange> exchange_;
    Ring<Tile::kStages> query_ring_, dout_ring_, bias_ring_;
    int head_of_visit_ = 0;
    RowRange rows_[2];  // that may see this lane's keys
    float key_bias_[2] = {};
    float key_sums_[2] = {};
    DimSum dkey_, dvalue_;
};

}  // namespace flash_dmattn::cuda::sm90
