// The forward over key lists: one CTA owns an m_block and gathers the keys of its list.
//
// An n_block is fetched in three steps, each while another n_block is computed: the keys' positions in the sequence,
// then K with the bias and the rows that see each key, then V.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/mask/gathered_key.cuh"
#include "cuda/sm80/fwd/mainloop.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, BiasKind kBias, typename Traits>
class GatherFwdKernel : public FwdMainloop<T, kBias, Traits> {
    using Mainloop = FwdMainloop<T, kBias, Traits>;
    friend Mainloop;

public:
    using Mainloop::kKeys, Mainloop::kMFragments, Mainloop::kNFragments, Mainloop::kRows, Mainloop::kThreads;
    using Mainloop::kWarpRows, Mainloop::kWarpWords, Mainloop::kWords;
    using typename Mainloop::KvTile;
    static constexpr int kRowWarps = Traits::kRowWarps;
    static_assert(kKeys <= kThreads, "a thread fetches one key");
    static_assert(kWarpRows <= 32, "a word holds which of a warp's rows see a key");
    static_assert(KeyListsView::kRows % kRows == 0, "an m_block uses one list");  // see plan_fwd

    // Query rows of a warp's part of the m_block.
    struct WarpRows {
        int first;
        uint32_t all;  // bit i: row first + i exists
    };

    struct SharedStorage : Mainloop::SharedStorage {
        KeyList list;
        int num_n_blocks;  // of the list
        WarpRows warp_rows[kRowWarps];
        // The sequence and head:
        const T* first_key;
        const T* first_value;
        const char* first_bias;
        int positions[2][kKeys];  // of the current n_block and the next, in the sequence; -1 for none
        // The current n_block:
        alignas(16) float bias[kKeys];
        alignas(16) uint32_t rows[kRowWarps][kKeys];  // bit i: row warp_rows.first + i sees the key
        uint4 visibility_data[kKeys];                 // intervals or bits, from which `rows` is computed
        int visible_positions[kKeys];                 // -1 also where no row of the m_block sees the key
        uint32_t seen_by_all[kWords];
    };

    // smem.work_tile has been written.
    __device__ GatherFwdKernel(const FwdArgs& p, const FwdKernelParams& params, SharedStorage& smem)
        : Mainloop(p, params, smem), smem_(smem) {
        if (threadIdx.x == 0) {
            const Sequence& s = sequence();
            const int head = smem.work_tile.first_head, kv_head = shared_head(head, p.heads, p.kv_heads);
            smem.list = KeyList(p, s, head, query_row(0));
            smem.num_n_blocks = smem.list.template count_n_blocks<kKeys>(p, s, query_row(kRows - 1) + 1);
            smem.first_key = key_rows<const T>(p.key, s, kv_head);
            smem.first_value = key_rows<const T>(p.value, s, kv_head);
            if (kBias == BiasKind::kKey) smem.first_bias = list_bias_data(p, s, head, smem.list);
            if (kBias == BiasKind::kDense) smem.first_bias = bias_data(p.bias, score_offset(p.bias, s, head, p.heads));
        }
        if (threadIdx.x < kRowWarps) {
            const int row = threadIdx.x * kWarpRows, first = query_row(row);
            const int end = min(query_row(row + kWarpRows - 1) + 1, sequence().rows);
            smem.warp_rows[threadIdx.x] = {first, bits_below(end - first, 0)};
        }
        const int first = query_row(warp_row_);
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i)
            row_shifts_ |= (query_row(warp_row_ + i * 8 + fragment_row()) - first) << i * 8;
    }

    __device__ void run() {
        __syncthreads();
        const unsigned num_n_blocks = smem_.num_n_blocks;
        const unsigned num_splits = static_cast<unsigned>(p_.num_splits), split_idx = smem_.work_tile.split_idx;
        const int begin = static_cast<int>(num_n_blocks * split_idx / num_splits),
                  end = static_cast<int>(num_n_blocks * (split_idx + 1) / num_splits);
        fetch_positions(begin);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        ListBlockScan n_block{begin - 1, end};
        this->attend(*this, n_block);
    }

private:
    using Mainloop::copy_to_k_, Mainloop::p_, Mainloop::query_row, Mainloop::sequence, Mainloop::warp_key_;
    using Mainloop::warp_row_;
    using typename Mainloop::CopyKv;

    struct ListBlockScan {
        int current;
        int end;
        __device__ __forceinline__ bool next() { return ++current < end; }
        __device__ __forceinline__ int index() const { return current; }
    };

    __device__ __forceinline__ int* positions_of(int n_block) { return smem_.positions[n_block % 2]; }

    __device__ __forceinline__ void fetch_positions(int n_block) {
        if (threadIdx.x < kKeys)
            smem_.list.fetch_key(positions_of(n_block)[threadIdx.x], n_block * kKeys + threadIdx.x);
    }
    __device__ __forceinline__ void load_k(const ListBlockScan& n_block) {
        gather_tile(copy_to_k_, smem_.first_key, p_.key.row_stride, positions_of(n_block.current));
    }
    __device__ __forceinline__ void load_v(const ListBlockScan&) {
        gather_tile(copy_to_k_ + sizeof(KvTile), smem_.first_value, p_.value.row_stride, smem_.visible_positions);
    }
    __device__ __forceinline__ void gather_tile(uint32_t to, const T* rows, int64_t row_stride, const int* positions) {
        // Strides are multiples of 16 bytes; in units of 16 bytes an offset takes one 32-bit multiplication.
        const uint4* chunks = reinterpret_cast<const uint4*>(rows);
        const uint32_t stride = static_cast<uint32_t>(row_stride / KvTile::kChunk);
        // Reads all positions before the first copy, since reads do not overtake copies.
        const int sequence_keys = sequence().keys;
        int gathered[CopyKv::kSteps];
#pragma unroll
        for (int i = 0; i < CopyKv::kSteps; ++i) gathered[i] = positions[CopyKv::first_row() + i * CopyKv::kRowsAtOnce];
        CopyKv::start(to, static_cast<int>(p_.head_dim), [&](int i) {
            const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(gathered[i])) * stride;
            return RowSource<T>{reinterpret_cast<const T*>(chunks + offset), is_key(gathered[i], sequence_keys)};
        });
    }

    __device__ __forceinline__ void load_mask_and_bias(const ListBlockScan& n_block) {
        if (threadIdx.x >= kKeys) return;
        const int key = positions_of(n_block.current)[threadIdx.x];
        if (is_key(key, sequence().keys)) {
            smem_.list.fetch(smem_.visibility_data[threadIdx.x], n_block.current * kKeys + threadIdx.x, key);
            if constexpr (kBias == BiasKind::kKey)
                key_bias_ = load_list_bias(p_, smem_.first_bias, n_block.current * kKeys + threadIdx.x, key);
        }
        fetch_positions(n_block.current + 1);
    }
    // Computes from what this thread has fetched which rows see its key, and the key's bias.
    __device__ __forceinline__ void store_mask_and_bias(const ListBlockScan& n_block) {
        cp_async_wait<0>();
        if (threadIdx.x >= kKeys) return;
        const int key = positions_of(n_block.current)[threadIdx.x];
        VisibleRows visible_rows =
            smem_.list.visible_rows(smem_.visibility_data[threadIdx.x], key, sequence(), p_.is_causal);
        if (!is_key(key, sequence().keys)) visible_rows.end = 0;
        if constexpr (kBias == BiasKind::kKey) {
            const float bias = key_bias_of<T>(p_.bias, key_bias_);
            smem_.bias[threadIdx.x] = bias;
            if (bias == -kInfinity) visible_rows.end = 0;
        }
        bool some = false, all = true;
#pragma unroll
        for (int warp = 0; warp < kRowWarps; ++warp) {
            const WarpRows& rows = smem_.warp_rows[warp];
            const uint32_t row_bits = visible_rows.from(rows.first) & rows.all;
            smem_.rows[warp][threadIdx.x] = row_bits;
            some |= row_bits != 0;
            all &= row_bits == rows.all;
        }
        smem_.visible_positions[threadIdx.x] = some ? key : -1;
        const uint32_t seen_by_all = __ballot_sync(~0u, all);
        if (lane_id() == 0) smem_.seen_by_all[warp_id()] = seen_by_all;
    }

    // Q K^T to scores: scaled, capped, biased, -inf where masked.
    __device__ __forceinline__ void apply_mask_and_bias(float (&scores)[kMFragments][kNFragments][4],
                                                        const ListBlockScan& n_block) {
        const float scale = this->scale_scores(scores);
        if constexpr (kBias == BiasKind::kKey) scale_and_add_bias(scores, scale, smem_.bias + warp_key_);
        if constexpr (kBias == BiasKind::kDense)
            add_dense_bias(scores, scale, positions_of(n_block.current) + warp_key_);
        const int* positions = positions_of(n_block.current) + warp_key_ + fragment_col();
        this->add_relative_bias(scores, [&](int n, int e) { return positions[n * 8 + e]; });

        bool all_visible = true;
#pragma unroll
        for (int w = 0; w < kWarpWords; ++w) all_visible &= smem_.seen_by_all[warp_key_ / 32 + w] == ~0u;
        if (all_visible) return;
        uint32_t row_bits[kMFragments * 2];
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i) row_bits[i] = 1u << (row_shifts_ >> i * 8 & 31);
        apply_mask(scores, smem_.rows[warp_row_ / kWarpRows] + warp_key_, row_bits);
    }

    // Reads global memory. Rows and keys that do not exist are masked.
    __device__ __forceinline__ void add_dense_bias(float (&scores)[kMFragments][kNFragments][4], float scale,
                                                   const int* positions) {
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i) {
            const int row = min(query_row(warp_row_ + i * 8 + fragment_row()), sequence().rows - 1);
            const T* bias = reinterpret_cast<const T*>(smem_.first_bias) + row * p_.bias.row_stride;
#pragma unroll
            for (int n = 0; n < kNFragments; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int key = positions[n * 8 + fragment_col() + e];
                    float& x = scores[i / 2][n][i % 2 * 2 + e];
                    x = fmaf(x, scale,
                             to_float(__ldg(bias + (is_key(key, sequence().keys) ? key : 0) * p_.bias.col_stride)));
                }
        }
    }

    // Reads the list again: the n_block's positions have left shared memory.
    __device__ __forceinline__ void mask_by_bias(float (&scores)[kMFragments][kNFragments][4], int n_block) {
        if constexpr (kBias == BiasKind::kDense)
            apply_bias_mask<T>(scores, [&](int row, int at) {
                const int key = smem_.list.key(n_block * kKeys + warp_key_ + at);
                return reinterpret_cast<const T*>(smem_.first_bias) +
                       min(query_row(warp_row_ + row), sequence().rows - 1) * p_.bias.row_stride +
                       (is_key(key, sequence().keys) ? key : 0) * p_.bias.col_stride;
            });
    }

    SharedStorage& smem_;
    uint32_t row_shifts_ = 0;  // this lane's rows, relative to warp_rows.first; a byte each
    KeyBiasBits key_bias_;     // of this thread's key in the next n_block
};

}  // namespace flash_dmattn::cuda::sm80
