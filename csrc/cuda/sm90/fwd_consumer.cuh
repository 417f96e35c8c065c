// A warp group that multiplies, of the forward, wherever its keys come from: 64 query rows over the tiles of keys that it
// is handed, the two products, the softmax and the output.
#pragma once

#include "../common/online_softmax.cuh"
#include "../common/scores.cuh"
#include "fwd_block.cuh"
#include "rows_out.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Tile>
class FwdConsumer {
public:
    using Smem = FwdSmem<T, kBias, Tile>;

    __device__ FwdConsumer(const FwdArgs& p, const FwdSchedule& schedule, Smem& smem)
        : p_(p), schedule_(schedule), smem_(smem), group_(static_cast<int>(threadIdx.x) / kGroupThreads - 1),
          group_row_((warp_id() - 4) * 16 % kGroupRows), query_ring_(smem.query_ring), key_ring_(smem.key_ring),
          value_ring_(smem.value_ring), bias_ring_(smem.bias_rings[group_]) {}

    __device__ void run() {
        if (group_ == Tile::kConsumers - 1) pass_turn();  // the first begins
        for (;; query_ring_.advance()) {
            query_ring_.wait_full();
            if (work().head == FwdWork::kNone) return;
            attend();
            store_out();
            turn_ = turn_ == Smem::kWorks - 1 ? 0 : turn_ + 1;
        }
    }

private:
    static constexpr int kKeys = Tile::kKeys, kWords = Smem::kWords, kHeadDim = Tile::kHeadDim;
    static constexpr int kTiles = kKeys / 8, kOutTiles = kHeadDim / 8;
    using QueryTile = typename Smem::QueryTile;
    using KeyTile = typename Smem::KeyTile;
    using BiasTile = typename Smem::BiasTile;
    // Whether the output so far is awaited before the rows' largest scores are looked for, or after: what measured faster.
    static constexpr bool kFinishesFirst = kBias != BiasKind::kKey;
    using Scores = float[1][kTiles][4];
    using Probs = uint32_t[kKeys / 16][4];
    using Words = uint32_t[kWords];

    // While a group multiplies, another computes exponentials: they take turns at handing products to the tensor cores.
    // Barriers 1, 2, .. are the groups' turns, then come their own.
    __device__ void take_turn() const { barrier_sync(1 + group_, 2 * kGroupThreads); }
    __device__ void pass_turn() const { barrier_arrive(1 + (group_ + 1) % Tile::kConsumers, 2 * kGroupThreads); }
    __device__ void sync_group() const { barrier_sync(1 + Tile::kConsumers + group_, kGroupThreads); }

    // S of a tile is multiplied together with O += P V of the tile before.
    __device__ __forceinline__ void attend() {
        clear(out_);
        softmax_ = OnlineSoftmax<1>();
        if (Tile::kGathers) left_ = work().listed + kKeys;
        is_last_ = false;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row_end_[h] = row(h) < work().s.rows ? work().s.keys_of(row(h), p_.is_causal) : 0;

        Scores scores;
        Probs probs;
        if (await_keys()) {
            if (Tile::kGathers) fence_async();  // threads have written the keys
            take_turn();
            issue_query_key(scores);
            pass_turn();
            await_scores<0>(scores);
            to_probs(scores, probs, [] {});
            while (await_keys()) {
                if (Tile::kGathers) await_values();  // the fence there must not hold up the other groups
                take_turn();
                issue_query_key(scores);
                if (!Tile::kGathers) await_values();
                issue_probs_value(probs);
                pass_turn();
                await_scores<1>(scores);
                to_probs(scores, probs, [&] {
                    wgmma_wait<0>();
                    kept_in_flight(out_);
                    release_values();
                });
            }
            await_values();
            issue_probs_value(probs);
            wgmma_wait<0>();
            kept_in_flight(out_);
            release_values();
        } else {
            query_ring_.release();  // else with the last scores
        }
    }

    // Until all but the newest kPending groups of products are done.
    template <int kPending>
    __device__ __forceinline__ void await_scores(Scores& scores) const {
        wgmma_wait<kPending>();
        kept_in_flight(scores);
        if (is_last()) query_ring_.release();  // the next may come while this one ends
    }

    // Whether there is another tile of keys.
    __device__ __forceinline__ bool await_keys() {
        if constexpr (Tile::kGathers) {
            left_ -= kKeys;
            if (left_ <= 0) return false;
            key_ring_.wait_full();
            return true;
        }
        if (is_last_) return false;
        key_ring_.wait_full();
        if (info().tile != Smem::KeyInfo::kNone) {
            is_last_ = info().last;
            return true;
        }
        release_keys();
        return false;
    }
    // Whether the tile is the work's last.
    __device__ __forceinline__ bool is_last() const { return Tile::kGathers ? left_ <= kKeys : is_last_; }

    // The values of keys that no row sees are zeros, whatever they are.
    __device__ __forceinline__ void await_values() const {
        value_ring_.wait_full();
        if constexpr (Tile::kGathers) return fence_async();  // of the next keys, too
        uint32_t all = ~0u;
#pragma unroll
        for (int w = 0; w < kWords; ++w) all &= columns_[w];
        if (all == ~0u) return;
        auto& value = smem_.value[value_ring_.stage()];
        constexpr int kThreadsOfKey = kGroupThreads / kKeys;
        const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, key = thread / kThreadsOfKey;
        uint32_t seen = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) seen |= columns_[w] & (key / 32 == w ? ~0u : 0u);
        if (!(seen >> key % 32 & 1))
            for (int chunk = thread % kThreadsOfKey; chunk < kHeadDim / 8; chunk += kThreadsOfKey)
                *reinterpret_cast<uint4*>(value.data + KeyTile::offset(key, chunk)) = {};
        fence_async();
        sync_group();
    }
    __device__ __forceinline__ void release_keys() {
        key_ring_.release();
        key_ring_.advance();
    }
    __device__ __forceinline__ void release_values() {
        value_ring_.release();
        value_ring_.advance();
    }

    __device__ __forceinline__ void issue_query_key(Scores& scores) const {
        const Operand<QueryTile> query(smem_.query[query_ring_.stage()], group_ * kGroupRows);
        const Operand<KeyTile> key(smem_.key[key_ring_.stage()]);
        kept_in_flight(scores);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16)
            Wgmma<kKeys>::template multiply<T, false, false>(scores, query.across(d), key.across(d), d > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_probs_value(const Probs& probs) {
        const Operand<KeyTile> value(smem_.value[value_ring_.stage()]);
        kept_in_flight(out_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kHeadDim>::template multiply<T, true>(out_, probs[k / 16], value.down(k), true);
        wgmma_commit();
    }

    // Products of the current tile of keys to probabilities; its memory is free then. finish_out() waits until nothing is
    // added to the output any more.
    template <typename FinishOut>
    __device__ __forceinline__ void to_probs(Scores& scores, Probs& probs, const FinishOut& finish_out) {
        apply_pairs(scores);
        const int tile = Tile::kGathers ? 0 : info().tile;
#pragma unroll
        for (int w = 0; w < kWords; ++w) columns_[w] = info().columns[w];
        release_keys();
        // A row that so far has seen nothing but what its dense bias hides.
        constexpr float kExtreme = kBias == BiasKind::kDense ? kLeastFinite<T> / 2 : -kInfinity;
        const auto hide = [&] { hide_by_bias(scores, tile); };
        if constexpr (kFinishesFirst) finish_out();
        softmax_.update(
            scores, schedule_.to_log2, kExtreme, hide, [&](int i, float factor) { softmax_.scale(out_, i, factor); },
            [&] {
                if constexpr (!kFinishesFirst) finish_out();
            });
        to_operand<T>(scores, probs);
    }

    // Products to what the softmax sees: scaled, capped, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_pairs(Scores& scores) {
        float scale = schedule_.scale;
        if (kBias == BiasKind::kNone ? !schedule_.raw_scores : schedule_.softcap > 0) {
            scale_and_cap(scores, scale, schedule_.softcap);
            scale = 1;
        }
        if constexpr (kBias == BiasKind::kKey) scale_and_add_bias(scores, scale, info().bias);
        if constexpr (kBias == BiasKind::kDense) add_dense_bias(scores, scale);
        if constexpr (Tile::kGathers) {
            hide_few(scores);
        } else {
            VisibleKeys<1, kTiles> visible;
            if (hides_any(visible)) hide_invisible(scores, visible);
        }
    }

    // Of gathered keys rows see most: 32 of them are tested only where a row of the warp does not see all.
    __device__ __forceinline__ void hide_few(Scores& scores) const {
        const auto& rows = info().mask[block_row() / 32];
        const int first_row = group_row_ % 32;
        uint32_t hidden[kWords], any_hidden = 0;  // this warp's rows that do not see key lane_id() of each 32
#pragma unroll
        for (int w = 0; w < kWords; ++w) any_hidden |= hidden[w] = ~rows[w * 32 + lane_id()] >> first_row & 0xffff;
        if (!__any_sync(~0u, any_hidden != 0)) return;
        const uint32_t row_bits[2] = {1u << (first_row + fragment_row()), 1u << (first_row + 8 + fragment_row())};
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (__any_sync(~0u, hidden[w] != 0))
                hide_invisible(reinterpret_cast<float(&)[1][4][4]>(scores[0][4 * w]), rows + w * 32, row_bits);
    }

    // Whether a pair of the tile is invisible, and then which pairs are not.
    __device__ __forceinline__ bool hides_any(VisibleKeys<1, kTiles>& visible) const {
        bool all_visible = info().full;
#pragma unroll
        for (int w = 0; w < kWords; ++w) all_visible &= kBias != BiasKind::kKey || info().columns[w] == ~0u;
        if (all_visible) return false;

        // Where a mask differs by row, its bits leave out all that the columns do but what a key bias hides.
        const bool masked = mask_differs_by_row(p_) && !info().full;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Words& seen = masked ? info().mask[block_row() + h * 8 + fragment_row()] : info().columns;
            const int end = row_end_[h] - info().tile * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                visible[h][w] = seen[w];
                if (kBias == BiasKind::kKey) visible[h][w] &= info().columns[w];
            }
            if (end >= kKeys) continue;
#pragma unroll
            for (int w = 0; w < kWords; ++w) visible[h][w] &= bits_below(end, w);
        }
        return true;
    }

    __device__ __forceinline__ void add_dense_bias(Scores& scores, float scale) {
        constexpr int kPartTiles = Smem::kBiasKeys / 8;
#pragma unroll
        for (int part = 0; part < kTiles / kPartTiles; ++part) {
            bias_ring_.wait_full();
            auto& part_scores = reinterpret_cast<float(&)[1][kPartTiles][4]>(scores[0][part * kPartTiles]);
            scale_and_add_bias<T, 1>(part_scores, scale, smem_.bias[group_][bias_ring_.stage()], group_row_, 0);
            fence_async();  // the next biases must not overtake these reads
            bias_ring_.release();
            bias_ring_.advance();
        }
    }

    // -inf where the bias of tile number `tile` hides a pair, as hide_invisible could not see without a comparison a pair.
    __device__ __forceinline__ void hide_by_bias(Scores& scores, int tile) {
        if constexpr (kBias == BiasKind::kDense) {
            const Sequence& s = work().s;
            const T* bias = static_cast<const T*>(p_.bias.data) + pair_offset(p_.bias, s, work().head, p_.heads);
            hide_where_bias_hides<T>(scores, [&](int r, int key) {
                return bias + min(work().first_row + block_row() + r, s.rows - 1) * p_.bias.row_stride +
                       min(tile * kKeys + key, s.keys - 1) * p_.bias.col_stride;
            });
        }
    }

    __device__ __forceinline__ void store_out() {
        const Sequence& s = work().s;
        const int head = work().head + (has_own_head() ? group_ : 0);
        T* out = static_cast<T*>(p_.out.data) + query_offset(p_.out, s, head);
        float* lse_of_row = static_cast<float*>(p_.lse.data) + stat_offset(p_.lse, s, head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float lse;
            const float inverse = softmax_.finish(h, schedule_.raw_scores ? schedule_.scale : 1.f, lse);
            const bool exists = row(h) < s.rows;
            if (leads_row() && exists) lse_of_row[row(h)] = lse;
            store_row(out_, h, inverse, out + row(h) * p_.out.row_stride, static_cast<int>(p_.head_dim), exists);
        }
    }

    __device__ FwdWork& work() const { return smem_.work(turn_); }
    __device__ const typename Smem::KeyInfo& info() const { return smem_.keys[key_ring_.stage()]; }
    __device__ int block_row() const { return group_ * kGroupRows + group_row_; }
    // Of the sequence: row h of this lane's two.
    __device__ int row(int h) const {
        return work().first_row + (has_own_head() ? group_row_ : block_row()) + h * 8 + fragment_row();
    }
    __device__ bool has_own_head() const { return Tile::kGathers && schedule_.tile_heads > 1; }

    const FwdArgs& p_;
    const FwdSchedule& schedule_;
    Smem& smem_;
    const int group_;
    const int group_row_;  // this warp's first row of the group's
    Ring<Tile::kQueryStages> query_ring_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kValueStages> value_ring_;
    Ring<Tile::kBiasStages> bias_ring_;
    int turn_ = 0;
    int left_;                  // of gathered keys: those of the list from this tile on
    bool is_last_;              // of others: whether the work visits no tile behind this one
    int row_end_[2];            // a row sees keys below this by causality and length
    uint32_t columns_[kWords];  // of the tile whose values are next
    OnlineSoftmax<1> softmax_;
    float out_[1][kOutTiles][4];
};

}  // namespace flash_dmattn::cuda::sm90
