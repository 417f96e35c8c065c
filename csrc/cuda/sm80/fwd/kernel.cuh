// The forward for compute capability 8.0 and up: one block owns a tile of query rows and goes over the keys once.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "mainloop.cuh"

namespace flash_dmattn::cuda::sm80 {

// kCausal: of many rows. Of few, which Traits packs, causality is asked at run time.
template <typename T, BiasKind kBias, bool kCausal, typename Traits>
class FwdKernel : public FwdBlock<T, kBias, Traits> {
    using Block = FwdBlock<T, kBias, Traits>;
    friend Block;

public:
    using Block::kKeyWarps, Block::kWords, Block::kWarpWords;
    using Block::kRows, Block::kKeys, Block::kThreads, Block::kWarpKeys, Block::kMTiles, Block::kNTiles, Block::kAhead;
    using typename Block::KeyTile;
    using typename Block::WorkTile;
    static_assert(kRows <= kThreads && kKeys <= kThreads, "one thread copies one row's mask, or one key's bias");

    using BiasTile = SmemTile<T, kRows, kKeys>;

    struct SharedStorage : Block::SharedStorage {
        // Of the current tile of keys:
        std::conditional_t<kBias == BiasKind::kDense, BiasTile, float[kKeys]> bias;
        alignas(16) uint32_t mask[kRows][kWords];
        uint32_t bias_visible[kWords];  // keys that their bias does not hide
        int row_end[kRows];             // a row sees keys below this by causality and length
    };

    // smem.work has been written.
    __device__ FwdKernel(const FwdArgs& p, const FwdSchedule& schedule, SharedStorage& smem)
        : Block(p, schedule, smem), smem_(smem) {
        if constexpr (kBias == BiasKind::kDense) bias_copy_ = opaque(BiasCopy::lane_address(smem.bias));
        const Sequence& s = smem.work_tile.s;
        const int first_head = smem.work_tile.first_head;
        const int kv_head = shared_head(first_head, p.heads, p.kv_heads), row = KeyCopy::first_row();
        key_ = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head) + row * p.key.row_stride;
        value_ = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head) + row * p.value.row_stride;
        if (kBias != BiasKind::kNone) {
            const int64_t offset = score_offset(p.bias, s, first_head, p.heads);
            bias_ = bias_data(p.bias, offset);
            if (kBias == BiasKind::kDense && !Traits::kPackGqa)
                bias_ += query_row(BiasCopy::first_row()) * p.bias.row_stride * sizeof(T);
        }
        if (mask_by_row() && !has_intervals()) {
            const int mask_row = min(query_row(min(static_cast<int>(threadIdx.x), kRows - 1)), s.rows - 1);
            mask_row_ = mask_words(p, s, first_head) + mask_row * p.packed_mask.bits_row_stride;
        }
    }

    __device__ void run() {
        // The lane's tile of keys before any of its pairs is read.
        const auto summarize = [&](int tile) {
            const WorkTile& work_tile = smem_.work_tile;
            const int low = query_row(0), high = min(query_row(kRows - 1), work_tile.s.rows - 1);
            const MaskSummaries<kRows, kKeys> mask(p_, work_tile.s, work_tile.first_head);
            auto summary = mask.of(low, high, tile);
            summary.full &= (tile + 1) * kKeys <= work_tile.s.keys_of(low, is_causal());
            const int end = work_tile.s.keys_of(high, is_causal()) - tile * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.columns[w] &= bits_below(end, w);
            return summary;
        };
        const int last_row = min(query_row(kRows - 1), sequence().rows - 1);
        const unsigned tiles = ceil_div(sequence().keys_of(last_row, is_causal()), kKeys);
        const unsigned num_splits = static_cast<unsigned>(p_.num_splits), split = smem_.work_tile.split;
        ActiveBlockScan<kKeys, decltype(summarize)> tile(tiles * split / num_splits, tiles * (split + 1) / num_splits,
                                                         summarize);
        for (int row = threadIdx.x; row < kRows; row += kThreads)
            smem_.row_end[row] = query_row(row) < sequence().rows ? sequence().keys_of(query_row(row), is_causal()) : 0;
        this->attend(*this, tile);
    }

private:
    using Block::p_, Block::schedule_, Block::warp_row_, Block::warp_key_, Block::key_copy_;
    using Block::query_row, Block::sequence;
    using typename Block::KeyCopy;
    using BiasCopy = RowCopy<kThreads, BiasTile>;

    __device__ bool is_causal() const { return Traits::kPackGqa ? p_.is_causal : kCausal; }
    __device__ bool has_intervals() const { return p_.interval_summaries.tiles != nullptr; }
    // Else a tile's columns say all that the mask does.
    __device__ bool mask_by_row() const {
        return has_intervals() || (p_.packed_mask.bits != nullptr && p_.packed_mask.bits_row_stride != 0);
    }

    // Keys that no row sees are not read, and neither are their values.
    template <typename Traits>
    __device__ __forceinline__ void load_key(const Traits& tile) {
        load_visible(key_copy_, key_, p_.key.row_stride, tile, [](int) { return ~0u; });
    }
    template <typename Traits>
    __device__ __forceinline__ void load_value(const Traits& tile) {
        load_visible(key_copy_ + sizeof(KeyTile), value_, p_.value.row_stride, tile,
                     [&](int word) { return kBias == BiasKind::kKey ? smem_.bias_visible[word] : ~0u; });
    }
    // from: this thread's first row of the first tile of keys.
    template <typename Traits, typename Visible>
    __device__ __forceinline__ void load_visible(uint32_t to, const T* from, int64_t row_stride, const Traits& tile,
                                                 const Visible& visible) {
        uint32_t bits[kWords];  // the lowest of each is this thread's first row's
#pragma unroll
        for (int w = 0; w < kWords; ++w) bits[w] = (tile.columns(w) & visible(w)) >> KeyCopy::first_row();
        from += tile.index() * kKeys * row_stride;
        KeyCopy::start(to, static_cast<int>(p_.head_dim), [&](int i) {
            const int row = i * KeyCopy::kRowsAtOnce;
            const RowSource<T> source{from, (bits[row / 32] >> row % 32 & 1) != 0};
            from += KeyCopy::kRowsAtOnce * row_stride;
            return source;
        });
    }

    // Starts to fetch what is added to the scores and what hides them.
    template <typename Traits>
    __device__ __forceinline__ void load_pairs(const Traits& tile) {
        if (mask_by_row() && !tile.full()) load_mask(tile.index());
        if constexpr (kBias == BiasKind::kKey) {
            const int key = tile.index() * kKeys + threadIdx.x;
            key_bias_ = 0;
            if (threadIdx.x < kKeys && key < sequence().keys)
                key_bias_ = load_key_bias(p_.bias, bias_, key * p_.bias.col_stride);
        }
        if constexpr (kBias == BiasKind::kDense) load_dense_bias(tile.index() * kKeys);
    }

    __device__ __forceinline__ void load_mask(int tile) {
        if (has_intervals()) {
            BlockIntervals<kThreads, kWords> intervals;
            intervals.fetch(p_, sequence(), smem_.work_tile.first_head, tile * kKeys);
            intervals.expand(smem_.mask, smem_.work_tile.first_row, Traits::kPackGqa ? schedule_.pack : 1);
        } else if (threadIdx.x < kRows) {
            cp_async<kWords * 4>(smem_address(smem_.mask[threadIdx.x]), mask_row_ + tile * kWords);
        }
    }

    __device__ __forceinline__ void load_dense_bias(int first_key) {
        const T* bias = reinterpret_cast<const T*>(bias_) + first_key * p_.bias.col_stride;
        const int64_t row_stride = p_.bias.row_stride;
        // What stands beyond the keys of a sequence is hidden; here the tensor's end matters alone.
        const int keys = static_cast<int>(p_.seqlen_k) - first_key;
        const bool aligned = schedule_.bias_aligned && (keys >= kKeys || keys % 8 == 0);
        if (aligned && !Traits::kPackGqa) {
            const int rows_left = sequence().rows - query_row(BiasCopy::first_row());
            BiasCopy::start(bias_copy_, keys, [&](int i) {
                const RowSource<T> source{bias, i * BiasCopy::kRowsAtOnce < rows_left};
                bias += BiasCopy::kRowsAtOnce * row_stride;
                return source;
            });
        } else if (aligned) {
            BiasCopy::start(bias_copy_, keys, [&](int i) {
                const int row = query_row(BiasCopy::first_row() + i * BiasCopy::kRowsAtOnce);
                return RowSource<T>{bias + row * row_stride, row < sequence().rows};
            });
        } else {
            const int first = Traits::kPackGqa ? 0 : query_row(BiasCopy::first_row());  // that `bias` points to
#pragma unroll 1
            for (int at = threadIdx.x; at < kRows * kKeys; at += kThreads) {
                const int col = at % kKeys, row = query_row(at / kKeys);
                const bool valid = row < sequence().rows && first_key + col < sequence().keys;
                const int64_t offset = (row - first) * row_stride + col * p_.bias.col_stride;
                smem_.bias.at(at / kKeys, col) = valid ? bias[offset] : T(0.f);
            }
        }
    }

    // The key bias travels through a register, whatever its stride and dtype, while the last tile is computed.
    template <typename Traits>
    __device__ void store_pairs(const Traits&) {
        if constexpr (kBias == BiasKind::kKey) {
            if (threadIdx.x >= kKeys) return;
            const float bias = key_bias_of<T>(p_.bias, key_bias_);
            smem_.bias[threadIdx.x] = bias;
            const uint32_t visible = __ballot_sync(~0u, bias != -kInfinity);
            if (lane_id() == 0) smem_.bias_visible[warp_id()] = visible;
        }
    }

    // Calls visit(i, row of the warp, w) for the words of VisibleKeys.
    template <typename Visit>
    static __device__ __forceinline__ void for_each_word(const Visit& visit) {
#pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i)
#pragma unroll
            for (int w = 0; w < kWarpWords; ++w) visit(i, i * 8 + fragment_row(), w);
    }

    // Products to what the softmax sees: scaled, capped, biased, and -inf where invisible.
    template <typename Traits>
    __device__ __forceinline__ void apply_mask_and_bias(float (&scores)[kMTiles][kNTiles][4], const Traits& tile) {
        float scale = schedule_.scale;
        if (kBias == BiasKind::kNone ? !schedule_.raw_scores : schedule_.softcap > 0) {
            scale_and_cap(scores, scale, schedule_.softcap);
            scale = 1;
        }
        bool all_visible = tile.full();
        if constexpr (kBias == BiasKind::kKey) {
            scale_and_add_bias(scores, scale, smem_.bias + warp_key_);
#pragma unroll
            for (int w = 0; w < kWords; ++w) all_visible &= smem_.bias_visible[w] == ~0u;
        }
        if constexpr (kBias == BiasKind::kDense)
            scale_and_add_bias<T, kAhead>(scores, scale, smem_.bias, warp_row_, warp_key_);
        if (all_visible) return;

        uint32_t columns[kWarpWords];  // keys of this warp that some row sees
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            uint32_t keys = tile.columns(word);
            if (kBias == BiasKind::kKey) keys &= smem_.bias_visible[word];
            if (kKeyWarps == 1 || word / kWarpWords == warp_key_ / kWarpKeys) columns[word % kWarpWords] = keys;
        }
        VisibleKeys<kMTiles, kNTiles> visible;
        for_each_word([&](int i, int, int w) { visible[i][w] = columns[w]; });
        const bool masked = mask_by_row() && !tile.full();
        if (!masked && !is_causal()) return apply_mask(scores, visible);  // rows alike: less to compute
        if (masked)
            for_each_word(
                [&](int i, int row, int w) { visible[i][w] &= smem_.mask[warp_row_ + row][warp_key_ / 32 + w]; });
        if (is_causal()) {
            const int first_key = tile.index() * kKeys + warp_key_;
            for_each_word([&](int i, int row, int w) {
                visible[i][w] &= bits_below(smem_.row_end[warp_row_ + row] - first_key, w);
            });
        }
        apply_mask(scores, visible);
    }

    // -inf where the bias of tile number `tile` hides a pair, as apply_mask could not see without a comparison a pair.
    __device__ __forceinline__ void mask_by_bias(float (&scores)[kMTiles][kNTiles][4], int tile) {
        if constexpr (kBias == BiasKind::kDense) {
            const Sequence& s = sequence();
            const T* bias =
                static_cast<const T*>(p_.bias.data) + score_offset(p_.bias, s, smem_.work_tile.first_head, p_.heads);
            const int first_key = tile * kKeys + warp_key_;
            apply_bias_mask<T>(scores, [&](int row, int key) {
                return bias + min(query_row(warp_row_ + row), s.rows - 1) * p_.bias.row_stride +
                       min(first_key + key, s.keys - 1) * p_.bias.col_stride;
            });
        }
    }

    SharedStorage& smem_;
    uint32_t bias_copy_ = 0;
    const T* key_;  // of this thread's first row of the first tile
    const T* value_;
    const char* bias_ = nullptr;          // of a dense bias and rows of one head, of this thread's first row to copy
    const uint32_t* mask_row_ = nullptr;  // of this thread's row
    uint32_t key_bias_ = 0;               // bits of that of this thread's key of the next tile
};

}  // namespace flash_dmattn::cuda::sm80
