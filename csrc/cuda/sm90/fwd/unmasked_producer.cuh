// The producer of the sm90 forward without a mask: one thread each loads K, V and Q, and one warp the bias. Each runs
// ahead as far as its own pipeline allows.
#pragma once

#include "tma_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdUnmaskedProducer : FwdTmaProducer<T, kBias, Traits> {
    using Base = FwdTmaProducer<T, kBias, Traits>;
    using Base::kKeys, Base::kWords, Base::kOrder;
    using Base::p_, Base::params_, Base::maps_, Base::smem_, Base::key_pipeline_, Base::value_pipeline_;
    using typename Base::BlockMetadata;

public:
    using Base::Base;
    using typename Base::SharedStorage;

    __device__ void run() {
        switch (warp_id()) {
            case 0: return lane_id() == 0 ? produce_k() : void();
            case 1: return lane_id() == 0 ? produce_v() : void();
            case 2: return lane_id() == 0 ? produce_q() : void();
            case 3:
                if constexpr (kBias == BiasKind::kKey) produce_key_bias();
                if constexpr (kBias == BiasKind::kDense) return lane_id() == 0 ? produce_dense_bias() : void();
                if constexpr (is_relative(kBias)) produce_relative_bias();
                if constexpr (kBias == BiasKind::kNone) return lane_id() == 0 ? skip_work_tiles() : void();
        }
    }

private:
    // Arrivals at the barrier of a K stage. The warp that writes a key or relative bias beside K arrives by one lane
    // after the metadata, and by all when their copies for a grid have completed. The barrier counts the threads of
    // FwdMaskedProducer: the thread of K arrives for the rest of them.
    static constexpr bool kProducesBias = kBias == BiasKind::kKey || is_relative(kBias);
    static constexpr int kBiasArrivals = kBias == BiasKind::kRelativeGrid ? 1 + 32 : kProducesBias ? 1 : 0;
    static constexpr int kArrivalsOfK = SharedStorage::kKeyArrivals - kBiasArrivals;

    __device__ void produce_k() {
        Base::template for_each_work_tile<1>([&](const FwdWorkTile& work_tile) {
            const int end = Base::end_of_keys(work_tile), end_of_full = Base::end_of_full_keys(work_tile);
            const bool has_blocks = for_each_block(work_tile, [&](int n_block, bool is_last) {
                BlockMetadata& metadata = acquire_k();
                if constexpr (!Traits::kCountsBlocks) {
                    metadata.n_block = n_block;
                    metadata.full = (n_block + 1) * kKeys <= end_of_full;
                    metadata.is_last = is_last;
                    if constexpr (kBias != BiasKind::kKey) {
#pragma unroll
                        for (int w = 0; w < kWords; ++w)
                            metadata.visible_keys[w] = bits_below(end - n_block * kKeys, w);
                    }
                }
                Base::load_k(work_tile, n_block);
                commit_k();
            });
            if (Traits::kCountsBlocks || has_blocks) return;
            acquire_k().n_block = BlockMetadata::kNoBlock;
            commit_k();
        });
    }
    __device__ void produce_v() {
        Base::template for_each_work_tile<1>([&](const FwdWorkTile& work_tile) {
            for_each_block(work_tile, [&](int n_block, bool) {
                Base::load_v(work_tile, n_block);
                value_pipeline_.advance();
            });
        });
    }
    __device__ void produce_q() {
        Base::template for_each_work_tile<1>([&](const FwdWorkTile& work_tile) {
            Base::load_q(work_tile);
            Base::advance_q();
        });
        Base::finish_q();
    }
    // A dynamic scheduler waits for all four warps.
    __device__ void skip_work_tiles() {
        Base::template for_each_work_tile<1>([](const FwdWorkTile&) {});
    }
    __device__ void produce_dense_bias() {
        typename Base::DenseBiasLoader bias(p_, maps_, smem_);
        Base::template for_each_work_tile<1>([&](const FwdWorkTile& work_tile) {
            for_each_block(work_tile, [&](int n_block, bool) { bias.load(work_tile, n_block); });
        });
    }
    __device__ void produce_key_bias() {
        Base::template for_each_work_tile<32>([&](const FwdWorkTile& work_tile) {
            const Sequence& s = work_tile.s;
            const int end = Base::end_of_keys(work_tile);
            const char* const biases = bias_data(p_.bias, score_offset(p_.bias, s, work_tile.head, p_.heads));
            produce_bias(work_tile, [&](BlockMetadata& metadata, int n_block) {
                KeyBiasBits bits[kWords];
#pragma unroll
                for (int w = 0; w < kWords; ++w) {
                    const int key = n_block * kKeys + w * 32 + lane_id();
                    bits[w] = key < s.keys ? load_key_bias(p_.bias, biases, key * p_.bias.col_stride) : KeyBiasBits{};
                }
#pragma unroll
                for (int part = 0; part < metadata.key_bias.kParts; ++part) {
                    const bool has_keys = part < kWords;
                    const float bias = has_keys ? key_bias_of<T>(p_.bias, bits[has_keys ? part : 0]) : 0.f;
                    metadata.key_bias.store(part, part * 32 + lane_id(), has_keys, bias, params_.softmax.inverse_scale);
                    const uint32_t not_masked = __ballot_sync(~0u, bias != -kInfinity);
                    if (has_keys && lane_id() == 0)
                        metadata.visible_keys[part] = bits_below(end - n_block * kKeys, part) & not_masked;
                }
            });
        });
    }
    __device__ void produce_relative_bias() {
        Base::template for_each_work_tile<32>([&](const FwdWorkTile& work_tile) {
            const typename Base::RelativeBiasLoader bias(p_, params_.softmax.inverse_scale, work_tile);
            produce_bias(work_tile, [&](BlockMetadata& metadata, int n_block) {
                constexpr int kStep = kOrder == BlockOrder::kAscending ? 1 : -1;
                bias.template copy<32>(p_, metadata, n_block, n_block + kStep, lane_id());
            });
        });
    }
    // Calls fill(metadata, n_block) for each K stage of the work tile.
    template <typename Fill>
    __device__ __forceinline__ void produce_bias(const FwdWorkTile& work_tile, const Fill& fill) {
        const bool has_blocks = for_each_block(work_tile, [&](int n_block, bool) {
            fill(acquire_k(), n_block);
            commit_bias();
        });
        if (Traits::kCountsBlocks || has_blocks) return;
        acquire_k();
        commit_bias();
    }

    // Calls visit(n_block, is_last); returns whether there is an n_block.
    template <typename Visit>
    __device__ __forceinline__ bool for_each_block(const FwdWorkTile& work_tile, const Visit& visit) const {
        const BlockRange range = Base::block_range(work_tile);
        for (int i = range.begin; i < range.end; ++i)
            visit(kOrder == BlockOrder::kAscending ? i : range.begin + range.end - 1 - i, i == range.end - 1);
        return range.begin < range.end;
    }

    __device__ __forceinline__ BlockMetadata& acquire_k() const {
        key_pipeline_.producer_acquire();
        return smem_.metadata[key_pipeline_.stage()];
    }
    __device__ __forceinline__ void commit_k() {
        mbarrier_arrive(key_pipeline_.full(), kArrivalsOfK);
        key_pipeline_.advance();
    }
    __device__ __forceinline__ void commit_bias() {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(key_pipeline_.full());
        if constexpr (kBias == BiasKind::kRelativeGrid) cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
        key_pipeline_.advance();
    }
};

}  // namespace flash_dmattn::cuda::sm90
