// The warp group that loads, of the forward by tiles of neighbouring keys: the copy engine fetches them.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdTmaProducer {
public:
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;

    __device__ FwdTmaProducer(const FwdArgs& p, const FwdSchedule& schedule, const FwdMaps& maps, SharedStorage& smem)
        : p_(p),
          schedule_(schedule),
          maps_(maps),
          smem_(smem),
          query_pipeline_(smem.query_pipeline),
          key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.value_pipeline) {}

    __device__ void run() {
        if (threadIdx.x >= kThreads) {
            if constexpr (kBias == BiasKind::kDense) {
                DenseBiases biases(p_, maps_, smem_);
                for_each_work_tile([&](const FwdWorkTile& work_tile) {
                    for (auto tile = scan(work_tile); tile.next();) biases.load(work_tile, tile.index());
                });
            }
            return;
        }
        for_each_work_tile([&](const FwdWorkTile& work_tile) { load(work_tile); });
        if (threadIdx.x == kQueryThread) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(turn_).head = FwdWorkTile::kNone;
            mbarrier_arrive(query_pipeline_.full());
        }
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWords = SharedStorage::kWords,
                         kThreads = kProducerThreads<kBias>;
    static constexpr int kMaskRows = ceil_div(kRows, kThreads);  // of a thread that loads a mask
    // Who starts copies, each in a warp of its own: the group's instructions are slow, and so none waits for another's.
    static constexpr int kKeyThread = 0, kValueThread = 32, kQueryThread = 64;
    using MaskWords = typename SharedStorage::MaskWords;
    static_assert(kBias != BiasKind::kKey || kKeys <= kThreads, "a thread loads the bias of one key");

    // A thread that hands over dense biases: they take longest to come, and nothing else waits for their room.
    class DenseBiases {
    public:
        __device__ DenseBiases(const FwdArgs& p, const FwdMaps& maps, SharedStorage& smem)
            : p_(p), maps_(maps), smem_(smem) {}

        __device__ __forceinline__ void load(const FwdWorkTile& work_tile, int tile) {
            if (lane_id() != 0) return;
            const int head = shared_head(work_tile.head, p_.heads, p_.bias.heads);
            const int batch = shared_batch(p_.bias, work_tile.s), row = work_tile.s.first_row + work_tile.first_row;
            for (int key = tile * kKeys; key < (tile + 1) * kKeys; key += SharedStorage::kBiasKeys, place_.advance())
                for (int group = 0; group < Traits::kConsumerWarpgroups; ++group) {
                    auto& barriers = smem_.bias_pipelines[group];
                    mbarrier_wait(smem_address(&barriers.empty[place_.stage()]), place_.phase() ^ 1);
                    const uint32_t full = smem_address(&barriers.full[place_.stage()]);
                    mbarrier_arrive_and_expect_tx(full, sizeof(typename SharedStorage::BiasTile));
                    tma_load_4d(smem_address(&smem_.bias[group][place_.stage()]), &maps_.bias, full, key,
                                row + group * kWarpgroupRows, head, batch);
                }
        }

    private:
        const FwdArgs& p_;
        const FwdMaps& maps_;
        SharedStorage& smem_;
        PipelineState<Traits::kBiasStages> place_;  // in the pipelines of all groups
    };

    template <typename Visit>
    __device__ __forceinline__ void for_each_work_tile(const Visit& visit) {
        for (unsigned index = blockIdx.x; index < schedule_.num_work_tiles; index = next_work_tile(index)) {
            const FwdWorkTile work_tile(p_, schedule_, index, kRows);
            if (!work_tile.empty()) visit(work_tile);
        }
    }
    // Where blocks draw their works, the loading warps are told by the first. It writes to two places in turn, since another
    // warp may yet have to read what was drawn last.
    __device__ __forceinline__ unsigned next_work_tile(unsigned index) {
        if (kBias == BiasKind::kDense || schedule_.tile_count_semaphore == nullptr) return index + gridDim.x;
        unsigned& drawn = smem_.next_work_tile[draw_];
        draw_ ^= 1;
        if (threadIdx.x == 0) drawn = gridDim.x + atomicAdd(schedule_.tile_count_semaphore, 1);
        named_barrier_sync(SharedStorage::kNextWorkTileBarrier, kThreads);
        return drawn;
    }

    // Over the tiles of keys of which the work sees any.
    __device__ __forceinline__ auto scan(const FwdWorkTile& work_tile) const {
        const int last_row = min(work_tile.first_row + kRows, work_tile.s.rows) - 1;
        // The lane's tile of keys before any of its pairs is read.
        const auto summarize = [this, &work_tile, last_row](int tile) {
            const Sequence& s = work_tile.s;
            const MaskSummaries<kRows, kKeys> mask(p_, s, work_tile.head);
            auto summary = mask.of(work_tile.first_row, last_row, tile);
            summary.full &= (tile + 1) * kKeys <= s.keys_of(work_tile.first_row, p_.is_causal);
            const int end = s.keys_of(last_row, p_.is_causal) - tile * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.columns[w] &= bits_below(end, w);
            return summary;
        };
        BlockRange span{0, ceil_div(work_tile.s.keys_of(last_row, p_.is_causal), kKeys)};
        if (p_.interval_summaries.tiles != nullptr && span.end > 32) {
            const MaskSummaries<kRows, kKeys> mask(p_, work_tile.s, work_tile.head);
            span = active_block_range(span.end, {work_tile.first_row, last_row + 1},
                                      [&](int tile) { return mask.rows_of(work_tile.s.rows, tile); });
        }
        return ActiveBlockScan<kKeys, decltype(summarize)>(span.begin, span.end, summarize);
    }

    // A tile of keys that a work visits.
    struct Visit {
        static constexpr int kWarps = kThreads / 32;

        int tile;
        bool full;                                   // no pair is hidden
        uint32_t columns[ceil_div(kWords, kWarps)];  // this warp's words
        // What comes from memory through registers: on its way before there is room for it.
        BlockIntervals<kThreads, kWords> intervals;
        float key_bias;

        Visit() = default;
        template <typename Scan>
        __device__ __forceinline__ explicit Visit(const Scan& scan) : tile(scan.index()), full(scan.full()) {
#pragma unroll
            for (int w = 0; w < kWords; ++w)
                if (w % kWarps == warp_id()) columns[w / kWarps] = scan.columns(w);
        }
    };

    // In the order in which the consumers ask: the query and the first keys, then the keys of a tile before the values of the
    // one before it.
    __device__ void load(const FwdWorkTile& work_tile) {
        kv_head_ = shared_head(work_tile.head, p_.heads, p_.kv_heads);
        auto tiles = scan(work_tile);
        Visit visit;
        int before = SharedStorage::KeyInfo::kNone;
        for (bool has_visit = false;; has_visit = true) {
            const bool is_last = !tiles.next();
            if (has_visit) {
                if (before == SharedStorage::KeyInfo::kNone) load_query(work_tile);
                produce_k(work_tile, visit, is_last);
                if (before != SharedStorage::KeyInfo::kNone) load_values(work_tile, before);
                before = visit.tile;
            }
            if (is_last) break;
            visit = Visit(tiles);
            fetch(work_tile, visit);
        }
        if (before != SharedStorage::KeyInfo::kNone) return load_values(work_tile, before);
        produce_no_k();
        load_query(work_tile);
    }

    __device__ void load_query(const FwdWorkTile& work_tile) {
        if (threadIdx.x == kQueryThread) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(turn_) = work_tile;
            mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename SharedStorage::QueryTile));
            copy_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_, work_tile.s,
                      work_tile.s.first_row + work_tile.first_row, work_tile.head);
        }
        turn_ = turn_ == SharedStorage::kWorkTileStages - 1 ? 0 : turn_ + 1;
        query_pipeline_.advance();
    }

    __device__ void produce_no_k() {
        key_pipeline_.producer_acquire();
        if (threadIdx.x == kKeyThread) smem_.keys[key_pipeline_.stage()].tile = SharedStorage::KeyInfo::kNone;
        mbarrier_arrive(key_pipeline_.full());
        key_pipeline_.advance();
    }

    __device__ bool has_bits() const { return p_.packed_mask.bits != nullptr; }
    __device__ bool is_masked(const Visit& visit) const { return !visit.full && mask_differs_by_row(p_); }

    __device__ __forceinline__ void fetch(const FwdWorkTile& work_tile, Visit& visit) const {
        if constexpr (kBias == BiasKind::kKey) visit.key_bias = key_bias_of_thread(work_tile, visit.tile);
        if (is_masked(visit) && !has_bits()) visit.intervals.fetch(p_, work_tile.s, work_tile.head, visit.tile * kKeys);
    }

    __device__ __forceinline__ void produce_k(const FwdWorkTile& work_tile, const Visit& visit, bool is_last) {
        MaskWords words[kMaskRows];
        if (is_masked(visit) && has_bits()) load_mask(words, work_tile, visit.tile);
        key_pipeline_.producer_acquire();
        auto& info = smem_.keys[key_pipeline_.stage()];
        if (threadIdx.x == kKeyThread) {
            info.tile = visit.tile;
            info.full = visit.full;
            info.last = is_last;
            mbarrier_expect_tx(key_pipeline_.full(), sizeof(typename SharedStorage::KeyTile));
            load_keys(smem_.key[key_pipeline_.stage()], maps_.key, key_pipeline_.full(), work_tile, visit.tile);
        }
        uint32_t not_hidden = ~0u;  // of keys 32 * warp_id() and so on
        if constexpr (kBias == BiasKind::kKey) not_hidden = __ballot_sync(~0u, visit.key_bias != -kInfinity);
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (w % Visit::kWarps == warp_id() && lane_id() == 0)
                info.columns[w] = visit.columns[w / Visit::kWarps] & not_hidden;
        if constexpr (kBias == BiasKind::kKey)
            if (threadIdx.x < kKeys) info.bias[threadIdx.x] = visit.key_bias;
        if (is_masked(visit) && has_bits()) {
#pragma unroll
            for (int i = 0; i < kMaskRows; ++i)
                if (const int row = threadIdx.x + i * kThreads; row < kRows)
                    *reinterpret_cast<MaskWords*>(info.mask[row]) = words[i];
        } else if (is_masked(visit)) {
            visit.intervals.expand(info.mask, work_tile.first_row, 1);
        }
        mbarrier_arrive(key_pipeline_.full());
        key_pipeline_.advance();
    }

    __device__ __forceinline__ void load_values(const FwdWorkTile& work_tile, int tile) {
        if (threadIdx.x == kValueThread) {
            value_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(value_pipeline_.full(), sizeof(typename SharedStorage::KeyTile));
            load_keys(smem_.value[value_pipeline_.stage()], maps_.value, value_pipeline_.full(), work_tile, tile);
        }
        value_pipeline_.advance();
    }

    __device__ __forceinline__ void load_keys(typename SharedStorage::KeyTile& to, const CUtensorMap& map,
                                              uint32_t barrier, const FwdWorkTile& work_tile, int tile) {
        copy_rows(to, map, barrier, p_, work_tile.s, work_tile.s.first_key + tile * kKeys, kv_head_);
    }
    __device__ __forceinline__ float key_bias_of_thread(const FwdWorkTile& work_tile, int tile) const {
        const int key = tile * kKeys + threadIdx.x;
        if (threadIdx.x >= kKeys || key >= work_tile.s.keys) return 0;
        const char* bias = bias_data(p_.bias, score_offset(p_.bias, work_tile.s, work_tile.head, p_.heads));
        return key_bias_of<T>(p_.bias, load_key_bias(p_.bias, bias, key * p_.bias.col_stride));
    }

    // Of a tile, this thread's rows.
    __device__ __forceinline__ void load_mask(MaskWords (&words)[kMaskRows], const FwdWorkTile& work_tile,
                                              int tile) const {
        const uint32_t* bits = mask_words(p_, work_tile.s, work_tile.head) + tile * kWords;
#pragma unroll
        for (int i = 0; i < kMaskRows; ++i) {
            const int row =
                min(work_tile.first_row + static_cast<int>(threadIdx.x) + i * kThreads, work_tile.s.rows - 1);
            words[i] = __ldg(reinterpret_cast<const MaskWords*>(bits + row * p_.packed_mask.bits_row_stride));
        }
    }

    const FwdArgs& p_;
    const FwdSchedule& schedule_;
    const FwdMaps& maps_;
    SharedStorage& smem_;
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    int turn_ = 0, draw_ = 0;
    int kv_head_;  // of the work
};

}  // namespace flash_dmattn::cuda::sm90
