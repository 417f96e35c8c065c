// A warp group that multiplies, of the backward: its part of dK, dV and dQ, and of the bias's gradient.
#pragma once

#include <climits>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/softmax/scores.cuh"
#include "shared_storage.cuh"
#include "workspace.cuh"
#include "cuda/arch/zero_rows.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class BwdConsumer {
public:
    using T = typename Traits::T;
    using SharedStorage = BwdSharedStorage<Traits, kBias>;

    __device__ BwdConsumer(const BwdArgs& p, const BwdMaps& maps, const BwdScale& scale, SharedStorage& smem,
                           const BwdWorkTile& work_tile)
        : p_(p),
          maps_(maps),
          scale_(scale),
          smem_(smem),
          work_tile_(work_tile),
          warpgroup_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
          part_(warpgroup_),
          warp_key_((Traits::kSharesKeys ? warp_id() % 4 : warp_id() - 4) * 16),
          reduction_(smem.reduction, warpgroup_, smem.rank, static_cast<int>(p.dbias.batch_group_size)),
          probs_pipeline_(smem.probs_pipeline) {}

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int n = 0; n < Traits::kSumCols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dkey_[0][n][i] = dvalue_[0][n][i] = 0;
        mbarrier_wait(smem_address(&smem_.keys_full), 0);
        clear_unseen_keys();
        int head = -1;
        Pairs scores, dprobs;  // declared in the loop, they would drive the sums out of the registers
        ScoresDescriptor probs, dscores;
        // Tested before and behind, the loop leaves products in flight from one visit to the next.
        if (begin_visit()) {
            do {
                if (header_.head != head) {
                    if (head >= 0) end_head(head);
                    begin_head(head = header_.head);
                }
                visit(scores, dprobs, probs, dscores);
                place_.advance();
            } while (begin_visit());
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dkey_);
            if (p_.deterministic) {
                wait_for_additions();
                named_barrier_sync(2 + warpgroup_, 128);
                if (is_warpgroup_leader()) end_last_turn();
            }
        }
        if (head >= 0) end_head(head);
        if (has_key_dbias() && p_.dbias.heads != p_.heads) store_key_sums(work_tile_.first_head);
        store_keys(p_.dkey, dkey_, static_cast<float>(p_.softmax_scale));
        store_keys(p_.dvalue, dvalue_, 1);
        tma_store_wait_group();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim;
    static constexpr int kScoreRows = Traits::kScoreRows, kTiles = kScoreRows / 8, kDqTiles = Traits::kDqCols / 8;
    using RowsTile = typename Traits::RowsTile;
    using KeysTile = typename Traits::KeysTile;
    using ScoresTile = typename Traits::ScoresTile;
    using Part = MmaAtomLayout<Traits>;
    using Pairs = typename Part::Pairs;
    using ScoresDescriptor = typename Part::ScoresDescriptor;
    using DimSum = typename Part::DimSum;
    using DquerySum = typename Part::DquerySum;

    // lse or D of the rows of this lane's pairs. Where registers are left they are read at once, while products are awaited:
    // these keep shared memory so busy that a read takes long.
    class RowStats {
    public:
        __device__ __forceinline__ explicit RowStats(const float* of_rows) : from_(of_rows + fragment_col()) {
#pragma unroll
            for (int m = 0; m < kAhead; ++m) numbers_[m] = load(m);
        }
        __device__ __forceinline__ float2 operator[](int m) const { return kAhead > 0 ? numbers_[m] : load(m); }

    private:
        static constexpr int kAhead = kTiles <= 8 && kBias != BiasKind::kDense ? kTiles : 0;
        __device__ __forceinline__ float2 load(int m) const { return *reinterpret_cast<const float2*>(from_ + m * 8); }

        const float* from_;
        float2 numbers_[kAhead > 0 ? kAhead : 1];
    };

    // Whether there is another tile of rows.
    __device__ __forceinline__ bool begin_visit() {
        smem_.query_pipeline.consumer_wait(place_);
        header_ = info().header;
        return header_.m_block != SharedStorage::RowInfo::kEnd;
    }
    __device__ __forceinline__ void visit(Pairs& scores, Pairs& dprobs, ScoresDescriptor& probs,
                                          ScoresDescriptor& dscores) {
        const bool has_empty = any_of(header_.has_empty);
        if (has_empty) clear_empty_rows(query());
        part_.issue_scores(scores, smem_.key, query());
        smem_.dout_pipeline.consumer_wait(place_);
        if (has_empty) clear_empty_rows(dout());
        part_.issue_scores(dprobs, smem_.value, dout());
        if constexpr (Traits::kSharesKeys) end_last_dkey();
        if constexpr (kBias == BiasKind::kDense) smem_.bias_pipeline.consumer_wait(place_);
        if (scale_.softcap > 0) {
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(dprobs);
            differentiate_capped(scores, dprobs);
        } else {
            const RowStats lse(info().lse + part_.first_row());
            wgmma_wait_group<1>();
            warpgroup_fence_operand(scores);
            const bool has_hidden = exponentiate(scores, lse);
            const RowStats delta(info().delta + part_.first_row());
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dprobs);
            has_hidden ? differentiate<true>(scores, dprobs, delta) : differentiate<false>(scores, dprobs, delta);
        }
        if constexpr (Traits::kClusterReduces) reduction_.send(dprobs);
        to_a_operand<T>(scores, probs);
        to_a_operand<T>(dprobs, dscores);
        if constexpr (Traits::kSharesKeys) {
            add_of_shared_keys(probs, dscores);
        } else {
            add_of_own_keys(probs, dscores);
        }
    }
    // P and dS of the group's own keys: operands as they lie in registers.
    __device__ __forceinline__ void add_of_own_keys(const ScoresDescriptor& probs, const ScoresDescriptor& dscores) {
        part_.issue_sum(dvalue_, probs, dout());
        store_pairs(pairs(), dscores);
        if (Traits::kClusterReduces && is_warpgroup_leader())
            tma_store_wait_group_read();  // of the sums of the visit before
        fence_proxy_async();
        if (p_.deterministic) wait_for_additions();
        named_barrier_sync(1, Traits::kConsumerWarpgroups * 128);  // dS has come whole, and nobody reads the one before
        store_dbias();
        DquerySum dquery;
        part_.gemm_dq(dquery, pairs(), smem_.key);
        part_.issue_sum(dkey_, dscores, query());
        if (p_.deterministic) wait_for_turn();
        wgmma_wait_group<1>();  // dV and dQ
        warpgroup_fence_operand(dvalue_);
        warpgroup_fence_operand(dquery);
        smem_.dout_pipeline.release(place_.stage());
        end_pairs();
        add_dquery(dquery);
        if constexpr (Traits::kClusterReduces) store_reduced();
        wgmma_wait_group<0>();  // dK
        warpgroup_fence_operand(dkey_);
        smem_.query_pipeline.release(place_.stage());
    }
    // Of the keys that the groups share each has some rows: it needs the others' P and dS, too. dK is awaited in the next
    // visit, so that its product runs while dQ is added to its sums.
    __device__ __forceinline__ void add_of_shared_keys(const ScoresDescriptor& probs, const ScoresDescriptor& dscores) {
        probs_pipeline_.producer_acquire();
        store_pairs(smem_.probs, probs);
        store_pairs(pairs(), dscores);
        fence_proxy_async();
        named_barrier_sync(1, Traits::kConsumerWarpgroups * 128);  // P and dS have come whole
        store_dbias();
        part_.issue_sum(dvalue_, smem_.probs, dout());
        DquerySum dquery;
        part_.gemm_dq(dquery, pairs(), smem_.key);
        part_.issue_sum(dkey_, pairs(), query());
        if (p_.deterministic) wait_for_turn();
        wgmma_wait_group<1>();  // dV and dQ
        warpgroup_fence_operand(dvalue_);
        warpgroup_fence_operand(dquery);
        smem_.dout_pipeline.release(place_.stage());
        probs_pipeline_.release();
        probs_pipeline_.advance();
        add_dquery(dquery);
        dkey_in_flight_ = true;
    }
    // Of the visit before, once the scores of this one have been issued.
    __device__ __forceinline__ void end_last_dkey() {
        wgmma_wait_group<2>();
        warpgroup_fence_operand(dkey_);
        if (!dkey_in_flight_) return;
        smem_.query_pipeline.release(place_.last_stage());
        if constexpr (kBias == BiasKind::kDense) {
            if (is_warpgroup_leader()) tma_store_wait_group_read();
            smem_.bias_pipeline.release(place_.last_stage());
        }
    }

    __device__ const Sequence& sequence() const { return smem_.sequence; }
    static __device__ bool is_warpgroup_leader() { return threadIdx.x % 128 == 0; }
    __device__ const typename SharedStorage::RowInfo& info() const { return smem_.rows[place_.stage()]; }
    __device__ RowsTile& query() const { return smem_.query[place_.stage()]; }
    __device__ RowsTile& dout() const { return smem_.dout[place_.stage()]; }
    __device__ ScoresTile& pairs() const { return smem_.pairs[place_.stage()]; }
    // Of the sequence: key h of this lane's two.
    __device__ int key(int h) const { return work_tile_.n_block * kKeys + warp_key_ + h * 8 + fragment_row(); }

    // What is of a head and of this lane's keys: their bias, and the rows that may see them.
    __device__ void begin_head(int head) {
        const Sequence& s = sequence();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int k = key(h);
            rows_[h] = {p_.is_causal ? s.causal_begin(k) : 0, k < s.keys ? s.rows : 0};
            if (k < s.keys && p_.interval_summaries.tiles != nullptr)
                rows_[h] = rows_of_key(p_, s, interval_offset(p_.intervals, s, head, p_.heads), k);
            if (rows_[h].end == s.rows) rows_[h].end = INT_MAX;  // beyond the sequence P is 0 without a test
            if constexpr (kBias == BiasKind::kKey) {
                key_bias_[h] = 0;
                if (k < s.keys) {
                    const char* bias = bias_data(p_.bias, score_offset(p_.bias, s, head, p_.heads));
                    key_bias_[h] =
                        key_bias_of<T>(p_.bias, load_key_bias(p_.bias, bias, k * p_.bias.col_stride)) * kLog2E;
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
        float* to = static_cast<float*>(p_.dbias.data) + score_offset(p_.dbias, s, head, p_.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(key_sums_[h]);
            if (is_row_leader() && key(h) < s.keys) {
                float* of_key = to + key(h) * p_.dbias.col_stride;
                if (Traits::kSharesKeys) {
                    reduce_add(of_key, sum);
                } else {
                    *of_key = sum;
                }
            }
            key_sums_[h] = 0;
        }
    }

    __device__ __forceinline__ void clear_unseen_keys() const {
        const auto is_unseen = [&](int k) { return !(smem_.seen[k / 32] >> k % 32 & 1); };
        bool any = false;
        for (int w = 0; w < Traits::kWords; ++w) any |= smem_.seen[w] != ~0u;
        if (!any) return;
        constexpr int kCount = kKeys / Traits::kConsumerWarpgroups;
        clear_rows<kCount, 128>(smem_.key, warpgroup_ * kCount, threadIdx.x % 128, is_unseen);
        clear_rows<kCount, 128>(smem_.value, warpgroup_ * kCount, threadIdx.x % 128, is_unseen);
        named_barrier_sync(1, Traits::kConsumerWarpgroups * 128);
    }
    // A row that sees nothing may hold anything.
    __device__ __forceinline__ void clear_empty_rows(RowsTile& rows) const {
        clear_rows<kRows, 128>(rows, 0, threadIdx.x % 128, [&](int r) { return info().lse[r] == kInfinity; });
        named_barrier_sync(2 + warpgroup_, 128);
    }

    // Of the lane, in a tile of pairs: 16 of the group's rows from `row` on and this warp's 16 keys, transposed by ldmatrix
    // and stmatrix to what two neighbouring tiles of the accumulator hold.
    __device__ __forceinline__ uint32_t pairs_at(const ScoresTile& tile, int row) const {
        const int lane = lane_id();
        return smem_address(tile.data + ScoresTile::offset(part_.first_row() + row + lane % 8 + lane / 16 * 8,
                                                           warp_key_ / 8 + lane / 8 % 2));
    }
    __device__ __forceinline__ void store_pairs(ScoresTile& to, const ScoresDescriptor& pairs) const {
#pragma unroll
        for (int r = 0; r < kScoreRows / 16; ++r) stmatrix_x4_trans(pairs_at(to, r * 16), pairs[r]);
    }

    // Calls take(m, h, e, bias - lse, whether it is visible) for each of this lane's pairs, [0][m][2 h + e] of the tile.
    template <bool kRanges, bool kBits, typename Take>
    __device__ __forceinline__ void for_each_score(const RowStats& lses, bool has_bits, const Take& take) const {
        const auto& rows = info();
        const int group_rows = part_.first_row() + fragment_col(), first_row = header_.m_block * kRows + group_rows;
        const int bit = warp_key_ % 32 + fragment_row();
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            if (kBias == BiasKind::kDense) ldmatrix_x4_trans(dense, pairs_at(pairs(), n * 8));
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float2 lse = lses[m];
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
                        const float minus_lse = -(e ? lse.y : lse.x), x = e ? bias.y : bias.x;
                        take(m, h, e, kBias == BiasKind::kNone ? minus_lse : x + minus_lse, is_visible);
                    }
                }
            }
        }
    }
    // S to P, without a softcap; gives whether some pair may be hidden.
    __device__ __forceinline__ bool exponentiate(Pairs& s, const RowStats& lse) const {
        // Whether all rows of the group's that there are may see this warp's keys, by causality, lengths and intervals.
        const int first_row = header_.m_block * kRows + part_.first_row();
        const auto covers = [&](const RowRange& rows) {
            return rows.begin <= first_row && rows.end >= first_row + kScoreRows;
        };
        const bool in_range = __all_sync(~0u, covers(rows_[0]) && covers(rows_[1]));
        const auto take = [&](int m, int h, int e, float shift, bool is_visible) {
            float& x = s[0][m][2 * h + e];
            x = probability(x, scale_.scale_log2, shift);
            if (!is_visible) x = 0;
        };
        if (has_bits()) {
            in_range ? for_each_score<false, true>(lse, true, take) : for_each_score<true, true>(lse, true, take);
        } else {
            in_range ? for_each_score<false, false>(lse, false, take) : for_each_score<true, false>(lse, false, take);
        }
        return has_bits() || !in_range;
    }
    __device__ bool has_bits() const { return p_.packed_mask.bits != nullptr && !header_.mask_full; }
    // P and dP to dS. Of a hidden pair P is 0, and dP may be anything.
    template <bool kHidden>
    __device__ __forceinline__ void differentiate(const Pairs& prob, Pairs& dp, const RowStats& deltas) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            const float2 delta = deltas[m];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = dp[0][m][i];
                x = prob[0][m][i] * (x - (i % 2 ? delta.y : delta.x));
                if (kHidden && prob[0][m][i] == 0) x = 0;
                if (kBias == BiasKind::kKey) key_sums_[i / 2] += x;
            }
        }
    }
    // S and dP to P and dS, where there is a softcap.
    __device__ __forceinline__ void differentiate_capped(Pairs& s, Pairs& dp) {
        const float* deltas = info().delta + part_.first_row() + fragment_col();
        const RowStats lse(info().lse + part_.first_row());
        for_each_score<true, true>(lse, has_bits(), [&](int m, int h, int e, float shift, bool is_visible) {
            const float dx = score_gradient<true>(s[0][m][2 * h + e], dp[0][m][2 * h + e], shift, deltas[m * 8 + e],
                                                  scale_.softcap * kLog2E, scale_.scale / scale_.softcap, is_visible);
            if (kBias == BiasKind::kKey) key_sums_[h] += is_visible ? dx : 0.f;
        });
    }

    // To the sums of the tile, in the order in which registers hold it.
    __device__ __forceinline__ void add_dquery(const DquerySum& dquery) const {
        using Layout = DqueryLayout<Traits>;
        const int warp = warp_id() - 4, lane = lane_id();
        float* to = info().dquery + Layout::offset(warp, 0, 0);
        if constexpr (Traits::kStagesDquery) {
            part_.add_staged(dquery, smem_.dquery[warp], to);
        } else {
#pragma unroll
            for (int n = 0; n < kDqTiles; ++n) reduce_add(to + Layout::offset(0, n, lane), dquery[0][n]);
        }
    }
    // In deterministic mode the blocks of one head add to a tile of dQ in the order of their keys. While products run the
    // last turn is ended, of which all has been added since the groups have met, and the next awaited.
    __device__ __forceinline__ void wait_for_turn() const {
        if (is_warpgroup_leader()) {
            end_last_turn();
            int32_t* turn = info().turns + warpgroup_;
            while (load_acquire(turn) != info().turn) {}
            smem_.turn[warpgroup_] = turn;
        }
        named_barrier_sync(2 + warpgroup_, 128);
    }
    // Until this warp's additions to dQ have arrived.
    __device__ __forceinline__ void wait_for_additions() const {
        if (Traits::kStagesDquery && lane_id() == 0) tma_store_wait_group();
    }
    // Of the visit before, if any. The release orders what threads of the group have added; what the copy engine adds has
    // been awaited.
    __device__ __forceinline__ void end_last_turn() const {
        if (smem_.turn[warpgroup_] != nullptr) store_release(smem_.turn[warpgroup_], work_tile_.n_block + 1);
    }

    // dS of the group's keys and rows, once it lies in shared memory.
    __device__ __forceinline__ void store_dbias() {
        if constexpr (kBias == BiasKind::kDense) {
            if (Traits::kClusterReduces || p_.dense_dbias != DenseDbias::kDirect || !is_warpgroup_leader()) return;
            tma_store_4d(&maps_.dbias,
                         smem_address(pairs().data + ScoresTile::offset(part_.first_row(), part_.first_key() / 8)),
                         work_tile_.n_block * kKeys + part_.first_key(), header_.m_block * kRows + part_.first_row(),
                         header_.head, smem_.bias_batch);
            tma_store_commit_group();
        }
    }
    // The part of the tile that this block sums.
    __device__ __forceinline__ void store_reduced() {
        reduction_.template receive<T>(warp_key_);
        fence_proxy_async();
        named_barrier_sync(2 + warpgroup_, 128);
        if (!is_warpgroup_leader()) return;
        tma_store_4d(&maps_.dbias, reduction_.sums(), work_tile_.n_block * kKeys + warpgroup_ * 64,
                     header_.m_block * kRows + reduction_.first_row(), header_.head, smem_.bias_batch);
        tma_store_commit_group();
    }
    __device__ __forceinline__ void end_pairs() {
        if constexpr (kBias == BiasKind::kDense) {
            if (is_warpgroup_leader()) tma_store_wait_group_read();
            smem_.bias_pipeline.release(place_.stage());
        }
    }

    __device__ __forceinline__ void store_keys(const RowsView& view, const DimSum& sum, float factor) const {
        const Sequence& s = sequence();
        T* to = static_cast<T*>(view.data) + key_offset(view, s, work_tile_.kv_head) + part_.first_col();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_row(sum, h, factor, to + key(h) * view.row_stride, static_cast<int>(p_.head_dim) - part_.first_col(),
                      key(h) < s.keys);
    }

    const BwdArgs& p_;
    const BwdMaps& maps_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const BwdWorkTile& work_tile_;
    const int warpgroup_;
    const Part part_;
    const int warp_key_;  // this warp's first key of the block's
    std::conditional_t<Traits::kClusterReduces, DsmemReduction<Traits>, NoReduction> reduction_;
    PipelineState<Traits::kStages> place_;  // in the pipelines of Q, dO and the bias: a visit takes a stage of each
    typename SharedStorage::RowInfo::Header header_;  // of the visit
    Pipeline<1> probs_pipeline_;
    bool dkey_in_flight_ = false;
    RowRange rows_[2];  // that may see this lane's keys
    float key_bias_[2] = {};
    float key_sums_[2] = {};
    DimSum dkey_, dvalue_;
};

}  // namespace flash_dmattn::cuda::sm90
