// The producer of the sm90 forward with a mask. All its threads write the metadata of a K stage, through
// registers; three of them, in different warps, issue the TMA loads of K, V and Q. With a dense bias, the fourth warp
// only loads the bias, as many stages ahead as there are.
#pragma once

#include "cuda/mask/intervals.cuh"
#include "tma_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdMaskedProducer : FwdTmaProducer<T, kBias, Traits> {
    using Base = FwdTmaProducer<T, kBias, Traits>;
    using Base::kRows, Base::kKeys, Base::kWords, Base::kOrder;
    using Base::p_, Base::params_, Base::maps_, Base::smem_, Base::key_pipeline_, Base::value_pipeline_;
    using typename Base::BlockMetadata;

public:
    using Base::Base;
    using typename Base::SharedStorage;

    __device__ void run() {
        if (threadIdx.x >= kThreads) {
            if constexpr (kBias == BiasKind::kDense) {
                typename Base::DenseBiasLoader bias(p_, maps_, smem_);
                Base::template for_each_work_tile<32>([&](const FwdWorkTile& work_tile) {
                    for (auto blocks = active_blocks(work_tile); blocks.next();)
                        if (lane_id() == 0) bias.load(work_tile, blocks.index());
                });
            }
            return;
        }
        Base::template for_each_work_tile<32>([&](const FwdWorkTile& work_tile) { load(work_tile); });
        if (threadIdx.x == kQueryThread) Base::finish_q();
    }

private:
    static constexpr int kThreads = kProducerThreads<kBias>;
    static constexpr int kMaskRows = ceil_div(kRows, kThreads);  // mask rows that a thread loads
    static constexpr int kKeyThread = 0, kValueThread = 32, kQueryThread = 64;
    using MaskWords = typename SharedStorage::MaskWords;
    static_assert(kBias != BiasKind::kKey || kKeys <= kThreads, "a thread loads the bias of one key");

    // Iterates over the n_blocks of which a row of the work tile sees a key.
    __device__ __forceinline__ auto active_blocks(const FwdWorkTile& work_tile) const {
        const int first_row = work_tile.first_row, last_row = Base::last_row(work_tile);
        const int end_of_full = Base::end_of_full_keys(work_tile);
        const auto summarize = [this, &work_tile, first_row, last_row, end_of_full](int n_block) {
            const MaskSummaries<kRows, kKeys> mask(p_, work_tile.s, work_tile.head);
            auto summary = mask.of(first_row, last_row, n_block);
            summary.full &= (n_block + 1) * kKeys <= end_of_full;
            const int end = Base::end_of_keys(work_tile) - n_block * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.visible_keys[w] &= bits_below(end, w);
            return summary;
        };
        BlockRange range = Base::block_range(work_tile);
        if (p_.interval_summaries.present() && range.end > 32) {
            const MaskSummaries<kRows, kKeys> mask(p_, work_tile.s, work_tile.head);
            const BlockRange seen = active_block_range(range.end, {first_row, last_row + 1}, [&](int n_block) {
                return mask.rows_of(work_tile.s.rows, n_block);
            });
            range = {max(range.begin, seen.begin), min(range.end, seen.end)};
        }
        return ActiveBlockScan<kKeys, decltype(summarize), kOrder>(range.begin, range.end, summarize);
    }

    // An active n_block, and its metadata in registers: prefetched before its stage is free.
    struct ActiveBlock {
        static constexpr int kWarps = kThreads / 32;

        int n_block;
        bool full;                                        // no score is masked
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
        if constexpr (kBias == BiasKind::kKey) begin_key_bias(work_tile);
        if constexpr (is_relative(kBias))
            relative_bias_ = typename Base::RelativeBiasLoader(p_, params_.softmax.inverse_scale, work_tile);
        auto blocks = active_blocks(work_tile);
        ActiveBlock block;
        int previous = BlockMetadata::kNoBlock;
        for (bool has_block = false;; has_block = true) {
            const bool is_last = !blocks.next();
            if (has_block) {
                if (previous == BlockMetadata::kNoBlock) load_q(work_tile);
                produce_k(work_tile, block, is_last, is_last ? block.n_block : blocks.index());
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
        if (threadIdx.x == kQueryThread) Base::load_q(work_tile);
        Base::advance_q();
    }
    __device__ void load_v(const FwdWorkTile& work_tile, int n_block) {
        if (threadIdx.x == kValueThread) Base::load_v(work_tile, n_block);
        value_pipeline_.advance();
    }

    // A K stage without keys: the work tile has no active n_block.
    __device__ void produce_no_block() {
        key_pipeline_.producer_acquire();
        if (threadIdx.x == kKeyThread) smem_.metadata[key_pipeline_.stage()].n_block = BlockMetadata::kNoBlock;
        commit_key();
    }
    __device__ __forceinline__ void commit_key() {
        mbarrier_arrive(key_pipeline_.full());
        if constexpr (kBias == BiasKind::kRelativeGrid) cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
        key_pipeline_.advance();
    }

    // Whether the n_block has a mask that differs by row.
    __device__ bool is_masked(const ActiveBlock& block) const {
        return Traits::kServesRowMasks && !block.full && mask_differs_by_row(p_);
    }

    __device__ __forceinline__ void prefetch(const FwdWorkTile& work_tile, ActiveBlock& block) const {
        if constexpr (kBias == BiasKind::kKey) block.key_bias = load_key_bias_of_thread(work_tile.s, block.n_block);
        if (is_masked(block) && !p_.packed_mask.present())
            block.intervals.fetch(p_, work_tile.s, work_tile.head, block.n_block * kKeys);
    }

    __device__ __forceinline__ void produce_k(const FwdWorkTile& work_tile, const ActiveBlock& block, bool is_last,
                                              int next_n_block) {
        MaskWords words[kMaskRows];
        if (is_masked(block) && p_.packed_mask.present()) load_mask(words, work_tile, block.n_block);
        key_pipeline_.producer_acquire();
        auto& metadata = smem_.metadata[key_pipeline_.stage()];
        if (threadIdx.x == kKeyThread) {
            metadata.n_block = block.n_block;
            metadata.full = block.full;
            metadata.is_last = is_last;
            Base::load_k(work_tile, block.n_block);
        }
        float key_bias = 0;
        if constexpr (kBias == BiasKind::kKey) key_bias = key_bias_of<T>(p_.bias, block.key_bias);
        uint32_t not_masked = ~0u;  // by the key bias; the word of warp_id()
        if constexpr (kBias == BiasKind::kKey) not_masked = __ballot_sync(~0u, key_bias != -kInfinity);
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (w % ActiveBlock::kWarps == warp_id() && lane_id() == 0)
                metadata.visible_keys[w] = block.visible_keys[w / ActiveBlock::kWarps] & not_masked;
        if constexpr (kBias == BiasKind::kKey)
            metadata.key_bias.store(warp_id(), threadIdx.x, threadIdx.x < kKeys, key_bias,
                                    params_.softmax.inverse_scale);
        if constexpr (is_relative(kBias))
            relative_bias_.template copy<kThreads>(p_, metadata, block.n_block, next_n_block,
                                                   static_cast<int>(threadIdx.x));
        if (is_masked(block) && p_.packed_mask.present()) {
#pragma unroll
            for (int i = 0; i < kMaskRows; ++i)
                if (const int row = threadIdx.x + i * kThreads; row < kRows)
                    *reinterpret_cast<MaskWords*>(metadata.mask[row]) = words[i];
        } else if (is_masked(block)) {
            block.intervals.expand(metadata.mask, work_tile.first_row, 1);
        }
        commit_key();
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

    const char* key_bias_;  // of key threadIdx.x of n_block 0
    typename Base::RelativeBiasLoader relative_bias_;
};

}  // namespace flash_dmattn::cuda::sm90
