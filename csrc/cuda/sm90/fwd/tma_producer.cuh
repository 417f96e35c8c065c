// What the producers of the sm90 forward over n_blocks of contiguous keys share: their work tiles, the n_blocks of
// these, and the TMA loads.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
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

protected:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWords = SharedStorage::kWords;
    static constexpr BlockOrder kOrder = Traits::kOrder;
    using BlockMetadata = typename SharedStorage::BlockMetadata;

    // All four warps call, each with kThreads threads: lane 0 alone or all 32.
    template <int kThreads, typename Visit>
    __device__ __forceinline__ void for_each_work_tile(const Visit& visit) {
        FwdTileScheduler tiles(scheduler_, smem_.next_work_tiles);
        for (auto tile = tiles.get_initial_work(); tile.is_valid(scheduler_); tile = tiles.next_work<kThreads>()) {
            const FwdWorkTile work_tile(p_, scheduler_, tile.index, kRows);
            kv_head_ = shared_head(work_tile.head, p_.heads, p_.kv_heads);
            if (!work_tile.is_empty()) visit(work_tile);
        }
    }

    static __device__ __forceinline__ int last_row(const FwdWorkTile& work_tile) {
        return min(work_tile.first_row + kRows, work_tile.s.rows) - 1;
    }
    // The keys that some row of the work tile sees are below this, but for a mask.
    __device__ __forceinline__ int end_of_keys(const FwdWorkTile& work_tile) const {
        return work_tile.end_of_keys(0, kRows, p_.is_causal);
    }
    // All rows of the Q tile see the keys below this, but for a mask. 0 if it extends past a packed sequence: its rows
    // of the next one are then masked in every n_block, so that a result does not depend on them.
    __device__ __forceinline__ int end_of_full_keys(const FwdWorkTile& work_tile) const {
        const bool has_other_rows = p_.cu_seqlens_q != nullptr && work_tile.first_row + kRows > work_tile.s.rows;
        return has_other_rows ? 0 : work_tile.s.keys_of(work_tile.first_row, p_.is_causal);
    }
    // The n_blocks of which a row of the work tile may see a key, but for a mask.
    __device__ __forceinline__ BlockRange block_range(const FwdWorkTile& work_tile) const {
        BlockRange range{0, ceil_div(end_of_keys(work_tile), kKeys)};
        if constexpr (kBias == BiasKind::kRelative) {
            const VisibleDistances distances(p_, p_.visible_distances, work_tile.s, work_tile.head);
            const auto keys = distances.keys_of(work_tile.first_row, last_row(work_tile));
            range = {keys.begin / kKeys, min(range.end, ceil_div(keys.end, kKeys))};
        }
        return range;
    }

    // The next three: one thread calls.
    __device__ __forceinline__ void load_q(const FwdWorkTile& work_tile) {
        query_pipeline_.producer_acquire();
        FwdWorkTile& shared = smem_.work_tile(work_tile_stage_) = work_tile;
        if constexpr (Traits::kCountsBlocks) shared.n_blocks = block_range(work_tile);
        mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename SharedStorage::QueryTile));
        tma_load_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_, work_tile.s,
                      work_tile.s.first_row + work_tile.first_row, work_tile.head);
    }
    __device__ __forceinline__ void load_v(const FwdWorkTile& work_tile, int n_block) {
        value_pipeline_.producer_acquire();
        mbarrier_arrive_and_expect_tx(value_pipeline_.full(), sizeof(typename SharedStorage::KvTile));
        load_block(smem_.value[value_pipeline_.stage()], maps_.value, value_pipeline_.full(), work_tile, n_block);
    }
    __device__ __forceinline__ void load_k(const FwdWorkTile& work_tile, int n_block) {
        mbarrier_expect_tx(key_pipeline_.full(), sizeof(typename SharedStorage::KvTile));
        load_block(smem_.key[key_pipeline_.stage()], maps_.key, key_pipeline_.full(), work_tile, n_block);
    }
    __device__ __forceinline__ void advance_q() {
        work_tile_stage_ = SharedStorage::next_work_tile_stage(work_tile_stage_);
        query_pipeline_.advance();
    }
    // After the last work tile; the thread of load_q calls.
    __device__ void finish_q() {
        query_pipeline_.producer_acquire();
        smem_.work_tile(work_tile_stage_).invalidate();
        mbarrier_arrive(query_pipeline_.full());
    }

    // The entries of a relative bias, from global memory to the metadata of a K stage.
    class RelativeBiasLoader {
    public:
        RelativeBiasLoader() = default;
        // In one dimension the entries are multiplied by `factor`.
        __device__ __forceinline__ RelativeBiasLoader(const FwdArgs& p, float factor, const FwdWorkTile& work_tile)
            : bias_(p.relative_bias, work_tile.s, relative_bias_entries(p, work_tile.s.batch, work_tile.head)),
              last_row_(bias_.row_part(work_tile.first_row + kRows - 1)),
              size_(SharedStorage::RelativeSegment::size(p.relative_bias)), factor_(factor) {}

        // Copies the entries of an n_block, those of a grid by cp.async. kThreads threads call, at least kKeys / 16.
        template <int kThreads>
        __device__ __forceinline__ void copy(const FwdArgs& p, BlockMetadata& metadata, int n_block, int next_n_block,
                                             int thread) const {
            auto& segment = metadata.relative_bias;
            const int first_key = n_block * kKeys, first = last_row_ + bias_.key_part(first_key);
            segment.begin(p.relative_bias, first_key, thread);
            if constexpr (kBias == BiasKind::kRelative) {
                const int end = shared_end(n_block), size = end != 0 ? 1 : size_;
                constexpr int kLoads = 5;  // at once: more spill registers
                for (int from = thread; from < size; from += kLoads * kThreads) {
                    float entries[kLoads];
#pragma unroll
                    for (int i = 0; i < kLoads; ++i)
                        if (const int at = from + i * kThreads; at < size) entries[i] = bias_.load(first + at);
#pragma unroll
                    for (int i = 0; i < kLoads; ++i)
                        if (const int at = from + i * kThreads; at < size) segment.store(at, entries[i] * factor_);
                }
                if (thread != 0) return;
                metadata.shared_end = static_cast<int8_t>(end);
                metadata.next_shared_end = static_cast<int8_t>(shared_end(next_n_block));
            } else {
                for (int i = thread; i < size_; i += kThreads) segment.copy(i, bias_.entry(first - i));
            }
        }

    private:
        // The end of the table that all scores of an n_block read (RelativePosition::clamped_end), if they can share its
        // entry.
        __device__ __forceinline__ int shared_end(int n_block) const {
            const int first = last_row_ + bias_.key_part(n_block * kKeys);
            const int end = bias_.clamped_end(first, first + size_ - 1);
            return end != 0 && fabsf(bias_.load(first)) <= kMaxSharedBias ? end : 0;
        }

        RelativeBias bias_;  // of the work tile
        int last_row_;       // row_part() of the work tile's last row
        int size_;           // of a segment
        float factor_;
    };

    // One thread loads the dense bias of all MMA warpgroups, apart from K: the bias has the longest latency.
    class DenseBiasLoader {
    public:
        __device__ DenseBiasLoader(const FwdArgs& p, const FwdTensorMaps& maps, SharedStorage& smem)
            : p_(p), maps_(maps), smem_(smem) {}

        __device__ __forceinline__ void load(const FwdWorkTile& work_tile, int n_block) {
            const int head = shared_head(work_tile.head, p_.heads, p_.bias.heads);
            const int batch = shared_batch(p_.bias, work_tile.s), row = work_tile.s.first_row + work_tile.first_row;
            const int end = (n_block + 1) * kKeys;
            for (int key = n_block * kKeys; key < end; key += SharedStorage::kBiasKeys, state_.advance())
                for (int wg = 0; wg < Traits::kConsumerWarpgroups; ++wg) {
                    auto& barriers = smem_.bias_pipelines[wg];
                    barriers.producer_acquire(state_);
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

private:
    // An n_block of K or V.
    __device__ __forceinline__ void load_block(typename SharedStorage::KvTile& to, const CUtensorMap& map,
                                               uint32_t barrier, const FwdWorkTile& work_tile, int n_block) {
        tma_load_rows(to, map, barrier, p_, work_tile.s, work_tile.s.first_key + n_block * kKeys, kv_head_);
    }

protected:
    const FwdArgs& p_;
    const FwdKernelParams& params_;
    const FwdTileSchedulerParams& scheduler_;
    const FwdTensorMaps& maps_;
    SharedStorage& smem_;
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    int work_tile_stage_ = 0;
    int kv_head_;  // of the work tile
};

}  // namespace flash_dmattn::cuda::sm90
