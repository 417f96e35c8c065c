// The warp group that loads, of the backward over key lists: the rows of the block, then one tile of keys after the other,
// wherever they lie.
//
// A lane sees to one key of a tile. What it needs is read ahead: the place of the key in the sequence by two tiles; by that,
// what tells which rows see it, and its bias, by one.
#pragma once

#include "copy_rows.cuh"
#include "gather_bwd_block.cuh"
#include "gather_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
class GatherBwdProducer {
public:
    using T = typename Tile::T;
    using Smem = GatherBwdSmem<Tile>;

    __device__ GatherBwdProducer(const BwdArgs& p, const GatherBwdMaps& maps, Smem& smem)
        : p_(p), maps_(maps), smem_(smem), key_ring_(smem.key_ring), value_ring_(smem.value_ring) {}

    __device__ void run() {
        load_rows();
        const GatherBwdWork& work = smem_.work();
        const KeyList list = smem_.list();
        const int tiles = smem_.tiles;
        const int kv_head = shared_head(work.head, p_.heads, p_.kv_heads);
        const T* keys = static_cast<const T*>(p_.key.data) + key_offset(p_.key, work.s, kv_head);
        const T* values = static_cast<const T*>(p_.value.data) + key_offset(p_.value, work.s, kv_head);
        const ListReader<T, kBias> reader(p_, work.s, work.head, work.first_row, list);
        const int head_dim = static_cast<int>(p_.head_dim), warp_key = warp_id() * 32;

        const auto place_of = [&](int tile) { return tile < tiles ? list.key(tile * kKeys + threadIdx.x) : -1; };
        const auto fetch = [&](int tile, int place) { return reader.fetch(tile * kKeys + threadIdx.x, place); };
        ListedKey key = fetch(0, place_of(0));
        int place = place_of(1);
        for (int tile = 0; tile < tiles; ++tile) {
            const int seen = hand_over(reader, key);
            key = fetch(tile + 1, place);
            place = place_of(tile + 2);
            gather_rows<32>(smem_.key[key_ring_.stage()], warp_key, keys, p_.key.row_stride, seen, head_dim);
            mbarrier_arrive_here(key_ring_.full());
            mbarrier_arrive_when_copied(key_ring_.full());
            key_ring_.advance();
            value_ring_.wait_empty();
            gather_rows<32>(smem_.value[value_ring_.stage()], warp_key, values, p_.value.row_stride, seen, head_dim);
            mbarrier_arrive_when_copied(value_ring_.full());
            value_ring_.advance();
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys;
    static_assert(kRows == 128 && kKeys == 128, "a thread sees to one row and one key");

    __device__ __forceinline__ void load_rows() {
        const GatherBwdWork& work = smem_.work();
        const uint32_t barrier = smem_address(&smem_.rows_full);
        const int row = work.first_row + threadIdx.x;
        const bool exists = row < work.s.rows;
        const auto stat = [&](const RowStatView& view) {
            return exists ? static_cast<const float*>(view.data)[stat_offset(view, work.s, work.head) + row] : 0;
        };
        const float lse = lse_to_log2(stat(p_.lse), exists);
        smem_.lse[threadIdx.x] = lse;
        smem_.delta[threadIdx.x] = lse == kInfinity ? 0 : stat(p_.delta);
        const bool has_empty = __any_sync(~0u, lse == kInfinity);
        if (lane_id() == 0) smem_.has_empty[warp_id()] = has_empty;
        if (threadIdx.x == 0) {
            mbarrier_arrive_expecting(barrier, 2 * sizeof(typename Tile::RowsTile));
            const int tensor_row = work.s.first_row + work.first_row;
            copy_rows(smem_.query, maps_.query, barrier, p_, work.s, tensor_row, work.head);
            copy_rows(smem_.dout, maps_.dout, barrier, p_, work.s, tensor_row, work.head);
        } else {
            mbarrier_arrive_here(barrier);
        }
    }

    // What comes with the key. Gives its place, or -1 where no row sees it.
    __device__ __forceinline__ int hand_over(const ListReader<T, kBias>& reader, const ListedKey& key) {
        uint32_t words[Smem::kRowWords];
        float bias;
        const int place = reader.look(key, words, bias);
        key_ring_.wait_empty();
        smem_.keys[key_ring_.stage()].store(threadIdx.x, place, words, bias);
        return place;
    }

    const BwdArgs& p_;
    const GatherBwdMaps& maps_;
    Smem& smem_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kValueStages> value_ring_;
};

}  // namespace flash_dmattn::cuda::sm90
