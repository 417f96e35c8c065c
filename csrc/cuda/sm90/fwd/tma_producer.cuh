// The producer warpgroup of the sm90 forward over n_blocks of contiguous keys.
//
// Three warps issue the TMA loads of K, V and Q: a single issuing thread was 10 to 25 % slower. All producer threads
// write the metadata of a K stage, through registers. With a dense bias, the fourth warp only loads the bias, as many
// stages ahead as there are.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/multicast.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/scores.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdTmaProducer {
public:
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;

    __device__ FwdTmaProducer(const FwdArgs& p, const FwdKernelParams& params, const FwdTensorMaps& maps,
                              SharedStorage& smem)
        : p_(p), params_(params), scheduler_(params.scheduler), maps_(maps), smem_(smem),
          query_pipeline_(smem.query_pipeline), key_pipeline_(smem.key_pipeline), value_pipeline_(smem.value_pipeline) {
    }

    __device__ void run() {
        if (threadIdx.x >= kThreads) {
            if constexpr (kBias == BiasKind::kDense) {
                DenseBiasProducer bias(p_, maps_, smem_);
                for_each_work_tile([&](const FwdWorkTile& work_tile) {
                    for (auto blocks = active_blocks(work_tile); blocks.next();) bias.load(work_tile, blocks.index());
                });
            }
            return;
        }
        for_each_work_tile([&](const FwdWorkTile& work_tile) { load(work_tile); });
        if (threadIdx.x == kQueryThread) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(work_tile_stage_).invalidate();
            mbarrier_arrive(query_pipeline_.full());
        }
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWords = SharedStorage::kWords,
                         kThreads = kProducerThreads<kBias>;
    static constexpr int kClusterSize = Traits::kClusterSize;
    // A relative bias often favors near keys: under causality the last blocks then have the row maxima, and the softmax
    // that begins with them keeps its base.
    static constexpr BlockOrder kOrder =
        kBias == BiasKind::kRelative ? BlockOrder::kDescending : BlockOrder::kAscending;
    static constexpr int kMaskRows = ceil_div(kRows, kThreads);  // mask rows that a thread loads
    // The threads that issue TMA loads, in different warps.
    static constexpr int kKeyThread = 0, kValueThread = 32, kQueryThread = 64;
    using BlockMetadata = typename SharedStorage::BlockMetadata;
    using MaskWords = typename SharedStorage::MaskWords;
    static_assert(kBias != BiasKind::kKey || kKeys <= kThreads, "a thread loads the bias of one key");

    // One thread loads the dense bias of all MMA warpgroups, apart from K: the bias has the longest latency.
    class DenseBiasProducer {
    public:
        __device__ DenseBiasProducer(const FwdArgs& p, const FwdTensorMaps& maps, SharedStorage& smem)
            : p_(p), maps_(maps), smem_(smem) {}

        __device__ __forceinline__ void load(const FwdWorkTile& work_tile, int n_block) {
            if (lane_id() != 0) return;
            const int head = shared_head(work_tile.head, p_.heads, p_.bias.heads);
            const int batch = shared_batch(p_.bias, work_tile.s), row = work_tile.s.first_row + work_tile.first_row;
            const int end = (n_block + 1) * kKeys;
            for (int key = n_block * kKeys; key < end; key += SharedStorage::kBiasKeys, state_.advance())
                for (int wg = 0; wg < Traits::kConsumerWarpgroups; ++wg) {
                    auto& barriers = smem_.bias_pipelines[wg];
                    mbarrier_wait(smem_address(&barriers.empty[state_.stage()]), state_.phase() ^ 1);
                    const uint32_t full = smem_address(&barriers.full[state_.stage()]);
                    mbarrier_arrive_and_expect_tx(full, sizeof(typename SharedStorage::BiasTile));
                    tma_load_4d(smem_address(&smem_.bias[wg][state_.stage()]), &maps_.bias, full, key,
                                row + wg * kWarpgroupRows, head, batch);
                }
        }

    private:
        const FwdArgs& p_;
        const FwdTensorMaps& maps_;
        SharedStorage& smem_;
        PipelineState<Traits::kBiasStages> state_;  // the same in all warpgroups' pipelines
    };

    template <typename Visit>
    __device__ __forceinline__ void for_each_work_tile(const Visit& visit) {
        typename SharedStorage::Scheduler tiles(scheduler_, smem_.next_work_tile);
        for (auto tile = tiles.get_initial_work(); tile.is_valid(scheduler_); tile = tiles.next_work(tile)) {
            FwdWorkTile work_tile(p_, scheduler_, tile.index, kClusterSize * kRows);
            work_tile.first_row += cta_rank() * kRows;
            if (!work_tile.is_empty()) visit(work_tile);
        }
    }

    // Iterates over the n_blocks of which a row of the cluster's work tiles sees a key.
    __device__ __forceinline__ auto active_blocks(const FwdWorkTile& work_tile) const {
        // The rows of the whole cluster: its CTAs iterate over the same n_blocks.
        const int first_row = work_tile.first_row - cta_rank() * kRows,
                  last_row = min(first_row + kClusterSize * kRows, work_tile.s.rows) - 1;
        // The keys that all rows of the Q tile see. Rows past a packed sequence's end are those of the next one: masked,
        // they take no part in the softmax's vote, so that the bits of a sequence do not depend on its neighbors.
        const bool has_other_rows = p_.cu_seqlens_q != nullptr && work_tile.first_row + kRows > work_tile.s.rows;
        const int seen_by_all = has_other_rows ? 0 : work_tile.s.keys_of(work_tile.first_row, p_.is_causal);
        const auto summarize = [this, &work_tile, first_row, last_row, seen_by_all](int n_block) {
            const Sequence& s = work_tile.s;
            const MaskSummaries<kRows, kKeys> mask(p_, s, work_tile.head);
            auto summary = mask.of(first_row, last_row, n_block);
            summary.full &= (n_block + 1) * kKeys <= seen_by_all;
            const int end = s.keys_of(last_row, p_.is_causal) - n_block * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.visible_keys[w] &= bits_below(end, w);
            return summary;
        };
        BlockRange range{0, ceil_div(work_tile.s.keys_of(last_row, p_.is_causal), kKeys)};
        if (p_.interval_summaries.tiles != nullptr && range.end > 32) {
            const MaskSummaries<kRows, kKeys> mask(p_, work_tile.s, work_tile.head);
            range = active_block_range(range.end, {first_row, last_row + 1},
                                       [&](int n_block) { return mask.rows_of(work_tile.s.rows, n_block); });
        }
        if constexpr (kBias == BiasKind::kRelative) {
            const VisibleDistances distances(p_, p_.visible_distances, work_tile.s, work_tile.head);
            const auto keys = distances.keys_of(first_row, last_row);
            range = {max(range.begin, keys.begin / kKeys), min(range.end, ceil_div(keys.end, kKeys))};
        }
        return ActiveBlockScan<kKeys, decltype(summarize), kOrder>(range.begin, range.end, summarize);
    }

    // An active n_block, and its metadata in registers: prefetched before its stage is free.
    struct ActiveBlock {
        static constexpr int kWarps = kThreads / 32;

        int n_block;
        bool full;                                        // no score is hidden
        uint32_t visible_keys[ceil_div(kWords, kWarps)];  // the words that this warp writes
        BlockIntervals<kThreads, kWords> intervals;
        KeyBiasBits key_bias;

        ActiveBlock() = default;
        template <typename Blocks>
        __device__ __forceinline__ explicit ActiveBlock(const Blocks& blocks)
            : n_block(blocks.index()), full(blocks.full()) {
#pragma unroll
            for (int w = 0; w < kWords; ++w)
                if (w % kWarps == warp_id()) visible_keys[w / kWarps] = blocks.visible_keys(w);
        }
    };

    // Produces stages in the order in which the consumers wait: K and Q of the first n_block, then K of an n_block
    // before V of the previous one. Looks one n_block ahead, to know which one is the last.
    __device__ void load(const FwdWorkTile& work_tile) {
        kv_head_ = shared_head(work_tile.head, p_.heads, p_.kv_heads);
        if constexpr (kBias == BiasKind::kKey) begin_key_bias(work_tile);
        if constexpr (is_relative(kBias)) begin_relative_bias(work_tile);
        auto blocks = active_blocks(work_tile);
        ActiveBlock block;
        int previous = BlockMetadata::kNoBlock;
        for (bool has_block = false;; has_block = true) {
            const bool is_last = !blocks.next();
            if (has_block) {
                if (previous == BlockMetadata::kNoBlock) load_q(work_tile);
                produce_k(work_tile, block, is_last);
                if (previous != BlockMetadata::kNoBlock) load_v(work_tile, previous);
                previous = block.n_block;
            }
            if (is_last) break;
            block = ActiveBlock(blocks);
            prefetch(work_tile, block);
        }
        if (previous != BlockMetadata::kNoBlock) return load_v(work_tile, previous);
        produce_no_block();
        load_q(work_tile);
    }

    __device__ void load_q(const FwdWorkTile& work_tile) {
        if (threadIdx.x == kQueryThread) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(work_tile_stage_) = work_tile;
            mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename SharedStorage::QueryTile));
            tma_load_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_, work_tile.s,
                          work_tile.s.first_row + work_tile.first_row, work_tile.head);
        }
        work_tile_stage_ = SharedStorage::next_work_tile_stage(work_tile_stage_);
        query_pipeline_.advance();
    }

    // A K stage without keys: the work tile has no active n_block.
    __device__ void produce_no_block() {
        key_pipeline_.producer_acquire();
        if (threadIdx.x == kKeyThread) smem_.metadata[key_pipeline_.stage()].n_block = BlockMetadata::kNoBlock;
        commit_key();
    }
    __device__ __forceinline__ void commit_key() {
        mbarrier_arrive(key_pipeline_.full());
        if constexpr (is_relative(kBias)) cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
        key_pipeline_.advance();
    }

    __device__ bool has_bits() const { return p_.packed_mask.bits != nullptr; }
    __device__ bool is_masked(const ActiveBlock& block) const { return !block.full && mask_differs_by_row(p_); }

    __device__ __forceinline__ void prefetch(const FwdWorkTile& work_tile, ActiveBlock& block) const {
        if constexpr (kBias == BiasKind::kKey) block.key_bias = load_key_bias_of_thread(work_tile.s, block.n_block);
        if (is_masked(block) && !has_bits())
            block.intervals.fetch(p_, work_tile.s, work_tile.head, block.n_block * kKeys);
    }

    __device__ __forceinline__ void produce_k(const FwdWorkTile& work_tile, const ActiveBlock& block, bool is_last) {
        MaskWords words[kMaskRows];
        if (is_masked(block) && has_bits()) load_mask(words, work_tile, block.n_block);
        key_pipeline_.producer_acquire();
        auto& metadata = smem_.metadata[key_pipeline_.stage()];
        if (threadIdx.x == kKeyThread) {
            metadata.n_block = block.n_block;
            metadata.full = block.full;
            metadata.is_last = is_last;
            mbarrier_expect_tx(key_pipeline_.full(), sizeof(typename SharedStorage::KeyTile));
            load_block(smem_.key[key_pipeline_.stage()], maps_.key, key_pipeline_.full(), work_tile, block.n_block);
        }
        float key_bias = 0;
        if constexpr (kBias == BiasKind::kKey) key_bias = key_bias_of<T>(p_.bias, block.key_bias);
        uint32_t not_hidden = ~0u;  // by the key bias; the word of warp_id()
        if constexpr (kBias == BiasKind::kKey) not_hidden = __ballot_sync(~0u, key_bias != -kInfinity);
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (w % ActiveBlock::kWarps == warp_id() && lane_id() == 0)
                metadata.visible_keys[w] = block.visible_keys[w / ActiveBlock::kWarps] & not_hidden;
        if constexpr (kBias == BiasKind::kKey)
            metadata.key_bias.store(threadIdx.x, threadIdx.x < kKeys, key_bias, params_.softmax.inverse_scale);
        if constexpr (is_relative(kBias)) copy_relative_bias(metadata, block.n_block);
        if (is_masked(block) && has_bits()) {
#pragma unroll
            for (int i = 0; i < kMaskRows; ++i)
                if (const int row = threadIdx.x + i * kThreads; row < kRows)
                    *reinterpret_cast<MaskWords*>(metadata.mask[row]) = words[i];
        } else if (is_masked(block)) {
            block.intervals.expand(metadata.mask, work_tile.first_row, 1);
        }
        commit_key();
    }

    __device__ __forceinline__ void load_v(const FwdWorkTile& work_tile, int n_block) {
        if (threadIdx.x == kValueThread) {
            value_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(value_pipeline_.full(), sizeof(typename SharedStorage::KeyTile));
            load_block(smem_.value[value_pipeline_.stage()], maps_.value, value_pipeline_.full(), work_tile, n_block);
        }
        value_pipeline_.advance();
    }

    // This CTA's rank in the cluster, whose CTAs have consecutive m_blocks.
    static __device__ __forceinline__ int cta_rank() { return kClusterSize == 1 ? 0 : cta_rank_in_cluster(); }
    // This CTA's part of an n_block of K or V.
    __device__ __forceinline__ void load_block(typename SharedStorage::KeyTile& to, const CUtensorMap& map,
                                               uint32_t barrier, const FwdWorkTile& work_tile, int n_block) {
        tma_load_rows_multicast<kClusterSize>(to, map, barrier, p_, work_tile.s,
                                              work_tile.s.first_key + n_block * kKeys, kv_head_);
    }

    __device__ __forceinline__ void begin_key_bias(const FwdWorkTile& work_tile) {
        const int64_t first = score_offset(p_.bias, work_tile.s, work_tile.head, p_.heads);
        key_bias_ = bias_data(p_.bias, first + threadIdx.x * p_.bias.col_stride);
    }
    __device__ __forceinline__ KeyBiasBits load_key_bias_of_thread(const Sequence& s, int n_block) const {
        const int first = n_block * kKeys;
        if (threadIdx.x >= kKeys || first + static_cast<int>(threadIdx.x) >= s.keys) return {};
        return load_key_bias(p_.bias, key_bias_, first * p_.bias.col_stride);
    }

    __device__ __forceinline__ void begin_relative_bias(const FwdWorkTile& work_tile) {
        relative_bias_ =
            RelativeBias(p_.relative_bias, work_tile.s, relative_bias_entries(p_, work_tile.s.batch, work_tile.head));
        relative_row_ = relative_bias_.row_part(work_tile.first_row + kRows - 1);
        relative_size_ = SharedStorage::RelativeSegment::size(p_.relative_bias);
    }
    __device__ __forceinline__ void copy_relative_bias(BlockMetadata& metadata, int n_block) const {
        auto& segment = metadata.relative_bias;
        const int first_key = n_block * kKeys, first = relative_row_ + relative_bias_.key_part(first_key);
        segment.begin(p_.relative_bias, first_key);
        int size = relative_size_;
        if constexpr (kBias == BiasKind::kRelative) {
            const bool is_clamped = relative_bias_.is_clamped(first, first + size - 1);
            if (threadIdx.x == 0) metadata.is_clamped = is_clamped;
            if (is_clamped) size = 1;
        }
        for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads)
            segment.copy(i, relative_bias_.entry(first + segment.kKeyStep * i));
    }

    // The mask rows threadIdx.x + i * kThreads of the n_block.
    __device__ __forceinline__ void load_mask(MaskWords (&words)[kMaskRows], const FwdWorkTile& work_tile,
                                              int n_block) const {
        const uint32_t* bits = mask_words(p_, work_tile.s, work_tile.head) + n_block * kWords;
#pragma unroll
        for (int i = 0; i < kMaskRows; ++i) {
            const int row =
                min(work_tile.first_row + static_cast<int>(threadIdx.x) + i * kThreads, work_tile.s.rows - 1);
            words[i] = __ldg(reinterpret_cast<const MaskWords*>(bits + row * p_.packed_mask.bits_row_stride));
        }
    }

    const FwdArgs& p_;
    const FwdKernelParams& params_;
    const FwdTileSchedulerParams& scheduler_;
    const FwdTensorMaps& maps_;
    SharedStorage& smem_;
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    int work_tile_stage_ = 0;
    int kv_head_;                 // of the work tile
    const char* key_bias_;        // of key threadIdx.x of n_block 0
    RelativeBias relative_bias_;  // of the work tile
    int relative_row_;            // row_part() of the work tile's last row
    int relative_size_;           // of a segment
};

}  // namespace flash_dmattn::cuda::sm90
