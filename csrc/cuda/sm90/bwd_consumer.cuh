// A warp group that multiplies, of the backward: its part of dK, dV and dQ, and of the bias's gradient.
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
          warp_key_((Tile::kSharesKeys ? warp_id() % 4 : warp_id() - 4) * 16),
          exchange_(smem.exchange, group_, smem.rank, static_cast<int>(p.dbias.batch_sharers)),
          query_ring_(smem.query_ring), dout_ring_(smem.dout_ring), bias_ring_(smem.bias_ring),
          probs_ring_(smem.probs_ring), last_query_(smem.query_ring), last_pairs_(smem.bias_ring) {}

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int n = 0; n < Tile::kSumCols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dkey_[0][n][i] = dvalue_[0][n][i] = 0;
        mbarrier_wait(smem_address(&smem_.keys_full), 0);
        clear_unseen_keys();
        int head = -1;
        Pairs scores, dprobs;  // declared in the loop, they would drive the sums out of the registers
        PairsOperand probs, dscores;
        // Tested before and behind, the loop leaves products in flight from one visit to the next.
        query_ring_.wait_full();
        if (!at_end()) {
            do {
                if (info().head != head) {
                    if (head >= 0) end_head(head);
                    begin_head(head = info().head);
                }
                visit(scores, dprobs, probs, dscores);
                query_ring_.advance();
                query_ring_.wait_full();
            } while (!at_end());
            wgmma_wait<0>();
            kept_in_flight(dkey_);
            if (p_.deterministic) {
                barrier_sync(2 + group_, 128);
                if (leads_group()) end_last_turn();
            }
        }
        if (head >= 0) end_head(head);
        if (has_key_dbias() && p_.dbias.heads != p_.heads) store_key_sums(work_.first_head);
        store_keys(p_.dkey, dkey_, static_cast<float>(p_.softmax_scale));
        store_keys(p_.dvalue, dvalue_, 1);
        if (kBias == BiasKind::kDense) store_box_wait();
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kHeadDim = Tile::kHeadDim;
    static constexpr int kScoreRows = Tile::kScoreRows, kTiles = kScoreRows / 8, kDqTiles = Tile::kDqCols / 8;
    using RowsTile = typename Tile::RowsTile;
    using KeysTile = typename Tile::KeysTile;
    using PairsTile = typename Tile::PairsTile;
    using Pairs = float[1][kTiles][4];      // keys by rows
    using PairsOperand = uint32_t[kScoreRows / 16][4];
    using DimSum = float[1][Tile::kSumCols / 8][4];  // keys by columns
    using DquerySum = float[1][kDqTiles][4];

    __device__ __forceinline__ void visit(Pairs& scores, Pairs& dprobs, PairsOperand& probs, PairsOperand& dscores) {
        const int row_tile = info().row_tile;
        const bool has_empty = clear_empty_rows(query());
        issue_scores(scores, smem_.key, query());
        dout_ring_.wait_full();
        if (has_empty) clear_empty_rows(dout());
        issue_scores(dprobs, smem_.value, dout());
        if constexpr (Tile::kSharesKeys) end_last_dkey();
        wgmma_wait<0>();
        kept_in_flight(scores);
        kept_in_flight(dprobs);
        differentiate(scores, dprobs, row_tile);
        if constexpr (Tile::kExchanges) exchange_.send(dprobs);
        to_operand<T>(scores, probs);
        to_operand<T>(dprobs, dscores);
        if constexpr (Tile::kSharesKeys) {
            add_of_shared_keys(probs, dscores, row_tile);
        } else {
            add_of_own_keys(probs, dscores, row_tile);
        }
    }
    // P and dS of the group's own keys: operands as they lie in registers.
    __device__ __forceinline__ void add_of_own_keys(const PairsOperand& probs, const PairsOperand& dscores,
                                                    int row_tile) {
        issue_sum(dvalue_, probs, dout());
        store_pairs(pairs(), dscores);
        if (Tile::kExchanges && leads_group()) store_box_wait_read();  // of the sums of the visit before
        fence_async();
        barrier_sync(1, Tile::kConsumers * 128);  // dS has come whole, and nobody reads the one before
        store_dbias(row_tile);
        DquerySum dquery;
        issue_dquery(dquery);
        issue_sum(dkey_, dscores, query());
        if (p_.deterministic) wait_for_turn();
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
    }
    // Of the keys that the groups share each has some rows: it needs the others' P and dS, too. dK is awaited in the next
    // visit, so that its product runs while dQ is added to its sums.
    __device__ __forceinline__ void add_of_shared_keys(const PairsOperand& probs, const PairsOperand& dscores,
                                                       int row_tile) {
        probs_ring_.wait_empty();
        store_pairs(smem_.probs, probs);
        store_pairs(pairs(), dscores);
        fence_async();
        barrier_sync(1, Tile::kConsumers * 128);  // P and dS have come whole
        store_dbias(row_tile);
        issue_sum(dvalue_, smem_.probs, dout());
        DquerySum dquery;
        issue_dquery(dquery);
        issue_sum(dkey_, pairs(), query());
        bias_ring_.advance();
        if (p_.deterministic) wait_for_turn();
        wgmma_wait<1>();  // dV and dQ
        kept_in_flight(dvalue_);
        kept_in_flight(dquery);
        dout_ring_.release();
        dout_ring_.advance();
        probs_ring_.release();
        probs_ring_.advance();
        add_dquery(dquery, row_tile);
        dkey_in_flight_ = true;
    }
    // Of the visit before, once the scores of this one have been issued.
    __device__ __forceinline__ void end_last_dkey() {
        wgmma_wait<2>();
        kept_in_flight(dkey_);
        if (!dkey_in_flight_) return;
        last_query_.release();
        last_query_.advance();
        if constexpr (kBias == BiasKind::kDense) {
            if (leads_group()) store_box_wait_read();
            last_pairs_.release();
            last_pairs_.advance();
        }
    }

    __device__ const Sequence& sequence() const { return smem_.sequence; }
    static __device__ bool leads_group() { return threadIdx.x % 128 == 0; }
    __device__ const typename Smem::RowInfo& info() const { return smem_.rows[query_ring_.stage()]; }
    __device__ bool at_end() const { return info().row_tile == Smem::RowInfo::kEnd; }
    __device__ RowsTile& query() const { return smem_.query[query_ring_.stage()]; }
    __device__ RowsTile& dout() const { return smem_.dout[dout_ring_.stage()]; }
    __device__ PairsTile& pairs() const { return smem_.pairs[bias_ring_.stage()]; }
    // Of the sequence: key h of this lane's two.
    __device__ int key(int h) const { return work_.key_tile * kKeys + warp_key_ + h * 8 + fragment_row(); }

    // The group's first, of a tile: of the keys, of the rows of S and dP, of the columns of dK and dV.
    __device__ int group_key() const { return Tile::kSharesKeys ? 0 : group_ * 64; }
    __device__ int group_row() const { return Tile::kSharesKeys ? group_ * kScoreRows : 0; }
    __device__ int group_col() const { return Tile::kSharesKeys ? group_ * Tile::kSumCols : 0; }

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
    // The gradient of a key's bias is its sum of dx over the rows. Of two groups' parts the order does not matter.
    __device__ void store_key_sums(int head) {
        const Sequence& s = sequence();
        float* to = static_cast<float*>(p_.dbias.data) + pair_offset(p_.dbias, s, head, p_.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(key_sums_[h]);
            if (leads_row() && key(h) < s.keys) {
                float* of_key = to + key(h) * p_.dbias.col_stride;
                if (Tile::kSharesKeys) {
                    reduce_add(of_key, sum);
                } else {
                    *of_key = sum;
                }
            }
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
        constexpr int kCount = kKeys / Tile::kConsumers;
        clear_rows<kCount>(smem_.key, group_ * kCount, is_unseen);
        clear_rows<kCount>(smem_.value, group_ * kCount, is_unseen);
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
        const Operand<KeysTile> a(keys, group_key());
        const Operand<RowsTile> b(rows, group_row());
        kept_in_flight(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16)
            Wgmma<kScoreRows>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit();
    }
    // dV += P dO, or dK += dS Q: of the group's keys, or of all, in shared memory, and the group's columns.
    __device__ __forceinline__ void issue_sum(DimSum& sum, const PairsOperand& pairs, const RowsTile& rows) {
        const Operand<RowsTile> b(rows);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<Tile::kSumCols>::template multiply<T, true>(sum, pairs[r / 16], b.down(r), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_sum(DimSum& sum, const PairsTile& pairs, const RowsTile& rows) {
        const Operand<PairsTile> a(pairs);
        const Operand<RowsTile> b(rows);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRows; r += 16)
            Wgmma<Tile::kSumCols>::template multiply<T, true, true>(sum, a.down(r), b.down(r, group_col()), true);
        wgmma_commit();
    }
    // dQ = dS^T K.
    __device__ __forceinline__ void issue_dquery(DquerySum& dquery) const {
        const Operand<PairsTile> a(pairs(), Tile::kSplitsDqRows ? group_ * 64 : 0);
        const Operand<KeysTile> b(smem_.key);
        const int col = Tile::kSplitsDqRows ? 0 : group_ * Tile::kDqCols;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<Tile::kDqCols>::template multiply<T, false, true>(dquery, a.across(k), b.down(k, col), k > 0);
        wgmma_commit();
    }

    // Of the lane, in a tile of pairs: 16 of the group's rows from `row` on and this warp's 16 keys, transposed by ldmatrix
    // and stmatrix to what two neighbouring tiles of the accumulator hold.
    __device__ __forceinline__ uint32_t pairs_at(const PairsTile& tile, int row) const {
        const int lane = lane_id();
        return smem_address(tile.data + PairsTile::offset(group_row() + row + lane % 8 + lane / 16 * 8,
                                                          warp_key_ / 8 + lane / 8 % 2));
    }
    __device__ __forceinline__ void store_pairs(PairsTile& to, const PairsOperand& pairs) const {
#pragma unroll
        for (int r = 0; r < kScoreRows / 16; ++r) stmatrix_x4_trans(pairs_at(to, r * 16), pairs[r]);
    }

    // S and dP to P and dS.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, int row_tile) {
        if constexpr (kBias == BiasKind::kDense) bias_ring_.wait_full();
        // Whether all rows of the group's that there are may see this warp's keys, by causality, lengths and intervals.
        const int first_row = row_tile * kRows + group_row(), end_row = min(first_row + kScoreRows, sequence().rows);
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
        const int group_rows = group_row() + fragment_col(), first_row = row_tile * kRows + group_rows;
        const int bit = warp_key_ % 32 + fragment_row();
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            if (kBias == BiasKind::kDense) ldmatrix_x4_trans(dense, pairs_at(pairs(), n * 8));
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float2 lse = *reinterpret_cast<const float2*>(rows.lse + group_rows + m * 8);
                const float2 delta = *reinterpret_cast<const float2*>(rows.delta + group_rows + m * 8);
                uint2 bits = {~0u, ~0u};
                if (kBits && has_bits)
                    bits = *reinterpret_cast<const uint2*>(rows.mask[warp_key_ / 32] + group_rows + m * 8);
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
    // In deterministic mode the blocks of one head add to a tile of dQ in the order of their keys. While products run the
    // last turn is ended, of which all has been added since the groups have met, and the next awaited.
    __device__ __forceinline__ void wait_for_turn() const {
        if (leads_group()) {
            end_last_turn();
            int32_t* turn = info().turns + group_;
            while (load_acquire(turn) != info().turn) {
            }
            smem_.turn[group_] = turn;
        }
        barrier_sync(2 + group_, 128);
    }
    // Of the visit before, if any: waits until the group's additions have arrived.
    __device__ __forceinline__ void end_last_turn() const {
        if (smem_.turn[group_] != nullptr) store_release(smem_.turn[group_], work_.key_tile + 1);
    }

    // dS of the group's keys and rows, once it lies in shared memory.
    __device__ __forceinline__ void store_dbias(int row_tile) {
        head_of_visit_ = info().head;
        if constexpr (kBias == BiasKind::kDense) {
            if (Tile::kExchanges || p_.dense_dbias != DenseDbias::kByEntry || !leads_group()) return;
            store_box(&maps_.dbias, smem_address(pairs().data + PairsTile::offset(group_row(), group_key() / 8)),
                      work_.key_tile * kKeys + group_key(), row_tile * kRows + group_row(), head_of_visit_,
                      smem_.bias_batch);
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
                  row_tile * kRows + exchange_.first_row(), head_of_visit_, smem_.bias_batch);
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
        T* to = static_cast<T*>(view.data) + key_offset(view, s, work_.kv_head) + group_col();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_row(sum, h, factor, to + key(h) * view.row_stride, static_cast<int>(p_.head_dim) - group_col(),
                      key(h) < s.keys);
    }

    const BwdArgs& p_;
    const BwdMaps& maps_;
    Smem& smem_;
    const BwdWork& work_;
    const int group_;
    const int warp_key_;  // this warp's first key of the block's
    std::conditional_t<Tile::kExchanges, BwdExchange<Tile>, NoExchange> exchange_;
    Ring<Tile::kStages> query_ring_, dout_ring_, bias_ring_;
    // Of shared keys alone: P, and what the dK in flight reads, Q and dS.
    Ring<1> probs_ring_;
    Ring<Tile::kStages> last_query_, last_pairs_;
    bool dkey_in_flight_ = false;
    int head_of_visit_ = 0;
    RowRange rows_[2];  // that may see this lane's keys
    float key_bias_[2] = {};
    float key_sums_[2] = {};
    DimSum dkey_, dvalue_;
};

}  // namespace flash_dmattn::cuda::sm90
