// The warp group that loads, of the forward by tiles of neighbouring keys: the copy engine fetches them.
#pragma once

#include "../common/intervals.cuh"
#include "../common/scores.cuh"
#include "../common/tile_scan.cuh"
#include "copy_rows.cuh"
#include "fwd_block.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Tile>
class FwdTileProducer {
public:
    using Smem = FwdSmem<T, kBias, Tile>;

    __device__ FwdTileProducer(const FwdArgs& p, const FwdSchedule& schedule, const FwdMaps& maps, Smem& smem)
        : p_(p), schedule_(schedule), maps_(maps), smem_(smem), query_ring_(smem.query_ring), key_ring_(smem.key_ring),
          value_ring_(smem.value_ring) {}

    __device__ void run() {
        if (threadIdx.x >= kThreads) {
            if constexpr (kBias == BiasKind::kDense) {
                DenseBiases biases(p_, maps_, smem_);
                for_each_work([&](const FwdWork& work) {
                    for (auto tile = scan(work); tile.next();) biases.load(work, tile.index());
                });
            }
            return;
        }
        for_each_work([&](const FwdWork& work) { load(work); });
        if (threadIdx.x == kQueryThread) {
            query_ring_.wait_empty();
            smem_.work(turn_).head = FwdWork::kNone;
            mbarrier_arrive_here(query_ring_.full());
        }
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kWords = Smem::kWords, kThreads = kLoaders<kBias>;
    static constexpr int kMaskRows = ceil_div(kRows, kThreads);  // of a thread that loads a mask
    // Who starts copies, each in a warp of its own: the group's instructions are slow, and so none waits for another's.
    static constexpr int kKeyThread = 0, kValueThread = 32, kQueryThread = 64;
    using MaskWords = typename Smem::MaskWords;
    static_assert(kBias != BiasKind::kKey || kKeys <= kThreads, "a thread loads the bias of one key");

    // A thread that hands over dense biases: they take longest to come, and nothing else waits for their room.
    class DenseBiases {
    public:
        __device__ DenseBiases(const FwdArgs& p, const FwdMaps& maps, Smem& smem) : p_(p), maps_(maps), smem_(smem) {}

        __device__ __forceinline__ void load(const FwdWork& work, int tile) {
            if (lane_id() != 0) return;
            const int head = shared_head(work.head, p_.heads, p_.bias.heads);
            const int batch = shared_batch(p_.bias, work.s), row = work.s.first_row + work.first_row;
            for (int key = tile * kKeys; key < (tile + 1) * kKeys; key += Smem::kBiasKeys, place_.advance())
                for (int group = 0; group < Tile::kConsumers; ++group) {
                    auto& barriers = smem_.bias_rings[group];
                    mbarrier_wait(smem_address(&barriers.empty[place_.stage()]), place_.phase() ^ 1);
                    const uint32_t full = smem_address(&barriers.full[place_.stage()]);
                    mbarrier_arrive_expecting(full, sizeof(typename Smem::BiasTile));
                    copy_box(smem_address(&smem_.bias[group][place_.stage()]), &maps_.bias, full, key,
                             row + group * kGroupRows, head, batch);
                }
        }

    private:
        const FwdArgs& p_;
        const FwdMaps& maps_;
        Smem& smem_;
        RingPlace<Tile::kBiasStages> place_;  // in the rings of all groups
    };

    template <typename Visit>
    __device__ __forceinline__ void for_each_work(const Visit& visit) {
        for (unsigned index = blockIdx.x; index < schedule_.works; index = next_work(index)) {
            const FwdWork work(p_, schedule_, index, kRows);
            if (!work.empty()) visit(work);
        }
    }
    // Where blocks draw their works, the loading warps are told by the first. It writes to two places in turn, since another
    // warp may yet have to read what was drawn last.
    __device__ __forceinline__ unsigned next_work(unsigned index) {
        if (kBias == BiasKind::kDense || schedule_.taken == nullptr) return index + gridDim.x;
        unsigned& drawn = smem_.next_work[draw_];
        draw_ ^= 1;
        if (threadIdx.x == 0) drawn = gridDim.x + atomicAdd(schedule_.taken, 1);
        barrier_sync(Smem::kNextWorkBarrier, kThreads);
        return drawn;
    }

    // Over the tiles of keys of which the work sees any.
    __device__ __forceinline__ auto scan(const FwdWork& work) const {
        const int last_row = min(work.first_row + kRows, work.s.rows) - 1;
        // The lane's tile of keys before any of its pairs is read.
        const auto summarize = [this, &work, last_row](int tile) {
            const Sequence& s = work.s;
            const MaskSummaries<kRows, kKeys> mask(p_, s, work.head);
            auto summary = mask.of(work.first_row, last_row, tile);
            summary.full &= (tile + 1) * kKeys <= s.keys_of(work.first_row, p_.is_causal);
            const int end = s.keys_of(last_row, p_.is_causal) - tile * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.columns[w] &= bits_below(end, w);
            return summary;
        };
        TileSpan span{0, ceil_div(work.s.keys_of(last_row, p_.is_causal), kKeys)};
        if (p_.interval_tiles.tiles != nullptr && span.end > 32) {
            const MaskSummaries<kRows, kKeys> mask(p_, work.s, work.head);
            span = span_of_visited(span.end, {work.first_row, last_row + 1},
                                   [&](int tile) { return mask.rows_of(work.s.rows, tile); });
        }
        return TileScan<kKeys, decltype(summarize)>(span.begin, span.end, summarize);
    }

    // A tile of keys that a work visits.
    struct Visit {
        static constexpr int kWarps = kThreads / 32;

        int tile;
        bool full;  // no pair is hidden
        uint32_t columns[ceil_div(kWords, kWarps)];  // this warp's words
        // What comes from memory through registers: on its way before there is room for it.
        TileIntervals<kThreads, kWords> intervals;
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
    __device__ void load(const FwdWork& work) {
        kv_head_ = shared_head(work.head, p_.heads, p_.kv_heads);
        auto tiles = scan(work);
        Visit visit;
        int before = Smem::KeyInfo::kNone;
        for (bool has_visit = false;; has_visit = true) {
            const bool is_last = !tiles.next();
            if (has_visit) {
                if (before == Smem::KeyInfo::kNone) load_query(work);
                hand_over_keys(work, visit, is_last);
                if (before != Smem::KeyInfo::kNone) load_values(work, before);
                before = visit.tile;
            }
            if (is_last) break;
            visit = Visit(tiles);
            fetch(work, visit);
        }
        if (before != Smem::KeyInfo::kNone) return load_values(work, before);
        hand_over_no_keys();
        load_query(work);
    }

    __device__ void load_query(const FwdWork& work) {
        if (threadIdx.x == kQueryThread) {
            query_ring_.wait_empty();
            smem_.work(turn_) = work;
            mbarrier_arrive_expecting(query_ring_.full(), sizeof(typename Smem::QueryTile));
            copy_rows(smem_.query[query_ring_.stage()], maps_.query, query_ring_.full(), p_, work.s,
                      work.s.first_row + work.first_row, work.head);
        }
        turn_ = turn_ == Smem::kWorks - 1 ? 0 : turn_ + 1;
        query_ring_.advance();
    }

    __device__ void hand_over_no_keys() {
        key_ring_.wait_empty();
        if (threadIdx.x == kKeyThread) smem_.keys[key_ring_.stage()].tile = Smem::KeyInfo::kNone;
        mbarrier_arrive_here(key_ring_.full());
        key_ring_.advance();
    }

    __device__ bool has_bits() const { return p_.packed_mask.bits != nullptr; }
    __device__ bool is_masked(const Visit& visit) const { return !visit.full && mask_differs_by_row(p_); }

    __device__ __forceinline__ void fetch(const FwdWork& work, Visit& visit) const {
        if constexpr (kBias == BiasKind::kKey) visit.key_bias = key_bias_of_thread(work, visit.tile);
        if (is_masked(visit) && !has_bits()) visit.intervals.fetch(p_, work.s, work.head, visit.tile * kKeys);
    }

    __device__ __forceinline__ void hand_over_keys(const FwdWork& work, const Visit& visit, bool is_last) {
        MaskWords words[kMaskRows];
        if (is_masked(visit) && has_bits()) load_mask(words, work, visit.tile);
        key_ring_.wait_empty();
        auto& info = smem_.keys[key_ring_.stage()];
        if (threadIdx.x == kKeyThread) {
            info.tile = visit.tile;
            info.full = visit.full;
            info.last = is_last;
            mbarrier_expect(key_ring_.full(), sizeof(typename Smem::KeyTile));
            load_keys(smem_.key[key_ring_.stage()], maps_.key, key_ring_.full(), work, visit.tile);
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
            visit.intervals.expand(info.mask, work.first_row, 1);
        }
        mbarrier_arrive_here(key_ring_.full());
        key_ring_.advance();
    }

    __device__ __forceinline__ void load_values(const FwdWork& work, int tile) {
        if (threadIdx.x == kValueThread) {
            value_ring_.wait_empty();
            mbarrier_arrive_expecting(value_ring_.full(), sizeof(typename Smem::KeyTile));
            load_keys(smem_.value[value_ring_.stage()], maps_.value, value_ring_.full(), work, tile);
        }
        value_ring_.advance();
    }

    __device__ __forceinline__ void load_keys(typename Smem::KeyTile& to, const CUtensorMap& map, uint32_t barrier,
                                              const FwdWork& work, int tile) {
        copy_rows(to, map, barrier, p_, work.s, work.s.first_key + tile * kKeys, kv_head_);
    }
    __device__ __forceinline__ float key_bias_of_thread(const FwdWork& work, int tile) const {
        const int key = tile * kKeys + threadIdx.x;
        if (threadIdx.x >= kKeys || key >= work.s.keys) return 0;
        const char* bias = bias_data(p_.bias, pair_offset(p_.bias, work.s, work.head, p_.heads));
        return key_bias_of<T>(p_.bias, load_key_bias(p_.bias, bias, key * p_.bias.col_stride));
    }

    // Of a tile, this thread's rows.
    __device__ __forceinline__ void load_mask(MaskWords (&words)[kMaskRows], const FwdWork& work, int tile) const {
        const uint32_t* bits = mask_words(p_, work.s, work.head) + tile * kWords;
#pragma unroll
        for (int i = 0; i < kMaskRows; ++i) {
            const int row = min(work.first_row + static_cast<int>(threadIdx.x) + i * kThreads, work.s.rows - 1);
            words[i] = __ldg(reinterpret_cast<const MaskWords*>(bits + row * p_.packed_mask.bits_row_stride));
        }
    }

    const FwdArgs& p_;
    const FwdSchedule& schedule_;
    const FwdMaps& maps_;
    Smem& smem_;
    Ring<Tile::kQueryStages> query_ring_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kValueStages> value_ring_;
    int turn_ = 0, draw_ = 0;
    int kv_head_;  // of the work
};

}  // namespace flash_dmattn::cuda::sm90
