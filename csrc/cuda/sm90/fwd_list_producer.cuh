// The warp group that loads, of the forward over key lists: its threads gather the keys, wherever they lie.
//
// Each warp sees to its own part of a tile's keys, a lane to one of them. What a tile needs is read ahead: the places of its
// keys in the sequence by two tiles; by these, what tells which rows see a key, and its bias, by one.
#pragma once

#include "copy_rows.cuh"
#include "fwd_block.cuh"
#include "gather_rows.cuh"
#include "listed_key.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Tile>
class FwdListProducer {
public:
    using Smem = FwdSmem<T, kBias, Tile>;

    __device__ FwdListProducer(const FwdArgs& p, const FwdSchedule& schedule, const FwdMaps& maps, Smem& smem)
        : p_(p), schedule_(schedule), maps_(maps), smem_(smem), query_ring_(smem.query_ring), key_ring_(smem.key_ring),
          value_ring_(smem.value_ring) {}

    __device__ void run() {
        for (unsigned index = blockIdx.x; index < schedule_.works; index += gridDim.x) {
            FwdWork work(p_, schedule_, index, kRows / schedule_.tile_heads);
            work.head *= schedule_.tile_heads;
            if (!work.empty()) load(work);
        }
        if (threadIdx.x == 0) {
            query_ring_.wait_empty();
            smem_.work(turn_).head = FwdWork::kNone;
            mbarrier_arrive_here(query_ring_.full());
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys;
    static constexpr int kWarpKeys = kKeys / 4;
    using KeyTile = typename Smem::KeyTile;
    static_assert(kBias != BiasKind::kDense && Smem::kRows == KeyListsView::kRows && kKeys % KeyListsView::kAlign == 0);

    __device__ __forceinline__ void load(FwdWork& work) {
        const KeyList list(p_, work.s, work.head, work.first_row);
        work.listed = list.size;
        const int tiles = ceil_div(list.size, kKeys);
        const int kv_head = shared_head(work.head, p_.heads, p_.kv_heads);
        const T* first_key = static_cast<const T*>(p_.key.data) + key_offset(p_.key, work.s, kv_head);
        const T* first_value = static_cast<const T*>(p_.value.data) + key_offset(p_.value, work.s, kv_head);
        const ListReader<T, kBias> reader(p_, work.s, work.head, work.first_row, list, kRows / schedule_.tile_heads);
        const int lane_key = warp_id() * kWarpKeys + lane_id();
        const auto place_of = [&](int tile) { return lane_id() < kWarpKeys ? list.key(tile * kKeys + lane_key) : -1; };
        const auto fetch = [&](int tile, int place) { return reader.fetch(tile * kKeys + lane_key, place); };
        // In the order in which the consumers ask: the first keys and the query, then the keys of a tile before the values
        // of the one before it.
        ListedKey key = fetch(0, place_of(0));
        int place = place_of(1), seen = -1;
        for (int tile = 0; tile <= tiles; ++tile) {
            const int seen_before = seen;
            if (tile < tiles) {
                seen = hand_over_keys(reader, key);
                key = fetch(tile + 1, place);
                place = place_of(tile + 2);
                gather(smem_.key[key_ring_.stage()], first_key, p_.key.row_stride, seen);
                mbarrier_arrive_here(key_ring_.full());
                mbarrier_arrive_when_copied(key_ring_.full());
                key_ring_.advance();
            }
            if (tile == 0) {
                load_query(work);
            } else {
                value_ring_.wait_empty();
                gather(smem_.value[value_ring_.stage()], first_value, p_.value.row_stride, seen_before);
                mbarrier_arrive_when_copied(value_ring_.full());
                value_ring_.advance();
            }
        }
    }

    __device__ __forceinline__ void load_query(const FwdWork& work) {
        if (threadIdx.x == 0) {
            query_ring_.wait_empty();
            smem_.work(turn_) = work;
            mbarrier_arrive_expecting(query_ring_.full(), sizeof(typename Smem::QueryTile));
            for (int i = 0; i < schedule_.tile_heads; ++i)
                copy_rows(smem_.query[query_ring_.stage()], maps_.query, query_ring_.full(), p_, work.s,
                          work.s.first_row + work.first_row, work.head + i, i * kGroupRows);
        }
        turn_ = turn_ == Smem::kWorks - 1 ? 0 : turn_ + 1;
        query_ring_.advance();
    }

    // Which rows see the tile's keys, and their biases. Gives this lane's key, or -1 where no row sees it.
    __device__ __forceinline__ int hand_over_keys(const ListReader<T, kBias>& reader, const ListedKey& key) {
        uint32_t words[KeyList::kWords];
        float bias;
        const int place = reader.look(key, words, bias);
        if (schedule_.tile_heads > 1) words[2] = words[0], words[3] = words[1];
        key_ring_.wait_empty();
        auto& info = smem_.keys[key_ring_.stage()];
        const int at = warp_id() * kWarpKeys + lane_id();
        if (lane_id() < kWarpKeys) {
#pragma unroll
            for (int w = 0; w < kRows / 32; ++w) info.mask[w][at] = words[w];
            if constexpr (kBias == BiasKind::kKey) info.bias[at] = bias;
        }
        return place;
    }

    // The warp's keys of a tile, of K or V; `key` is this lane's.
    __device__ __forceinline__ void gather(KeyTile& to, const T* first_row, int64_t row_stride, int key) const {
        gather_rows<kWarpKeys>(to, warp_id() * kWarpKeys, first_row, row_stride, key, static_cast<int>(p_.head_dim));
    }

    const FwdArgs& p_;
    const FwdSchedule& schedule_;
    const FwdMaps& maps_;
    Smem& smem_;
    Ring<Tile::kQueryStages> query_ring_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kValueStages> value_ring_;
    int turn_ = 0;
};

}  // namespace flash_dmattn::cuda::sm90
