// The warp group that loads, of the backward over key lists that heads share: one tile of keys after the other, wherever they
// lie, and with each the rows of every head.
//
// A lane sees to one key of a tile; of 64 keys two lanes see to the same. What it needs is read ahead, as in
// gather_bwd_producer.cuh.
#pragma once

#include "copy_rows.cuh"
#include "gather_group_block.cuh"
#include "gather_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
class GatherGroupProducer {
public:
    using T = typename Tile::T;
    using Smem = GatherGroupSmem<Tile>;

    __device__ GatherGroupProducer(const BwdArgs& p, const GatherBwdMaps& maps, Smem& smem)
        : p_(p), maps_(maps), smem_(smem), key_ring_(smem.key_ring), value_ring_(smem.value_ring),
          query_ring_(smem.query_ring), dout_ring_(smem.dout_ring) {}

    __device__ void run() {
        const GatherGroupWork& work = smem_.work();
        const KeyList& list = smem_.list();
        const int first = smem_.first_tile, end = smem_.end_tile, visits = work.visits<kRows>();
        if (first == end) return;
        const int kv_head = work.head / work.group;
        const T* keys = static_cast<const T*>(p_.key.data) + key_offset(p_.key, work.s, kv_head);
        const T* values = static_cast<const T*>(p_.value.data) + key_offset(p_.value, work.s, kv_head);
        const ListReader<T, kBias> reader(p_, work.s, work.head, work.first_row, list);
        const int head_dim = static_cast<int>(p_.head_dim), warp_key = warp_id() * kWarpKeys;
        const int lane_key = kWarpKeys == 32 ? threadIdx.x : warp_key + threadIdx.x % kWarpKeys;

        const auto place_of = [&](int tile) { return tile < end ? list.key(tile * kKeys + lane_key) : -1; };
        const auto fetch = [&](int tile, int place) { return reader.fetch(tile * kKeys + lane_key, place); };
        ListedKey key = fetch(first, place_of(first));
        int place = place_of(first + 1);
        for (int tile = first; tile < end; ++tile) {
            load_rows(work, 0);
            uint32_t words[KeyList::kWords];
            float bias;
            const int seen = reader.look(key, words, bias);
            value_ring_.wait_empty();
            gather_rows<kWarpKeys>(smem_.value, warp_key, values, p_.value.row_stride, seen, head_dim);
            mbarrier_arrive_when_copied(value_ring_.full());
            value_ring_.advance();
            key_ring_.wait_empty();
            if (threadIdx.x % 32 < kWarpKeys) smem_.keys.store(lane_key, seen, words, bias);
            mbarrier_arrive_here(key_ring_.full());
            gather_rows<kWarpKeys>(smem_.key, warp_key, keys, p_.key.row_stride, seen, head_dim);
            mbarrier_arrive_when_copied(key_ring_.full());
            key_ring_.advance();
            key = fetch(tile + 1, place);
            place = place_of(tile + 2);
            for (int visit = 1; visit < visits; ++visit) load_rows(work, visit);
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kWarpKeys = kKeys / 4;
    static_assert(kRows <= 128 && kWarpKeys <= 32, "a thread sees to one row and one key");
    static constexpr int kQueryThread = 64, kDoutThread = 96;  // of two warps: neither waits for the other's copies

    __device__ __forceinline__ void load_rows(const GatherGroupWork& work, int visit) {
        const int head = work.head_of<kRows>(visit), first = work.first_row + work.row_of<kRows>(visit);
        const int row = first + threadIdx.x;
        float lse = 0, delta = 0;
        bool is_empty = false;
        if (threadIdx.x < kRows) {
            const bool exists = row < work.s.rows;
            const auto stat = [&](const RowStatView& view) {
                return exists ? static_cast<const float*>(view.data)[stat_offset(view, work.s, head) + row] : 0;
            };
            delta = stat(p_.delta);
            lse = lse_to_log2(stat(p_.lse), exists);
            is_empty = lse == kInfinity;
            if (is_empty) delta = 0;
        }
        const int tensor_row = work.s.first_row + first;
        query_ring_.wait_empty();
        if (threadIdx.x == kQueryThread) {
            mbarrier_expect(query_ring_.full(), sizeof(typename Tile::RowsTile));
            copy_rows(smem_.query[query_ring_.stage()], maps_.query, query_ring_.full(), p_, work.s, tensor_row, head);
        }
        if (threadIdx.x == kDoutThread) {
            dout_ring_.wait_empty();
            mbarrier_arrive_expecting(dout_ring_.full(), sizeof(typename Tile::RowsTile));
            copy_rows(smem_.dout[dout_ring_.stage()], maps_.dout, dout_ring_.full(), p_, work.s, tensor_row, head);
        }
        auto& info = smem_.rows[query_ring_.stage()];
        if (threadIdx.x < kRows) {
            info.lse[threadIdx.x] = lse;
            info.delta[threadIdx.x] = delta;
        }
        const bool has_empty = __any_sync(~0u, is_empty);
        if (lane_id() == 0 && warp_id() < kRows / 32) info.has_empty[warp_id()] = has_empty;
        mbarrier_arrive_here(query_ring_.full());
        query_ring_.advance();
        dout_ring_.advance();
    }

    const BwdArgs& p_;
    const GatherBwdMaps& maps_;
    Smem& smem_;
    Ring<1> key_ring_, value_ring_;
    Ring<Tile::kStages> query_ring_, dout_ring_;
};

}  // namespace flash_dmattn::cuda::sm90
