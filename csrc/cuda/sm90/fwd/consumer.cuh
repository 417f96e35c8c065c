// A warp group that multiplies, of the forward, wherever its keys come from: 64 query rows over the tiles of keys that it
// is handed, the two products, the softmax and the output.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/scores.cuh"
#include "shared_storage.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdConsumer {
public:
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;

    __device__ FwdConsumer(const FwdArgs& p, const FwdSchedule& schedule, SharedStorage& smem)
        : p_(p),
          schedule_(schedule),
          smem_(smem),
          warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1),
          warp_row_in_warpgroup_((warp_id() - 4) * 16 % kWarpgroupRows),
          query_pipeline_(smem.query_pipeline),
          key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.value_pipeline),
          bias_pipeline_(smem.bias_pipelines[warpgroup_]) {}

    __device__ void run() {
        if (warpgroup_ == Traits::kConsumerWarpgroups - 1) warp_scheduler_barrier_arrive();  // the first begins
        for (;; query_pipeline_.advance()) {
            query_pipeline_.consumer_wait();
            if (work_tile().head == FwdWorkTile::kNone) return;
            attend();
            store_out();
            turn_ = turn_ == SharedStorage::kWorkTileStages - 1 ? 0 : turn_ + 1;
        }
    }

private:
    static constexpr int kKeys = Traits::kKeys, kWords = SharedStorage::kWords, kHeadDim = Traits::kHeadDim;
    static constexpr int kTiles = kKeys / 8, kOutTiles = kHeadDim / 8;
    using QueryTile = typename SharedStorage::QueryTile;
    using KeyTile = typename SharedStorage::KeyTile;
    using BiasTile = typename SharedStorage::BiasTile;
    // Whether the output so far is awaited before the rows' largest scores are looked for, or after: what measured faster.
    static constexpr bool kFinishesFirst = kBias != BiasKind::kKey;
    using Scores = float[1][kTiles][4];
    using Probs = uint32_t[kKeys / 16][4];
    using Words = uint32_t[kWords];

    // While a group multiplies, another computes exponentials: they take turns at handing products to the tensor cores.
    // Barriers 1, 2, .. are the groups' turns, then come their own.
    __device__ void warp_scheduler_barrier_sync() const { named_barrier_sync(1 + warpgroup_, 2 * kWarpgroupThreads); }
    __device__ void warp_scheduler_barrier_arrive() const {
        named_barrier_arrive(1 + (warpgroup_ + 1) % Traits::kConsumerWarpgroups, 2 * kWarpgroupThreads);
    }
    __device__ void sync_warpgroup() const {
        named_barrier_sync(1 + Traits::kConsumerWarpgroups + warpgroup_, kWarpgroupThreads);
    }

    // S of a tile is multiplied together with O += P V of the tile before.
    __device__ __forceinline__ void attend() {
        clear(out_);
        softmax_ = OnlineSoftmax<1>();
        if (Traits::kGathers) left_ = work_tile().listed + kKeys;
        is_last_ = false;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row_end_[h] = row(h) < work_tile().s.rows ? work_tile().s.keys_of(row(h), p_.is_causal) : 0;

        Scores scores;
        Probs probs;
        if (wait_for_keys()) {
            if (Traits::kGathers) fence_proxy_async();  // threads have written the keys
            warp_scheduler_barrier_sync();
            gemm_qk(scores);
            warp_scheduler_barrier_arrive();
            wait_for_scores<0>(scores);
            to_probs(scores, probs, [] {});
            while (wait_for_keys()) {
                if (Traits::kGathers) wait_for_values();  // the fence there must not hold up the other groups
                warp_scheduler_barrier_sync();
                gemm_qk(scores);
                if (!Traits::kGathers) wait_for_values();
                gemm_pv(probs);
                warp_scheduler_barrier_arrive();
                wait_for_scores<1>(scores);
                to_probs(scores, probs, [&] {
                    wgmma_wait_group<0>();
                    warpgroup_fence_operand(out_);
                    release_values();
                });
            }
            wait_for_values();
            gemm_pv(probs);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(out_);
            release_values();
        } else {
            query_pipeline_.release();  // else with the last scores
        }
    }

    // Until all but the newest kPending groups of products are done.
    template <int kPending>
    __device__ __forceinline__ void wait_for_scores(Scores& scores) const {
        wgmma_wait_group<kPending>();
        warpgroup_fence_operand(scores);
        if (is_last()) query_pipeline_.release();  // the next may come while this one ends
    }

    // Whether there is another tile of keys.
    __device__ __forceinline__ bool wait_for_keys() {
        if constexpr (Traits::kGathers) {
            left_ -= kKeys;
            if (left_ <= 0) return false;
            key_pipeline_.consumer_wait();
            return true;
        }
        if (is_last_) return false;
        key_pipeline_.consumer_wait();
        if (info().tile != SharedStorage::KeyInfo::kNone) {
            is_last_ = info().last;
            return true;
        }
        release_keys();
        return false;
    }
    // Whether the tile is the work's last.
    __device__ __forceinline__ bool is_last() const { return Traits::kGathers ? left_ <= kKeys : is_last_; }

    // The values of keys that no row sees are zeros, whatever they are.
    __device__ __forceinline__ void wait_for_values() const {
        value_pipeline_.consumer_wait();
        if constexpr (Traits::kGathers) return fence_proxy_async();  // of the next keys, too
        uint32_t all = ~0u;
#pragma unroll
        for (int w = 0; w < kWords; ++w) all &= columns_[w];
        if (all == ~0u) return;
        auto& value = smem_.value[value_pipeline_.stage()];
        constexpr int kThreadsOfKey = kWarpgroupThreads / kKeys;
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads, key = thread / kThreadsOfKey;
        uint32_t seen = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) seen |= columns_[w] & (key / 32 == w ? ~0u : 0u);
        if (!(seen >> key % 32 & 1))
            for (int chunk = thread % kThreadsOfKey; chunk < kHeadDim / 8; chunk += kThreadsOfKey)
                *reinterpret_cast<uint4*>(value.data + KeyTile::offset(key, chunk)) = {};
        fence_proxy_async();
        sync_warpgroup();
    }
    __device__ __forceinline__ void release_keys() {
        key_pipeline_.release();
        key_pipeline_.advance();
    }
    __device__ __forceinline__ void release_values() {
        value_pipeline_.release();
        value_pipeline_.advance();
    }

    __device__ __forceinline__ void gemm_qk(Scores& scores) const {
        const SmemDescriptor<QueryTile> query(smem_.query[query_pipeline_.stage()], warpgroup_ * kWarpgroupRows);
        const SmemDescriptor<KeyTile> key(smem_.key[key_pipeline_.stage()]);
        warpgroup_fence_operand(scores);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16)
            Wgmma<kKeys>::template multiply<T, false, false>(scores, query.across(d), key.across(d), d > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void gemm_pv(const Probs& probs) {
        const SmemDescriptor<KeyTile> value(smem_.value[value_pipeline_.stage()]);
        warpgroup_fence_operand(out_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kHeadDim>::template multiply<T, true>(out_, probs[k / 16], value.down(k), true);
        wgmma_commit_group();
    }

    // Products of the current tile of keys to probabilities; its memory is free then. finish_out() waits until nothing is
    // added to the output any more.
    template <typename FinishOut>
    __device__ __forceinline__ void to_probs(Scores& scores, Probs& probs, const FinishOut& finish_out) {
        apply_mask_and_bias(scores);
        const int tile = Traits::kGathers ? 0 : info().tile;
#pragma unroll
        for (int w = 0; w < kWords; ++w) columns_[w] = info().columns[w];
        release_keys();
        // A row that so far has seen nothing but what its dense bias hides.
        constexpr float kExtreme = kBias == BiasKind::kDense ? kLeastFinite<T> / 2 : -kInfinity;
        const auto hide = [&] { mask_by_bias(scores, tile); };
        if constexpr (kFinishesFirst) finish_out();
        softmax_.update(
            scores, schedule_.to_log2, kExtreme, hide, [&](int i, float factor) { softmax_.scale(out_, i, factor); },
            [&] {
                if constexpr (!kFinishesFirst) finish_out();
            });
        to_a_operand<T>(scores, probs);
    }

    // Products to what the softmax sees: scaled, capped, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_mask_and_bias(Scores& scores) {
        float scale = schedule_.scale;
        if (kBias == BiasKind::kNone ? !schedule_.raw_scores : schedule_.softcap > 0) {
            scale_and_cap(scores, scale, schedule_.softcap);
            scale = 1;
        }
        if constexpr (kBias == BiasKind::kKey) scale_and_add_bias(scores, scale, info().bias);
        if constexpr (kBias == BiasKind::kDense) add_dense_bias(scores, scale);
        if constexpr (Traits::kGathers) {
            apply_sparse_mask(scores);
        } else {
            VisibleKeys<1, kTiles> visible;
            if (hides_any(visible)) apply_mask(scores, visible);
        }
    }

    // Of gathered keys rows see most: 32 of them are tested only where a row of the warp does not see all.
    __device__ __forceinline__ void apply_sparse_mask(Scores& scores) const {
        const auto& rows = info().mask[block_row() / 32];
        const int first_row = warp_row_in_warpgroup_ % 32;
        uint32_t hidden[kWords], any_hidden = 0;  // this warp's rows that do not see key lane_id() of each 32
#pragma unroll
        for (int w = 0; w < kWords; ++w) any_hidden |= hidden[w] = ~rows[w * 32 + lane_id()] >> first_row & 0xffff;
        if (!__any_sync(~0u, any_hidden != 0)) return;
        const uint32_t row_bits[2] = {1u << (first_row + fragment_row()), 1u << (first_row + 8 + fragment_row())};
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (__any_sync(~0u, hidden[w] != 0))
                apply_mask(reinterpret_cast<float (&)[1][4][4]>(scores[0][4 * w]), rows + w * 32, row_bits);
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
        constexpr int kPartTiles = SharedStorage::kBiasKeys / 8;
#pragma unroll
        for (int part = 0; part < kTiles / kPartTiles; ++part) {
            bias_pipeline_.consumer_wait();
            auto& part_scores = reinterpret_cast<float (&)[1][kPartTiles][4]>(scores[0][part * kPartTiles]);
            scale_and_add_bias<T, 1>(part_scores, scale, smem_.bias[warpgroup_][bias_pipeline_.stage()],
                                     warp_row_in_warpgroup_, 0);
            fence_proxy_async();  // the next biases must not overtake these reads
            bias_pipeline_.release();
            bias_pipeline_.advance();
        }
    }

    // -inf where the bias of tile number `tile` hides a pair, as apply_mask could not see without a comparison a pair.
    __device__ __forceinline__ void mask_by_bias(Scores& scores, int tile) {
        if constexpr (kBias == BiasKind::kDense) {
            const Sequence& s = work_tile().s;
            const T* bias = static_cast<const T*>(p_.bias.data) + score_offset(p_.bias, s, work_tile().head, p_.heads);
            apply_bias_mask<T>(scores, [&](int r, int key) {
                return bias + min(work_tile().first_row + block_row() + r, s.rows - 1) * p_.bias.row_stride +
                       min(tile * kKeys + key, s.keys - 1) * p_.bias.col_stride;
            });
        }
    }

    __device__ __forceinline__ void store_out() {
        const Sequence& s = work_tile().s;
        const int head = work_tile().head + (has_own_head() ? warpgroup_ : 0);
        T* out = static_cast<T*>(p_.out.data) + query_offset(p_.out, s, head);
        float* lse_of_row = static_cast<float*>(p_.lse.data) + stat_offset(p_.lse, s, head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float lse;
            const float inverse = softmax_.finish(h, schedule_.raw_scores ? schedule_.scale : 1.f, lse);
            const bool exists = row(h) < s.rows;
            if (is_row_leader() && exists) lse_of_row[row(h)] = lse;
            store_row(out_, h, inverse, out + row(h) * p_.out.row_stride, static_cast<int>(p_.head_dim), exists);
        }
    }

    __device__ FwdWorkTile& work_tile() const { return smem_.work_tile(turn_); }
    __device__ const typename SharedStorage::KeyInfo& info() const { return smem_.keys[key_pipeline_.stage()]; }
    __device__ int block_row() const { return warpgroup_ * kWarpgroupRows + warp_row_in_warpgroup_; }
    // Of the sequence: row h of this lane's two.
    __device__ int row(int h) const {
        return work_tile().first_row + (has_own_head() ? warp_row_in_warpgroup_ : block_row()) + h * 8 + fragment_row();
    }
    __device__ bool has_own_head() const { return Traits::kGathers && schedule_.tile_heads > 1; }

    const FwdArgs& p_;
    const FwdSchedule& schedule_;
    SharedStorage& smem_;
    const int warpgroup_;
    const int warp_row_in_warpgroup_;  // this warp's first row of the group's
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    Pipeline<Traits::kBiasStages> bias_pipeline_;
    int turn_ = 0;
    int left_;                  // of gathered keys: those of the list from this tile on
    bool is_last_;              // of others: whether the work visits no tile behind this one
    int row_end_[2];            // a row sees keys below this by causality and length
    uint32_t columns_[kWords];  // of the tile whose values are next
    OnlineSoftmax<1> softmax_;
    float out_[1][kOutTiles][4];
};

}  // namespace flash_dmattn::cuda::sm90
