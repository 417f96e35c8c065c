// The warp group that loads, of the forward over key lists: its threads gather the keys, wherever they lie.
//
// Each warp sees to its own part of a tile's keys, a lane to one of them. What a tile needs is read ahead: the places of its
// keys in the sequence by two tiles; by these, what tells which rows see a key, and its bias, by one.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "shared_storage.cuh"
#include "cuda/arch/gather_rows.cuh"
#include "cuda/mask/gathered_key.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdGatherProducer {
public:
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;

    __device__ FwdGatherProducer(const FwdArgs& p, const FwdSchedule& schedule, const FwdMaps& maps,
                                 SharedStorage& smem)
        : p_(p),
          schedule_(schedule),
          maps_(maps),
          smem_(smem),
          query_pipeline_(smem.query_pipeline),
          key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.value_pipeline) {}

    __device__ void run() {
        for (unsigned index = blockIdx.x; index < schedule_.num_work_tiles; index += gridDim.x) {
            FwdWorkTile work_tile(p_, schedule_, index, kRows / schedule_.tile_heads);
            work_tile.head *= schedule_.tile_heads;
            if (!work_tile.empty()) load(work_tile);
        }
        if (threadIdx.x == 0) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(turn_).head = FwdWorkTile::kNone;
            mbarrier_arrive(query_pipeline_.full());
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;
    static constexpr int kWarpKeys = kKeys / 4;
    using KeyTile = typename SharedStorage::KeyTile;
    static_assert(kBias != BiasKind::kDense && SharedStorage::kRows == KeyListsView::kRows &&
                  kKeys % KeyListsView::kAlign == 0);

    __device__ __forceinline__ void load(FwdWorkTile& work_tile) {
        const KeyList list(p_, work_tile.s, work_tile.head, work_tile.first_row);
        work_tile.listed = list.size;
        const int tiles = ceil_div(list.size, kKeys);
        const int kv_head = shared_head(work_tile.head, p_.heads, p_.kv_heads);
        const T* first_key = static_cast<const T*>(p_.key.data) + key_offset(p_.key, work_tile.s, kv_head);
        const T* first_value = static_cast<const T*>(p_.value.data) + key_offset(p_.value, work_tile.s, kv_head);
        const ListReader<T, kBias> reader(p_, work_tile.s, work_tile.head, work_tile.first_row, list,
                                          kRows / schedule_.tile_heads);
        const int lane_key = warp_id() * kWarpKeys + lane_id();
        const auto place_of = [&](int tile) { return lane_id() < kWarpKeys ? list.key(tile * kKeys + lane_key) : -1; };
        const auto fetch = [&](int tile, int place) { return reader.fetch(tile * kKeys + lane_key, place); };
        // In the order in which the consumers ask: the first keys and the query, then the keys of a tile before the values
        // of the one before it.
        GatheredKey key = fetch(0, place_of(0));
        int place = place_of(1), seen = -1;
        for (int tile = 0; tile <= tiles; ++tile) {
            const int seen_before = seen;
            if (tile < tiles) {
                seen = produce_k(reader, key);
                key = fetch(tile + 1, place);
                place = place_of(tile + 2);
                gather(smem_.key[key_pipeline_.stage()], first_key, p_.key.row_stride, seen);
                mbarrier_arrive(key_pipeline_.full());
                cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
                key_pipeline_.advance();
            }
            if (tile == 0) {
                load_query(work_tile);
            } else {
                value_pipeline_.producer_acquire();
                gather(smem_.value[value_pipeline_.stage()], first_value, p_.value.row_stride, seen_before);
                cp_async_mbarrier_arrive_noinc(value_pipeline_.full());
                value_pipeline_.advance();
            }
        }
    }

    __device__ __forceinline__ void load_query(const FwdWorkTile& work_tile) {
        if (threadIdx.x == 0) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(turn_) = work_tile;
            mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename SharedStorage::QueryTile));
            for (int i = 0; i < schedule_.tile_heads; ++i)
                copy_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_, work_tile.s,
                          work_tile.s.first_row + work_tile.first_row, work_tile.head + i, i * kWarpgroupRows);
        }
        turn_ = turn_ == SharedStorage::kWorkTileStages - 1 ? 0 : turn_ + 1;
        query_pipeline_.advance();
    }

    // Which rows see the tile's keys, and their biases. Gives this lane's key, or -1 where no row sees it.
    __device__ __forceinline__ int produce_k(const ListReader<T, kBias>& reader, const GatheredKey& key) {
        uint32_t words[KeyList::kWords];
        float bias;
        const int place = reader.look(key, words, bias);
        if (schedule_.tile_heads > 1) words[2] = words[0], words[3] = words[1];
        key_pipeline_.producer_acquire();
        auto& info = smem_.keys[key_pipeline_.stage()];
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
    SharedStorage& smem_;
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    int turn_ = 0;
};

}  // namespace flash_dmattn::cuda::sm90
