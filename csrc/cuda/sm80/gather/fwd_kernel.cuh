// The forward over key lists: a block owns a tile of query rows and gathers the keys of its list, wherever they lie.
//
// A tile's keys are fetched in three steps, each while another tile is computed: their places in the sequence, then by
// these K and what tells which rows see them, then V.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/mask/key_list.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/sm80/fwd/mainloop.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, BiasKind kBias, typename Traits>
class GatherFwdKernel : public FwdBlock<T, kBias, Traits> {
    using Block = FwdBlock<T, kBias, Traits>;
    friend Block;

public:
    using Block::kKeys, Block::kMTiles, Block::kNTiles, Block::kRows, Block::kThreads, Block::kWarpKeys;
    using Block::kWarpRows, Block::kWarpWords, Block::kWords;
    using typename Block::KeyTile;
    static constexpr int kRowWarps = Traits::kRowWarps;
    static_assert(kKeys <= kThreads, "one thread sees to one key");
    static_assert(kWarpRows <= 32, "a word holds which of a warp's rows see a key");
    static_assert(KeyListsView::kRows % kRows == 0, "a block's rows lie in one tile of lists");  // see plan_fwd

    // Query rows that a warp's rows belong to.
    struct WarpRows {
        int first;
        uint32_t all;  // bit i: there is a row first + i
    };

    struct SharedStorage : Block::SharedStorage {
        KeyList list;
        WarpRows warp_rows[kRowWarps];
        // Of the sequence and head.
        const T* first_key;
        const T* first_value;
        const char* first_bias;
        int keys[2]
                [kKeys];  // of the current tile and the next, in turn: places in the sequence, -1 where there is none
        // Of the current tile:
        alignas(16) float bias[kKeys];
        alignas(16) uint32_t rows[kRowWarps][kKeys];  // bit i: row warp_rows.first + i sees the key
        uint4 fetched[kKeys];                         // what `rows` is made of
        int seen[kKeys];                              // as `keys`, -1 also where no row of the block sees the key
        uint32_t seen_by_all[kWords];
    };

    // smem.work has been written.
    __device__ GatherFwdKernel(const FwdArgs& p, const FwdSchedule& schedule, SharedStorage& smem)
        : Block(p, schedule, smem), smem_(smem) {
        if (threadIdx.x == 0) {
            const Sequence& s = sequence();
            const int head = smem.work_tile.first_head, kv_head = shared_head(head, p.heads, p.kv_heads);
            smem.list = KeyList(p, s, head, query_row(0));
            smem.first_key = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head);
            smem.first_value = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head);
            if (kBias != BiasKind::kNone) smem.first_bias = bias_data(p.bias, score_offset(p.bias, s, head, p.heads));
        }
        if (threadIdx.x < kRowWarps) {
            const int row = threadIdx.x * kWarpRows, first = query_row(row);
            const int end = min(query_row(row + kWarpRows - 1) + 1, sequence().rows);
            smem.warp_rows[threadIdx.x] = {first, bits_below(end - first, 0)};
        }
        const int first = query_row(warp_row_);
#pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i)
            row_bits_ |= (query_row(warp_row_ + i * 8 + fragment_row()) - first) << i * 8;
    }

    __device__ void run() {
        __syncthreads();
        const unsigned tiles = ceil_div(smem_.list.size, kKeys);
        const unsigned splits = static_cast<unsigned>(p_.num_splits), split = smem_.work_tile.split;
        const int begin = static_cast<int>(tiles * split / splits),
                  end = static_cast<int>(tiles * (split + 1) / splits);
        fetch_keys(begin);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        ListTiles tile{begin - 1, end};
        this->attend(*this, tile);
    }

private:
    using Block::key_copy_, Block::p_, Block::query_row, Block::schedule_, Block::sequence, Block::warp_key_;
    using Block::warp_row_;
    using typename Block::KeyCopy;

    struct ListTiles {
        int current;
        int end;
        __device__ __forceinline__ bool next() { return ++current < end; }
        __device__ __forceinline__ int index() const { return current; }
    };

    __device__ __forceinline__ int* keys_of(int tile) { return smem_.keys[tile % 2]; }

    __device__ __forceinline__ void fetch_keys(int tile) {
        if (threadIdx.x < kKeys) smem_.list.fetch_key(keys_of(tile)[threadIdx.x], tile * kKeys + threadIdx.x);
    }
    __device__ __forceinline__ void load_key(const ListTiles& tile) {
        load_rows(key_copy_, smem_.first_key, p_.key.row_stride, keys_of(tile.current));
    }
    __device__ __forceinline__ void load_value(const ListTiles&) {
        load_rows(key_copy_ + sizeof(KeyTile), smem_.first_value, p_.value.row_stride, smem_.seen);
    }
    __device__ __forceinline__ void load_rows(uint32_t to, const T* rows, int64_t row_stride, const int* keys) {
        // Counted in pieces of 16 bytes, of which the strides are multiples: one 32-bit product a row.
        const uint4* pieces = reinterpret_cast<const uint4*>(rows);
        const uint32_t stride = static_cast<uint32_t>(row_stride / KeyTile::kChunk);
        // Read at once, since reads do not overtake the copies.
        const int sequence_keys = sequence().keys;
        int places[KeyCopy::kSteps];
#pragma unroll
        for (int i = 0; i < KeyCopy::kSteps; ++i) places[i] = keys[KeyCopy::first_row() + i * KeyCopy::kRowsAtOnce];
        KeyCopy::start(to, static_cast<int>(p_.head_dim), [&](int i) {
            const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(places[i])) * stride;
            return RowSource<T>{reinterpret_cast<const T*>(pieces + offset), is_key(places[i], sequence_keys)};
        });
    }

    __device__ __forceinline__ void load_pairs(const ListTiles& tile) {
        if (threadIdx.x >= kKeys) return;
        const int key = keys_of(tile.current)[threadIdx.x];
        if (is_key(key, sequence().keys)) {
            smem_.list.fetch(smem_.fetched[threadIdx.x], tile.current * kKeys + threadIdx.x, key);
            if constexpr (kBias == BiasKind::kKey)
                key_bias_ = load_key_bias(p_.bias, smem_.first_bias, key * p_.bias.col_stride);
        }
        fetch_keys(tile.current + 1);
    }
    // Which rows see the tile's keys, and the bias: from what this thread has fetched.
    __device__ __forceinline__ void store_pairs(const ListTiles& tile) {
        cp_async_wait<0>();
        if (threadIdx.x >= kKeys) return;
        const int key = keys_of(tile.current)[threadIdx.x];
        SeeingRows seeing = smem_.list.seeing(smem_.fetched[threadIdx.x], key, sequence(), p_.is_causal);
        if (!is_key(key, sequence().keys)) seeing.end = 0;
        if constexpr (kBias == BiasKind::kKey) {
            const float bias = key_bias_of<T>(p_.bias, key_bias_);
            smem_.bias[threadIdx.x] = bias;
            if (bias == -kInfinity) seeing.end = 0;
        }
        bool some = false, all = true;
#pragma unroll
        for (int warp = 0; warp < kRowWarps; ++warp) {
            const WarpRows& rows = smem_.warp_rows[warp];
            const uint32_t seen = seeing.from(rows.first) & rows.all;
            smem_.rows[warp][threadIdx.x] = seen;
            some |= seen != 0;
            all &= seen == rows.all;
        }
        smem_.seen[threadIdx.x] = some ? key : -1;
        const uint32_t seen_by_all = __ballot_sync(~0u, all);
        if (lane_id() == 0) smem_.seen_by_all[warp_id()] = seen_by_all;
    }

    // Products to what the softmax sees: scaled, capped, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_mask_and_bias(float (&scores)[kMTiles][kNTiles][4], const ListTiles& tile) {
        float scale = schedule_.scale;
        if (kBias == BiasKind::kNone ? !schedule_.raw_scores : schedule_.softcap > 0) {
            scale_and_cap(scores, scale, schedule_.softcap);
            scale = 1;
        }
        if constexpr (kBias == BiasKind::kKey) scale_and_add_bias(scores, scale, smem_.bias + warp_key_);
        if constexpr (kBias == BiasKind::kDense) add_dense_bias(scores, scale, keys_of(tile.current) + warp_key_);

        bool all_visible = true;
#pragma unroll
        for (int w = 0; w < kWarpWords; ++w) all_visible &= smem_.seen_by_all[warp_key_ / 32 + w] == ~0u;
        if (all_visible) return;
        uint32_t row_bits[kMTiles * 2];
#pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i) row_bits[i] = 1u << (row_bits_ >> i * 8 & 31);
        apply_mask(scores, smem_.rows[warp_row_ / kWarpRows] + warp_key_, row_bits);
    }

    // Straight from global memory; pairs beyond the rows or without a key are hidden afterwards.
    __device__ __forceinline__ void add_dense_bias(float (&scores)[kMTiles][kNTiles][4], float scale, const int* keys) {
#pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i) {
            const int row = min(query_row(warp_row_ + i * 8 + fragment_row()), sequence().rows - 1);
            const T* bias = reinterpret_cast<const T*>(smem_.first_bias) + row * p_.bias.row_stride;
#pragma unroll
            for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int key = keys[n * 8 + fragment_col() + e];
                    float& x = scores[i / 2][n][i % 2 * 2 + e];
                    x = fmaf(x, scale,
                             to_float(__ldg(bias + (is_key(key, sequence().keys) ? key : 0) * p_.bias.col_stride)));
                }
        }
    }

    // -inf where the bias of tile number `tile` hides a pair. The tile's keys have left shared memory.
    __device__ __forceinline__ void mask_by_bias(float (&scores)[kMTiles][kNTiles][4], int tile) {
        if constexpr (kBias == BiasKind::kDense)
            apply_bias_mask<T>(scores, [&](int row, int at) {
                const int key = smem_.list.key(tile * kKeys + warp_key_ + at);
                return reinterpret_cast<const T*>(smem_.first_bias) +
                       min(query_row(warp_row_ + row), sequence().rows - 1) * p_.bias.row_stride +
                       (is_key(key, sequence().keys) ? key : 0) * p_.bias.col_stride;
            });
    }

    SharedStorage& smem_;
    uint32_t row_bits_ = 0;  // of this lane's rows, counted from warp_rows.first; a byte each
    uint32_t key_bias_ = 0;  // bits of the bias of this thread's key of the next tile
};

}  // namespace flash_dmattn::cuda::sm80
