// The warp group that loads, of the backward over key lists: the rows of the block, then one tile of keys after the other,
// wherever they lie.
//
// A lane sees to one key of a tile. What it needs is read ahead: the place of the key in the sequence by two tiles; by that,
// what tells which rows see it, and its bias, by one.
#pragma once

#include "../common/scores.cuh"
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
        const char* bias = nullptr;
        if (kBias == BiasKind::kKey) bias = bias_data(p_.bias, pair_offset(p_.bias, work.s, work.head, p_.heads));
        const int head_dim = static_cast<int>(p_.head_dim), warp_key = warp_id() * 32;

        const auto place_of = [&](int tile) { return tile < tiles ? list.key(tile * kKeys + threadIdx.x) : -1; };
        const auto fetch = [&](int tile, int place) {
            Key key{place, {}, 0};
            if (!is_key(place, work.s.keys)) return key;
            key.rows = list.fetch(tile * kKeys + threadIdx.x, place);
            if (kBias == BiasKind::kKey) key.bias = load_key_bias(p_.bias, bias, place * p_.bias.col_stride);
            return key;
        };
        Key key = fetch(0, place_of(0));
        int place = place_of(1);
        for (int tile = 0; tile < tiles; ++tile) {
            const int seen = hand_over(work, list, key);
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

    // This lane's key of a tile, and what memory says of it.
    struct Key {
        int place;  // in the sequence, or none
        uint4 rows;
        uint32_t bias;
    };

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

    // Which rows see the key, and its bias. Gives its place, or -1 where no row sees it: such a key may hold anything.
    __device__ __forceinline__ int hand_over(const GatherBwdWork& work, const KeyList& list, const Key& key) {
        SeeingRows seeing = list.seeing(key.rows, key.place, work.s, p_.is_causal);
        const float bias = kBias == BiasKind::kKey ? key_bias_of<T>(p_.bias, key.bias) : 0;
        if (!is_key(key.place, work.s.keys) || bias == -kInfinity) seeing.end = 0;
        uint32_t words[Smem::kRowWords];
        seeing.of_tile(work.first_row, words);
        const bool is_seen = (words[0] | words[1] | words[2] | words[3]) != 0;
        const int place = is_seen ? key.place : -1;
        key_ring_.wait_empty();
        auto& info = smem_.keys[key_ring_.stage()];
        *reinterpret_cast<uint4*>(info.rows[threadIdx.x]) = {words[0], words[1], words[2], words[3]};
        info.place[threadIdx.x] = place;
        if (kBias == BiasKind::kKey) info.bias[threadIdx.x] = is_seen ? bias * kLog2E : 0;
        return place;
    }

    const BwdArgs& p_;
    const GatherBwdMaps& maps_;
    Smem& smem_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kValueStages> value_ring_;
};

}  // namespace flash_dmattn::cuda::sm90
