// Recomputation of P and dS from Q, K, dO and V, shared by the backward's kernels.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/relative_bias.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "kernel_traits.h"
#include "cuda/sm80/warp_gemm.cuh"

namespace flash_dmattn::cuda::sm80 {

// Copies rows from `first_row` on to a tile and fills it with zeros beyond `rows` x `cols`. cp.async; the caller
// commits. The common case, a full tile, takes little more than the cp.async instructions.
template <typename Tile, int kThreads, typename T>
__device__ __forceinline__ void copy_tile_async(uint32_t tile, const T* from, int64_t row_stride, int first_row,
                                                int rows, int cols) {
    constexpr int kRowsAtOnce = kThreads / Tile::kSlabChunks;
    static_assert(kRowsAtOnce % 8 == 0 && Tile::kRows % kRowsAtOnce == 0, "the swizzle repeats every eight rows");
    const int first = threadIdx.x / Tile::kSlabChunks, chunk = threadIdx.x % Tile::kSlabChunks;
    uint32_t to = tile + Tile::offset(first, chunk) * 2;
    from += static_cast<uint32_t>(first_row + first) * row_stride + chunk * Tile::kChunk;
    constexpr int kSlabBytes = Tile::kRows * Tile::kSlabCols * 2, kStepBytes = kRowsAtOnce * Tile::kSlabCols * 2;
    if (rows >= Tile::kRows && cols >= Tile::kCols) {
#pragma unroll
        for (int step = 0; step < Tile::kRows / kRowsAtOnce; ++step, from += kRowsAtOnce * row_stride)
#pragma unroll
            for (int slab = 0; slab < Tile::kSlabs; ++slab)
                cp_async_16(to + slab * kSlabBytes + step * kStepBytes, from + slab * Tile::kSlabCols);
    } else {
#pragma unroll 1
        for (int row = first; row < Tile::kRows; row += kRowsAtOnce, from += kRowsAtOnce * row_stride, to += kStepBytes)
#pragma unroll
            for (int slab = 0; slab < Tile::kSlabs; ++slab) {
                const int left = cols - chunk * Tile::kChunk - slab * Tile::kSlabCols;
                const int bytes = row < rows ? min(max(left, 0), Tile::kChunk) * 2 : 0;
                cp_async_16(to + slab * kSlabBytes, bytes > 0 ? from + slab * Tile::kSlabCols : nullptr, bytes);
            }
    }
}

// Pipeline stage of an m_block: Q, dO, lse, delta, mask or intervals, and with kKeyBias the key bias.
template <typename Traits, bool kKeyBias>
struct QdoStage {
    typename Traits::RowsTile query;
    typename Traits::RowsTile dout;
    alignas(16) float lse[Traits::kRows];
    alignas(16) float delta[Traits::kRows];
    union {  // by kind of mask
        alignas(16) uint32_t mask[Traits::kRows][Traits::kWords];
        alignas(16) int2 intervals[Traits::kKeys];
    };
    alignas(16) float key_bias[kKeyBias ? Traits::kKeys : 4];  // times log2(e)
};

// Pointers to row 0 of one query head, for all that a stage loads. Computed once per head and kept in shared memory:
// recomputing them for every m_block costs up to a tenth of its time, and registers are short.
template <typename T>
struct HeadPointers {
    const T* query;
    const T* dout;
    const float* lse;
    const float* delta;
    union {  // by kind of mask
        const uint32_t* mask;
        int64_t intervals;  // an offset
    };

    HeadPointers() = default;
    __device__ HeadPointers(const BwdArgs& p, const Sequence& s, int head)
        : query(static_cast<const T*>(p.query.data) + query_offset(p.query, s, head)),
          dout(static_cast<const T*>(p.dout.data) + query_offset(p.dout, s, head)),
          lse(static_cast<const float*>(p.lse.data) + stat_offset(p.lse, s, head)),
          delta(static_cast<const float*>(p.delta.data) + stat_offset(p.delta, s, head)), mask(nullptr) {
        if (p.packed_mask.present()) {
            mask = mask_words(p, s, head);
        } else if (p.interval_summaries.present()) {
            intervals = interval_offset(p.intervals, s, head, p.heads);
        }
    }
};

// Pointer to the dense bias of one query head.
template <typename T>
struct BiasPointer {
    const T* data;
    bool aligned;  // 16-byte copies are possible

    BiasPointer() = default;
    __device__ BiasPointer(const BwdArgs& p, const Sequence& s, int head)
        : data(static_cast<const T*>(p.bias.data) + score_offset(p.bias, s, head, p.heads)),
          aligned(p.bias.col_stride == 1 && p.bias.row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
    }
};

// Loads the stage of the m_block that begins at row `first` and has `left` rows. cp.async; the caller commits.
template <typename Traits, bool kKeyBias>
__device__ __forceinline__ void load_qdo_stage(const QdoStage<Traits, kKeyBias>& stage, const SmemAddress& address_of,
                                               const BwdArgs& p, const Sequence& s,
                                               const HeadPointers<typename Traits::T>& head, int first, int left,
                                               int n_block) {
    const int head_dim = static_cast<int>(p.head_dim);
    const auto load_rows = [&](const typename Traits::RowsTile& tile, const typename Traits::T* from,
                               int64_t row_stride) {
        copy_tile_async<typename Traits::RowsTile, Traits::kThreads>(address_of(tile), from, row_stride, first, left,
                                                                     head_dim);
    };
    load_rows(stage.query, head.query, p.query.row_stride);
    load_rows(stage.dout, head.dout, p.dout.row_stride);

    if (p.interval_summaries.present())
        load_intervals<Traits::kKeys>(address_of(stage.intervals), p, s, head.intervals, n_block * Traits::kKeys);
    const int row = threadIdx.x;
    if (row >= Traits::kRows || row >= left) return;
    cp_async<4>(address_of(stage.lse) + row * 4, head.lse + first + row);
    cp_async<4>(address_of(stage.delta) + row * 4, head.delta + first + row);
    if (p.packed_mask.present())
        cp_async<Traits::kWords * 4>(
            address_of(stage.mask) + row * Traits::kWords * 4,
            head.mask + static_cast<uint32_t>(first + row) * p.packed_mask.bits_row_stride + n_block * Traits::kWords);
}

// Loads a tile of the dense bias, 0 outside of the sequence. cp.async where aligned; the caller commits.
template <typename Traits>
__device__ __forceinline__ void load_bias(typename Traits::ScoresTile& tile, const SmemAddress& address_of,
                                          const BwdArgs& p, const Sequence& s,
                                          const BiasPointer<typename Traits::T>& head, int m_block, int n_block) {
    using T = typename Traits::T;
    const int first_row = m_block * Traits::kRows, first_key = n_block * Traits::kKeys;
    const int keys = s.keys - first_key;
    if (head.aligned) {
        copy_tile_async<typename Traits::ScoresTile, Traits::kThreads>(
            address_of(tile), head.data + first_key, p.bias.row_stride, first_row, s.rows - first_row, keys);
        return;
    }
    const T* bias = head.data + first_row * p.bias.row_stride + first_key * p.bias.col_stride;
#pragma unroll 1
    for (int i = threadIdx.x; i < Traits::kRows * Traits::kKeys; i += Traits::kThreads) {
        const int row = i / Traits::kKeys, key = i % Traits::kKeys;
        const bool in_sequence = first_row + row < s.rows && key < keys;
        tile.at(row, key) = in_sequence ? bias[row * p.bias.row_stride + key * p.bias.col_stride] : T(0.f);
    }
}

// Whether a tile is full and kTogether neighbouring scores of a row can be one access.
template <typename Traits, int kTogether = 2, typename T>
__device__ __forceinline__ bool is_full_and_aligned(const T* tile, const ScoreView& view, int rows, int keys) {
    return rows >= Traits::kRows && keys >= Traits::kKeys && view.col_stride == 1 && view.row_stride % kTogether == 0 &&
           reinterpret_cast<uintptr_t>(tile) % (kTogether * sizeof(T)) == 0;
}

// Waits for the stage's copies and synchronizes the CTA. Clears Q and dO of rows without a visible key: they may hold
// NaN, and 0 * NaN would reach a sum.
template <typename Traits, bool kKeyBias>
__device__ __forceinline__ void wait_for_qdo(QdoStage<Traits, kKeyBias>& stage, int rows) {
    cp_async_wait<0>();
    const int row = threadIdx.x;
    const bool empty = row < Traits::kRows && row < rows && stage.lse[row] == -kInfinity;
    if (!__syncthreads_or(empty)) return;
    constexpr int kChunks = Traits::kHeadDim / 8;
    for (int i = opaque(threadIdx.x); i < Traits::kRows * kChunks; i += Traits::kThreads) {
        const int r = i / kChunks, chunk = i % kChunks;
        if (r >= rows || stage.lse[r] != -kInfinity) continue;
        const int at = Traits::RowsTile::offset(r, chunk);
        *reinterpret_cast<uint4*>(stage.query.data + at) = uint4{};
        *reinterpret_cast<uint4*>(stage.dout.data + at) = uint4{};
    }
    __syncthreads();
}

// The relative bias, times log2(e), of a row and two keys of the sequence; 0 where there is none. A row beyond the
// sequence reads what its last row does: other entries may be NaN, and its P is not masked.
__device__ __forceinline__ float2 relative_bias_log2(const AttentionParams& p, const Sequence& s, const float* entries,
                                                     int row, int2 keys) {
    if (entries == nullptr) return {0, 0};
    const RelativeBiasOf<true> bias(p.relative_bias, s, entries);
    const int part = bias.row_part(min(row, s.rows - 1));
    return {bias[part + bias.key_part(keys.x)] * kLog2E, bias[part + bias.key_part(keys.y)] * kLog2E};
}

// The terms of a score that a kernel is compiled for.
enum class ScoreTerms {
    kPlain,    // Q K^T and attn_bias
    kGeneral,  // also a softcap, a relative bias or both
    kEither,   // tests at run time
};
__host__ __device__ __forceinline__ bool has_general_terms(const AttentionParams& p) {
    return p.softcap > 0 || p.relative_bias.data != nullptr;
}

// Recomputes P and dS of one pass over this warp's part of a tile: S = Q K^T, dP = dO V^T, then compute_p_ds().
// Calls make_visibility after the GEMMs, to save registers. With a softcap or a relative bias add_dx_general replaces
// add_dx.
template <typename Traits, BiasKind kBias, ScoreTerms kTerms, int kPassN, typename Rows, typename Keys, typename Stage,
          typename DenseBias, typename RelativeBias, typename MakeVisibility, typename AddDx, typename AddDxGeneral>
__device__ __forceinline__ void recompute_p_ds(float (&scores)[Traits::kScoreM][kPassN][4],
                                               float (&dprobs)[Traits::kScoreM][kPassN][4], const AttentionParams& p,
                                               const Rows& query, const Keys& key, const Rows& dout, const Keys& value,
                                               const Stage& stage, const DenseBias& dense_bias,
                                               const RelativeBias& relative_bias, const MakeVisibility& make_visibility,
                                               int first_row, int first_key, int rows, const AddDx& add_dx,
                                               const AddDxGeneral& add_dx_general) {
    using T = typename Traits::T;
    clear(scores);
    clear(dprobs);
    warp_gemm<T, Traits::kHeadDim>(scores, query, key);
    warp_gemm<T, Traits::kHeadDim>(dprobs, dout, value);
    const auto visibility = make_visibility();
    const float scale = static_cast<float>(p.softmax_scale), softcap = static_cast<float>(p.softcap);
    if (kTerms == ScoreTerms::kGeneral || (kTerms == ScoreTerms::kEither && has_general_terms(p))) {
        compute_p_ds<T, kBias, true, true>(scores, dprobs, stage, dense_bias, relative_bias, visibility, first_row,
                                           first_key, rows, scale, softcap, add_dx_general);
    } else if (visibility.full()) {
        compute_p_ds<T, kBias, false, false>(scores, dprobs, stage, dense_bias, relative_bias, visibility, first_row,
                                             first_key, rows, scale, softcap, add_dx);
    } else {
        compute_p_ds<T, kBias, true, false>(scores, dprobs, stage, dense_bias, relative_bias, visibility, first_row,
                                            first_key, rows, scale, softcap, add_dx);
    }
}

}  // namespace flash_dmattn::cuda::sm80
