// An MMA warpgroup of the sm90 forward: 64 query rows, for TMA and gather producers alike.
//
// Ping-pong scheduling: one warpgroup's softmax overlaps the others' GEMMs. A step issues S = Q K^T of this n_block
// together with O += P V of the previous one, so that O accumulates during the softmax.
#pragma once

#include "cuda/arch/gemm.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/softmax/scores.cuh"
#include "shared_storage.cuh"
#include "softmax.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdConsumer {
public:
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;

    __device__ FwdConsumer(const FwdArgs& p, const FwdKernelParams& params, SharedStorage& smem)
        : p_(p), params_(params), smem_(smem),
          warpgroup_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1)),
          warp_row_((warp_id() - 4) * 16 % kWarpgroupRows), query_pipeline_(smem.query_pipeline),
          key_pipeline_(smem.key_pipeline), value_pipeline_(smem.value_pipeline),
          bias_pipeline_(smem.bias_pipelines[warpgroup_]) {}

    __device__ void run() {
        // The first warpgroup issues first.
        if (warpgroup_ == Traits::kConsumerWarpgroups - 1) warp_scheduler_barrier_arrive();
        for (;; query_pipeline_.advance()) {
            query_pipeline_.consumer_wait();
            if (!work_tile().is_valid()) return;
            mainloop();
            epilogue();
            work_tile_stage_ = SharedStorage::next_work_tile_stage(work_tile_stage_);
        }
    }

private:
    static constexpr int kKeys = Traits::kKeys, kWords = SharedStorage::kWords, kHeadDim = Traits::kHeadDim;
    static constexpr BlockOrder kOrder = Traits::kOrder;
    static constexpr int kScoreFragments = kKeys / 8, kOutFragments = kHeadDim / 8;
    static constexpr int kBiasTiles = kKeys / SharedStorage::kBiasKeys;  // stages of a dense bias for an n_block
    using QueryTile = typename SharedStorage::QueryTile;
    using KvTile = typename SharedStorage::KvTile;
    using BlockMetadata = typename SharedStorage::BlockMetadata;
    using Scores = float[1][kScoreFragments][4];
    using Probs = uint32_t[kKeys / 16][4];
    using Words = uint32_t[kWords];
    using BiasTile = typename SharedStorage::BiasTile;
    using RelativeBiasLane = typename SharedStorage::RelativeSegment::Lane;
    // A dense bias is read in steps of 16 keys, as A operands, each of which covers two fragments of the scores: the
    // first kBiasAhead of an n_block while its GEMMs run, then each that many steps before it is added.
    static constexpr int kBiasSteps = kKeys / 16, kBiasAhead = 2;
    using Bias = uint32_t[kBias == BiasKind::kDense ? kBiasSteps : 1][4];

    __device__ void warp_scheduler_barrier_sync() const {
        named_barrier_sync(FwdNamedBarriers::kWarpSchedulerWG1 + warpgroup_, 2 * kWarpgroupThreads);
    }
    __device__ void warp_scheduler_barrier_arrive() const {
        const int next = (warpgroup_ + 1) % Traits::kConsumerWarpgroups;
        named_barrier_arrive(FwdNamedBarriers::kWarpSchedulerWG1 + next, 2 * kWarpgroupThreads);
    }
    __device__ void sync_warpgroup() const {
        named_barrier_sync(FwdNamedBarriers::kWarpgroupSyncWG1 + warpgroup_, kWarpgroupThreads);
    }

    __device__ __forceinline__ void mainloop() {
        clear(out_);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row_end_[h] = row(h) < work_tile().s.rows ? work_tile().s.keys_of(row(h), p_.is_causal) : 0;
        const int num_skipped = begin_blocks();
        softmax_ = FwdSoftmax<T>(row_end_);
        if constexpr (is_relative(kBias))
            relative_bias_lane_ = RelativeBiasLane(p_.relative_bias, work_tile().first_row, tile_row(), 0);
        has_unscaled_scores_ = params_.softmax.unscaled_scores;
        if constexpr (kBias == BiasKind::kRelative) shared_end_ = 0, shared_bias_ = 0;

        Scores scores;
        Probs probs;
        if (kOrder == BlockOrder::kDescending) skip_blocks(num_skipped);
        if (wait_for_keys()) {
            if (Traits::kGathers) fence_proxy_async();  // cp.async writes K through the generic proxy
            if constexpr (kBias == BiasKind::kRelative) next_shared_end_ = metadata().shared_end;
            begin_scores(scores);
            warp_scheduler_barrier_arrive();
            load_metadata();
            load_first_biases();
            wait_for_scores<0>(scores);
            softmax(scores, probs, [] {});
            while (wait_for_keys()) {
                if (Traits::kGathers) wait_for_values();  // its fence outside the barrier, where it delays nothing else
                begin_scores(scores);
                load_metadata();
                if (!Traits::kGathers) wait_for_values();
                gemm_pv(probs);
                warp_scheduler_barrier_arrive();
                load_first_biases();
                wait_for_scores<1>(scores);
                softmax(scores, probs, [&] { finish_pv(); });
            }
            wait_for_values();
            gemm_pv(probs);
            finish_pv();
        } else {
            query_pipeline_.consumer_release();  // otherwise after the last scores
        }
        if (kOrder == BlockOrder::kAscending) skip_blocks(num_skipped);
    }

    // Returns the number of n_blocks to skip: those beyond the keys that the warpgroup's rows see.
    __device__ __forceinline__ int begin_blocks() {
        if constexpr (!Traits::kCountsBlocks) {
            is_last_ = false;
            return 0;
        } else {
            const BlockRange blocks = work_tile().n_blocks;
            const int total = max(blocks.end - blocks.begin, 0);
            int count = total;
            if constexpr (!Traits::kGathers) {
                const int first_row = warpgroup_ * kWarpgroupRows;
                const int end = work_tile().end_of_keys(first_row, first_row + kWarpgroupRows, p_.is_causal);
                count = min(max(ceil_div(end, kKeys) - blocks.begin, 0), total);
                n_block_ = blocks.begin + (kOrder == BlockOrder::kAscending ? -1 : count);
                end_of_keys_ = work_tile().end_of_keys(0, Traits::kRows, p_.is_causal);
                end_of_full_keys_ = __reduce_min_sync(~0u, min(row_end_[0], row_end_[1]));
            }
            n_blocks_left_ = count + 1;
            return total - count;
        }
    }
    // The other warpgroups need the K and V of these n_blocks: keeps the order of the warpgroups, and releases the stages.
    __device__ __forceinline__ void skip_blocks(int count) {
        if constexpr (Traits::kCountsBlocks && !Traits::kGathers) {
            static_assert(kBias != BiasKind::kDense, "its stages are not released");
            for (; count > 0; --count) {
                key_pipeline_.consumer_wait();
                warp_scheduler_barrier_sync();
                warp_scheduler_barrier_arrive();
                release_keys();
                value_pipeline_.consumer_wait();
                release_values();
            }
        }
    }

    // Issues S = Q K^T, which is accumulated onto a key or relative bias.
    __device__ __forceinline__ void begin_scores(Scores& scores) {
        if constexpr (kBias == BiasKind::kRelative) {
            if (next_shared_end_ != shared_end_) change_shared_end();
            if (shared_end_ != 0) {
                warp_scheduler_barrier_sync();
                return gemm_qk<true>(scores);
            }
        }
        init_scores(scores);
        warp_scheduler_barrier_sync();
        gemm_qk<!starts_from_bias(kBias)>(scores);
    }
    // Scores that share a relative bias leave it out, and so does the base of the softmax. The base rarely changes:
    // neighbouring n_blocks mostly share the same end of the table.
    __device__ __forceinline__ void change_shared_end() {
        shared_end_ = next_shared_end_;
        share_bias(shared_end_ != 0 ? metadata().relative_bias.entries[0][0] : 0.f);
    }
    __device__ __forceinline__ void share_bias(float bias) {
        softmax_.shift_base(shared_bias_ - bias, scale_log2());
        shared_bias_ = bias;
    }

    // Starts the scores from a key or relative bias, before the warp scheduler barrier. Also reads what the softmax
    // tests later, so that it does not wait for shared memory.
    __device__ __forceinline__ void init_scores(Scores& scores) {
        if constexpr (kBias == BiasKind::kKey) {
            metadata().key_bias.load(scores);
            adds_key_bias_ = metadata().key_bias.has_added();
        }
        if constexpr (Traits::kGathers) find_masked_words();
        if constexpr (kBias == BiasKind::kRelative) metadata().relative_bias.load(scores, relative_bias_lane_);
        if constexpr (kBias == BiasKind::kRelativeGrid)
            metadata().relative_bias.load(scores, relative_bias_lane_, params_.softmax.inverse_scale);
        if constexpr (starts_from_bias(kBias)) warpgroup_fence_operand(scores);  // not behind the barrier
    }
    template <bool kZeroInit>
    __device__ __forceinline__ void gemm_qk(Scores& scores) const {
        gemm_ss<kZeroInit, Major::kK, Major::kK>(
            scores, SmemDescriptor<QueryTile>(smem_.query[query_pipeline_.stage()], warpgroup_ * kWarpgroupRows),
            SmemDescriptor<KvTile>(smem_.key[key_pipeline_.stage()]));
    }
    __device__ __forceinline__ void gemm_pv(const Probs& probs) {
        gemm_rs<false, Major::kMN>(out_, probs, SmemDescriptor<KvTile>(smem_.value[value_pipeline_.stage()]));
    }
    __device__ __forceinline__ void finish_pv() {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(out_);
        release_values();
    }

    // kPending: newer GEMMs that may stay in flight. Q is released with the work tile's last scores, so that the next Q
    // loads during the last softmax and the epilogue.
    template <int kPending>
    __device__ __forceinline__ void wait_for_scores(Scores& scores) const {
        wgmma_wait_group<kPending>();
        warpgroup_fence_operand(scores);
        if (is_last_block()) query_pipeline_.consumer_release();
    }

    // Reads what the softmax needs of the n_block while the GEMMs run, so that it does not wait for shared memory.
    __device__ __forceinline__ void load_metadata() {
        if constexpr (kBias == BiasKind::kRelative) next_shared_end_ = metadata().next_shared_end;
        if constexpr (!Traits::kGathers) {
            is_full_ = Traits::kCountsBlocks ? (n_block_ + 1) * kKeys <= end_of_full_keys_ : metadata().full;
            if constexpr (kBias == BiasKind::kKey) {
#pragma unroll
                for (int w = 0; w < kWords; ++w) is_full_ &= metadata().visible_keys[w] == ~0u;
            }
        }
    }
    // Waits for a dense bias, and reads its first steps, while the GEMMs run.
    __device__ __forceinline__ void load_first_biases() {
        if constexpr (kBias == BiasKind::kDense) {
            auto pipeline = bias_pipeline_;
#pragma unroll
            for (int i = 0; i < kBiasTiles; ++i, pipeline.advance()) pipeline.consumer_wait();
#pragma unroll
            for (int step = 0; step < kBiasAhead; ++step) load_bias(step);
        }
    }
    // Steps are read in order, each once.
    __device__ __forceinline__ void load_bias(int step) {
        constexpr int kSteps = SharedStorage::kBiasKeys / 16;  // of a stage
        const BiasTile& tile = smem_.bias[warpgroup_][bias_pipeline_.stage()];
        const uint32_t lane = tile.ldmatrix_lane_a() + warp_row_ * BiasTile::kSlabCols * sizeof(T);
        BiasTile::load_a(bias_[step], lane, 0, step % kSteps * 16);
        if (step % kSteps == kSteps - 1) release_bias_stage();
    }
    __device__ __forceinline__ void release_bias_stage() {
        fence_proxy_async();  // orders this warp's reads before the next TMA load of the stage
        bias_pipeline_.consumer_release();
        bias_pipeline_.advance();
    }

    // Returns whether the work tile has another n_block; its K is then in shared memory.
    __device__ __forceinline__ bool wait_for_keys() {
        if constexpr (Traits::kCountsBlocks) {
            if (--n_blocks_left_ == 0) return false;
            n_block_ += kOrder == BlockOrder::kAscending ? 1 : -1;
            key_pipeline_.consumer_wait();
            return true;
        }
        if (is_last_) return false;
        key_pipeline_.consumer_wait();
        if (metadata().n_block != BlockMetadata::kNoBlock) {
            is_last_ = metadata().is_last;
            return true;
        }
        release_keys();
        return false;
    }
    __device__ __forceinline__ bool is_last_block() const {
        return Traits::kCountsBlocks ? n_blocks_left_ == 1 : is_last_;
    }

    // Zeros the values of keys that no row sees: they may be NaN, and 0 * NaN is NaN.
    __device__ __forceinline__ void wait_for_values() const {
        value_pipeline_.consumer_wait();
        if constexpr (Traits::kGathers) return fence_proxy_async();  // also covers the next K
        uint32_t all = ~0u;
        if constexpr (SharedStorage::kHasVisibleKeys) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) all &= visible_keys_[w];
            if (all == ~0u) return;
        } else if (end_of_values_ >= kKeys) {
            return;
        }
        auto& value = smem_.value[value_pipeline_.stage()];
        constexpr int kThreadsPerKey = kWarpgroupThreads / kKeys;
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads, key = thread / kThreadsPerKey;
        bool is_visible = key < end_of_values_;
        if constexpr (SharedStorage::kHasVisibleKeys) {
            uint32_t word = 0;
#pragma unroll
            for (int w = 0; w < kWords; ++w) word |= visible_keys_[w] & (key / 32 == w ? ~0u : 0u);
            is_visible = word >> key % 32 & 1;
        }
        if (!is_visible)
            for (int chunk = thread % kThreadsPerKey; chunk < kHeadDim / 8; chunk += kThreadsPerKey)
                *reinterpret_cast<uint4*>(value.data + KvTile::offset(key, chunk)) = {};
        fence_proxy_async();
        sync_warpgroup();
    }
    __device__ __forceinline__ void release_keys() {
        key_pipeline_.consumer_release();
        key_pipeline_.advance();
    }
    __device__ __forceinline__ void release_values() {
        value_pipeline_.consumer_release();
        value_pipeline_.advance();
    }

    // S to P of the current n_block; releases K. finish_out() waits until O is complete.
    template <typename FinishOut>
    __device__ __forceinline__ void softmax(Scores& scores, Probs& probs, const FinishOut& finish_out) {
        apply_mask_and_bias(scores);
        const int n_block = kBias == BiasKind::kDense ? this->n_block() : 0;
        if constexpr (SharedStorage::kHasVisibleKeys) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) visible_keys_[w] = metadata().visible_keys[w];
        } else if constexpr (!Traits::kGathers) {
            end_of_values_ = end_of_keys_ - n_block_ * kKeys;
        }
        release_keys();
        // A row maximum below this may come from scores that the dense bias masks.
        constexpr float kExtreme = kBias == BiasKind::kDense ? kLowest<T> / 2 : -kInfinity;
        const auto mask = [&] { mask_by_bias(scores, n_block); };
        finish_out();
        softmax_.update(scores, probs, scale_log2(), kExtreme, mask,
                        [&](int i, float factor) { softmax_.scale(out_, i, factor); });
    }

    __device__ __forceinline__ void apply_mask_and_bias(Scores& scores) {
        float scale = params_.softmax.scale;
        if (kBias == BiasKind::kNone ? !params_.softmax.unscaled_scores
                                     : !is_relative(kBias) && params_.softmax.softcap > 0) {
            scale_and_cap(scores, scale, params_.softmax.softcap);
            scale = 1;
        }
        if constexpr (kBias == BiasKind::kKey) {
            if (has_unscaled_scores_ && adds_key_bias_) {
                has_unscaled_scores_ = false;
                softmax_.scale_base(scale);
            }
            if (!has_unscaled_scores_) scale_and_add_bias(scores, scale, metadata().key_bias.added());
        }
        if constexpr (kBias == BiasKind::kDense) add_dense_bias(scores, scale);
        if constexpr (Traits::kGathers) {
            apply_sparse_mask(scores);
        } else {
            VisibleKeys<1, kScoreFragments> visible;
            if (find_visible_keys(visible)) apply_mask(scores, visible);
        }
    }

    // Rows see most gathered keys: a word of 32 keys is masked only where it masks a key for a row of this warp.
    __device__ __forceinline__ void find_masked_words() {
        const auto& rows = metadata().mask[tile_row() / 32];
        masked_words_ = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32_t masked = ~rows[w * 32 + lane_id()] >> warp_row_ % 32 & 0xffff;
            if (__any_sync(~0u, masked != 0)) masked_words_ |= 1u << w;
        }
    }
    __device__ __forceinline__ void apply_sparse_mask(Scores& scores) const {
        if (masked_words_ == 0) return;
        const auto& rows = metadata().mask[tile_row() / 32];
        const int first_row = warp_row_ % 32 + fragment_row();
        const uint32_t row_bits[2] = {1u << first_row, 1u << (first_row + 8)};
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (masked_words_ >> w & 1)
                apply_mask(reinterpret_cast<float (&)[1][4][4]>(scores[0][4 * w]), rows + w * 32, row_bits);
    }

    // Returns false where every score is visible; otherwise fills `visible` for this lane's rows.
    __device__ __forceinline__ bool find_visible_keys(VisibleKeys<1, kScoreFragments>& visible) const {
        if (is_full_) return false;

        // The rows' mask words include visible_keys, except for keys that a key bias masks.
        const bool masked = Traits::kServesRowMasks && mask_differs_by_row(p_) && !metadata().full;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Words& words =
                masked ? metadata().mask[tile_row() + h * 8 + fragment_row()] : metadata().visible_keys;
            const int end = row_end_[h] - n_block() * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                visible[h][w] = SharedStorage::kHasVisibleKeys ? words[w] : ~0u;
                if (kBias == BiasKind::kKey) visible[h][w] &= metadata().visible_keys[w];
            }
            if (end >= kKeys) continue;
#pragma unroll
            for (int w = 0; w < kWords; ++w) visible[h][w] &= bits_below(end, w);
        }
        return true;
    }

    __device__ __forceinline__ void add_dense_bias(Scores& scores, float scale) {
#pragma unroll
        for (int step = 0; step < kBiasSteps; ++step) {
            if (step + kBiasAhead < kBiasSteps) load_bias(step + kBiasAhead);
            scale_and_add_bias<T>(scores[0] + 2 * step, scale, bias_[step]);
        }
    }

    // Masks scores whose dense bias is the least finite number: apply_mask leaves them, to save a comparison a score.
    __device__ __forceinline__ void mask_by_bias(Scores& scores, int n_block) {
        if constexpr (kBias == BiasKind::kDense) {
            const Sequence& s = work_tile().s;
            const T* bias = static_cast<const T*>(p_.bias.data) + score_offset(p_.bias, s, work_tile().head, p_.heads);
            apply_bias_mask<T>(scores, [&](int r, int key) {
                return bias + min(work_tile().first_row + tile_row() + r, s.rows - 1) * p_.bias.row_stride +
                       min(n_block * kKeys + key, s.keys - 1) * p_.bias.col_stride;
            });
        }
    }

    __device__ __forceinline__ void epilogue() {
        if constexpr (kBias == BiasKind::kRelative) share_bias(0);
        const Sequence& s = work_tile().s;
        const int head = work_tile().head + (has_head_per_warpgroup() ? warpgroup_ : 0);
        T* out = query_rows<T>(p_.out, s, head);
        float* lse_of_row = static_cast<float*>(p_.lse.data) + stat_offset(p_.lse, s, head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float lse;
            const float inverse = softmax_.finish(h, has_unscaled_scores() ? params_.softmax.scale : 1.f, lse);
            const bool exists = row(h) < s.rows;
            if (is_row_leader() && exists) lse_of_row[row(h)] = lse;
            store_row(out_, h, inverse, out + row(h) * p_.out.row_stride, static_cast<int>(p_.head_dim), exists);
        }
    }

    // Scores of the softmax times this are exponents of 2.
    __device__ float scale_log2() const {
        return kBias != BiasKind::kKey || has_unscaled_scores_ ? params_.softmax.scale_log2 : kLog2E;
    }
    __device__ bool has_unscaled_scores() const {
        return kBias == BiasKind::kKey ? has_unscaled_scores_ : params_.softmax.unscaled_scores;
    }
    __device__ FwdWorkTile& work_tile() const { return smem_.work_tile(work_tile_stage_); }
    __device__ const BlockMetadata& metadata() const { return smem_.metadata[key_pipeline_.stage()]; }
    __device__ int n_block() const { return Traits::kCountsBlocks ? n_block_ : metadata().n_block; }
    // This warp's first row in the Q tile.
    __device__ int tile_row() const { return warpgroup_ * kWarpgroupRows + warp_row_; }
    // Row h of this lane's two, in the sequence.
    __device__ int row(int h) const {
        return work_tile().first_row + (has_head_per_warpgroup() ? warp_row_ : tile_row()) + h * 8 + fragment_row();
    }
    __device__ bool has_head_per_warpgroup() const { return Traits::kGathers && params_.scheduler.qheads_per_tile > 1; }

    const FwdArgs& p_;
    const FwdKernelParams& params_;
    SharedStorage& smem_;
    const int warpgroup_;
    const int warp_row_;  // this warp's first row in the warpgroup
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    Pipeline<Traits::kBiasStages> bias_pipeline_;
    int work_tile_stage_ = 0;
    int n_blocks_left_;  // kCountsBlocks: from this n_block on
    bool is_last_;       // unless kCountsBlocks: whether this n_block is the work tile's last
    // kCountsBlocks, except for gathered keys:
    int n_block_ = 0;       // this n_block
    int end_of_keys_;       // keys that some row of the work tile sees are below this
    int end_of_full_keys_;  // all rows of this warp see the keys below this
    int row_end_[2];        // causality and lengths leave a row the keys [0, row_end)
    // The keys of the next P V that some row sees; not for gathered keys.
    uint32_t visible_keys_[kWords];  // kHasVisibleKeys
    int end_of_values_;              // else: the keys below this
    bool has_unscaled_scores_;  // FwdSoftmaxParams::unscaled_scores, up to a key bias that is added to scaled scores
    bool is_full_;              // no score of the n_block is masked; not for gathered keys
    uint32_t masked_words_;     // gathered keys: words of 32 keys, one of which is masked for a row of this warp
    bool adds_key_bias_;        // the n_block has parts of a key bias that are added to scaled scores
    Bias bias_;                 // dense, of the n_block
    RelativeBiasLane relative_bias_lane_;
    int shared_end_, next_shared_end_;  // BlockMetadata::shared_end of the scores and of those that are issued next
    float shared_bias_;                 // that the scores and the base of the softmax leave out
    FwdSoftmax<T> softmax_;
    float out_[1][kOutFragments][4];
};

}  // namespace flash_dmattn::cuda::sm90
