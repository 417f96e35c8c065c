// The forward over contiguous keys: one CTA owns an m_block and visits its n_blocks once.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "mainloop.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, BiasKind kBias, typename Traits>
class FwdKernel : public FwdMainloop<T, kBias, Traits> {
    using Mainloop = FwdMainloop<T, kBias, Traits>;
    friend Mainloop;

public:
    using Mainloop::kKeyWarps, Mainloop::kWords, Mainloop::kWarpWords;
    using Mainloop::kRows, Mainloop::kKeys, Mainloop::kThreads, Mainloop::kWarpKeys, Mainloop::kMFragments,
        Mainloop::kNFragments, Mainloop::kAhead;
    using typename Mainloop::KvTile;
    static_assert(kRows <= kThreads && kKeys <= kThreads, "a thread copies one row's mask and one key's bias");

    using BiasTile = SmemTile<T, kRows, kKeys>;

    struct SharedStorage : Mainloop::SharedStorage {
        // The current n_block:
        std::conditional_t<kBias == BiasKind::kDense, BiasTile, float[kKeys]> bias;
        alignas(16) uint32_t mask[kRows][kWords];
        uint32_t visible_by_bias[kWords];  // keys that the key bias leaves visible
        int row_end[kRows];                // keys of the sequence that causality and length leave to a row
    };

    // smem.work_tile has been written.
    __device__ FwdKernel(const FwdArgs& p, const FwdKernelParams& params, SharedStorage& smem)
        : Mainloop(p, params, smem), smem_(smem) {
        if constexpr (kBias == BiasKind::kDense) copy_to_bias_ = opaque(CopyBias::lane_address(smem.bias));
        const Sequence& s = smem.work_tile.sequence;
        const int first_head = smem.work_tile.first_head;
        const int kv_head = shared_head(first_head, p.heads, p.kv_heads), row = CopyKv::first_row();
        key_ = key_rows<const T>(p.key, s, kv_head) + row * p.key.row_stride;
        value_ = key_rows<const T>(p.value, s, kv_head) + row * p.value.row_stride;
        if (kBias != BiasKind::kNone) {
            const int64_t offset = score_offset(p.bias, s, first_head, p.heads);
            bias_ = bias_data(p.bias, offset);
            if (kBias == BiasKind::kDense && !Traits::kPackGqa)
                bias_ += query_row(CopyBias::first_row()) * p.bias.row_stride * sizeof(T);
        }
        if (mask_differs_by_row(p_) && !p_.interval_summaries.present()) {
            const int mask_row = min(query_row(min(static_cast<int>(threadIdx.x), kRows - 1)), s.rows - 1);
            mask_words_ = mask_words(p, s, first_head) + mask_row * p.packed_mask.bits_row_stride;
        }
    }

    __device__ void run() {
        // Causality and length leave the last row the keys below end_of_keys, and all rows those below end_of_full.
        // Computed here: in the lambda they would spill registers. last_row spills more at head dimension 96 where the
        // lambda captures it, so that it computes its own.
        const int last_row = min(query_row(kRows - 1), sequence().rows - 1);
        const int end_of_keys = sequence().keys_of(last_row, p_.is_causal),
                  end_of_full = sequence().keys_of(query_row(0), p_.is_causal);
        // Summary of the n_block that this lane looks ahead to.
        const auto summarize = [&, end_of_keys, end_of_full](int n_block) {
            const FwdWorkTile& work_tile = smem_.work_tile;
            const int high = min(query_row(kRows - 1), work_tile.sequence.rows - 1);
            const MaskSummaries<kRows, kKeys> mask(p_, work_tile.sequence, work_tile.first_head);
            auto summary = mask.of(query_row(0), high, n_block);
            summary.full &= (n_block + 1) * kKeys <= end_of_full;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.visible_keys[w] &= bits_below(end_of_keys - n_block * kKeys, w);
            return summary;
        };
        unsigned first_n_block = 0, num_n_blocks = ceil_div(end_of_keys, kKeys);
        if (p_.visible_distances != nullptr) {
            const VisibleDistances distances(p_, p_.visible_distances, sequence(), smem_.work_tile.first_head);
            const auto keys = distances.keys_of(query_row(0), last_row);
            first_n_block = keys.begin / kKeys;
            num_n_blocks = max(min(static_cast<int>(num_n_blocks), ceil_div(keys.end, kKeys)) - keys.begin / kKeys, 0);
        }
        const unsigned num_splits = static_cast<unsigned>(p_.num_splits), split_idx = smem_.work_tile.split_idx;
        ActiveBlockScan<kKeys, decltype(summarize)> n_block(first_n_block + num_n_blocks * split_idx / num_splits,
                                                            first_n_block + num_n_blocks * (split_idx + 1) / num_splits,
                                                            summarize);
        for (int row = threadIdx.x; row < kRows; row += kThreads)
            smem_.row_end[row] =
                query_row(row) < sequence().rows ? sequence().keys_of(query_row(row), p_.is_causal) : 0;
        this->attend(*this, n_block);
    }

private:
    using Mainloop::p_, Mainloop::params_, Mainloop::warp_row_, Mainloop::warp_key_, Mainloop::copy_to_k_;
    using Mainloop::query_row, Mainloop::sequence;
    using typename Mainloop::CopyKv;
    using CopyBias = RowCopy<kThreads, BiasTile>;

    // K and V of keys that no row sees are not read.
    template <typename NBlock>
    __device__ __forceinline__ void load_k(const NBlock& n_block) {
        load_visible(copy_to_k_, key_, p_.key.row_stride, n_block, [](int) { return ~0u; });
    }
    template <typename NBlock>
    __device__ __forceinline__ void load_v(const NBlock& n_block) {
        load_visible(copy_to_k_ + sizeof(KvTile), value_, p_.value.row_stride, n_block,
                     [&](int word) { return kBias == BiasKind::kKey ? smem_.visible_by_bias[word] : ~0u; });
    }
    // from: this thread's first row of n_block 0.
    template <typename NBlock, typename Visible>
    __device__ __forceinline__ void load_visible(uint32_t to, const T* from, int64_t row_stride, const NBlock& n_block,
                                                 const Visible& visible) {
        uint32_t bits[kWords];  // bit 0 of each is this thread's first row
#pragma unroll
        for (int w = 0; w < kWords; ++w) bits[w] = (n_block.visible_keys(w) & visible(w)) >> CopyKv::first_row();
        from += n_block.index() * kKeys * row_stride;
        CopyKv::start(to, static_cast<int>(p_.head_dim), [&](int i) {
            const int row = i * CopyKv::kRowsAtOnce;
            const RowSource<T> source{from, (bits[row / 32] >> row % 32 & 1) != 0};
            from += CopyKv::kRowsAtOnce * row_stride;
            return source;
        });
    }

    template <typename NBlock>
    __device__ __forceinline__ void load_mask_and_bias(const NBlock& n_block) {
        if (mask_differs_by_row(p_) && !n_block.full()) load_mask(n_block.index());
        if constexpr (kBias == BiasKind::kKey) {
            const int key = n_block.index() * kKeys + threadIdx.x;
            key_bias_ = {};
            if (threadIdx.x < kKeys && key < sequence().keys)
                key_bias_ = load_key_bias(p_.bias, bias_, key * p_.bias.col_stride);
        }
        if constexpr (kBias == BiasKind::kDense) load_dense_bias(n_block.index() * kKeys);
    }

    __device__ __forceinline__ void load_mask(int n_block) {
        if (p_.interval_summaries.present()) {
            BlockIntervals<kThreads, kWords> intervals;
            intervals.fetch(p_, sequence(), smem_.work_tile.first_head, n_block * kKeys);
            intervals.expand(smem_.mask, smem_.work_tile.first_row,
                             Traits::kPackGqa ? params_.scheduler.qheads_per_tile : 1);
        } else if (threadIdx.x < kRows) {
            cp_async<kWords * 4>(smem_address(smem_.mask[threadIdx.x]), mask_words_ + n_block * kWords);
        }
    }

    __device__ __forceinline__ void load_dense_bias(int first_key) {
        const T* bias = reinterpret_cast<const T*>(bias_) + first_key * p_.bias.col_stride;
        const int64_t row_stride = p_.bias.row_stride;
        // Keys beyond the sequence are masked, so only the tensor's end limits the copy.
        const int keys = static_cast<int>(p_.seqlen_k) - first_key;
        const bool aligned = params_.bias_aligned && (keys >= kKeys || keys % 8 == 0);
        if (aligned && !Traits::kPackGqa) {
            const int rows_left = sequence().rows - query_row(CopyBias::first_row());
            CopyBias::start(copy_to_bias_, keys, [&](int i) {
                const RowSource<T> source{bias, i * CopyBias::kRowsAtOnce < rows_left};
                bias += CopyBias::kRowsAtOnce * row_stride;
                return source;
            });
        } else if (aligned) {
            CopyBias::start(copy_to_bias_, keys, [&](int i) {
                const int row = query_row(CopyBias::first_row() + i * CopyBias::kRowsAtOnce);
                return RowSource<T>{bias + row * row_stride, row < sequence().rows};
            });
        } else {
            const int first = Traits::kPackGqa ? 0 : query_row(CopyBias::first_row());  // row that `bias` points to
#pragma unroll 1
            for (int at = threadIdx.x; at < kRows * kKeys; at += kThreads) {
                const int col = at % kKeys, row = query_row(at / kKeys);
                const bool valid = row < sequence().rows && first_key + col < sequence().keys;
                const int64_t offset = (row - first) * row_stride + col * p_.bias.col_stride;
                smem_.bias.at(at / kKeys, col) = valid ? bias[offset] : T(0.f);
            }
        }
    }

    // The key bias passes through a register, since cp.async cannot copy its stride and convert its dtype.
    template <typename NBlock>
    __device__ void store_mask_and_bias(const NBlock&) {
        if constexpr (kBias == BiasKind::kKey) {
            if (threadIdx.x >= kKeys) return;
            const float bias = key_bias_of<T>(p_.bias, key_bias_);
            smem_.bias[threadIdx.x] = bias;
            const uint32_t visible = __ballot_sync(~0u, bias != -kInfinity);
            if (lane_id() == 0) smem_.visible_by_bias[warp_id()] = visible;
        }
    }

    // Calls visit(i, row of the warp, w) for each word of VisibleKeys.
    template <typename Visit>
    static __device__ __forceinline__ void for_each_mask_word(const Visit& visit) {
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i)
#pragma unroll
            for (int w = 0; w < kWarpWords; ++w) visit(i, i * 8 + fragment_row(), w);
    }

    // Q K^T to scores: scaled, capped, biased, -inf where masked.
    template <typename NBlock>
    __device__ __forceinline__ void apply_mask_and_bias(float (&scores)[kMFragments][kNFragments][4],
                                                        const NBlock& n_block) {
        const float scale = this->scale_scores(scores);
        bool all_visible = n_block.full();
        if constexpr (kBias == BiasKind::kKey) {
            scale_and_add_bias(scores, scale, smem_.bias + warp_key_);
#pragma unroll
            for (int w = 0; w < kWords; ++w) all_visible &= smem_.visible_by_bias[w] == ~0u;
        }
        if constexpr (kBias == BiasKind::kDense)
            scale_and_add_bias<T, kAhead>(scores, scale, smem_.bias, warp_row_, warp_key_);
        const int first_key = n_block.index() * kKeys + warp_key_;
        this->add_relative_bias(scores, [&](int n, int e) { return first_key + n * 8 + fragment_col() + e; });
        if (all_visible) return;

        uint32_t visible_keys[kWarpWords];  // keys of this warp that some row sees
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            uint32_t keys = n_block.visible_keys(word);
            if (kBias == BiasKind::kKey) keys &= smem_.visible_by_bias[word];
            if (kKeyWarps == 1 || word / kWarpWords == warp_key_ / kWarpKeys) visible_keys[word % kWarpWords] = keys;
        }
        VisibleKeys<kMFragments, kNFragments> visible;
        for_each_mask_word([&](int i, int, int w) { visible[i][w] = visible_keys[w]; });
        if (mask_differs_by_row(p_) && !n_block.full())
            for_each_mask_word(
                [&](int i, int row, int w) { visible[i][w] &= smem_.mask[warp_row_ + row][warp_key_ / 32 + w]; });
        for_each_mask_word(
            [&](int i, int row, int w) { visible[i][w] &= bits_below(smem_.row_end[warp_row_ + row] - first_key, w); });
        apply_mask(scores, visible);
    }

    __device__ __forceinline__ void mask_by_bias(float (&scores)[kMFragments][kNFragments][4], int n_block) {
        if constexpr (kBias == BiasKind::kDense) {
            const Sequence& s = sequence();
            const T* bias =
                static_cast<const T*>(p_.bias.data) + score_offset(p_.bias, s, smem_.work_tile.first_head, p_.heads);
            const int first_key = n_block * kKeys + warp_key_;
            apply_bias_mask<T>(scores, [&](int row, int key) {
                return bias + min(query_row(warp_row_ + row), s.rows - 1) * p_.bias.row_stride +
                       min(first_key + key, s.keys - 1) * p_.bias.col_stride;
            });
        }
    }

    SharedStorage& smem_;
    uint32_t copy_to_bias_ = 0;  // this thread's address in smem.bias
    const T* key_;               // this thread's first row of n_block 0
    const T* value_;
    const char* bias_ = nullptr;  // of the sequence and head; without pack-GQA a dense bias's first row to copy
    const uint32_t* mask_words_ = nullptr;  // this thread's row of the mask
    KeyBiasBits key_bias_;                  // of this thread's key in the next n_block
};

}  // namespace flash_dmattn::cuda::sm80
