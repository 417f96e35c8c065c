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
        : query(query_rows<const T>(p.query, s, head)), dout(query_rows<const T>(p.dout, s, head)),
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

// lse, times log2(e), and D_i of a row of a stage that has `rows` rows.
template <typename Stage>
__device__ __forceinline__ RowStats row_stats_of(const Stage& stage, int row, int rows) {
    const float lse = lse_to_log2(stage.lse[row], row < rows);
    return {lse, lse != kInfinity ? stage.delta[row] : 0};
}

// kAdjustsScores below: whether the kernel serves calls that have a softcap or a relative bias. A kernel for both kinds
// of calls is up to 10 % slower on those without.

// Which gradient of the scores a kernel computes. They differ where there is a softcap.
enum class ScoreGradient {
    kDs,  // before softcap and biases, for dQ and dK
    kDx,  // after them, for the biases
};
template <bool kAdjustsScores = true>
__device__ __forceinline__ bool is_dx(const AttentionParams& p, ScoreGradient gradient) {
    return !kAdjustsScores || gradient == ScoreGradient::kDx || p.softcap == 0;
}
// The first of the gradients that a step computes, kDs being the last.
template <bool kAdjustsScores = true>
__device__ __forceinline__ ScoreGradient first_gradient(const AttentionParams& p, bool needs_dx) {
    return kAdjustsScores && p.softcap > 0 && needs_dx ? ScoreGradient::kDx : ScoreGradient::kDs;
}

// Whether a call has a softcap or a relative bias.
__host__ __device__ __forceinline__ bool has_softcap_or_relative_bias(const AttentionParams& p) {
    return p.softcap > 0 || p.relative_bias.data != nullptr;
}

// Applies both to S, and for kDs the softcap's derivative to dP - D. entries: relative_bias_entries(); row_at(i): the
// row, in the sequence, of the accumulator's row 16 m + 8 h + fragment_row(), i = 2 m + h; key_at(n, e): the key of
// column fragment_col() + e of fragment n.
template <int kMFragments, int kNFragments, typename RowAt, typename KeyAt>
__device__ __forceinline__ void apply_softcap_and_relative_bias(float (&s)[kMFragments][kNFragments][4],
                                                                float (&dp)[kMFragments][kNFragments][4],
                                                                const AttentionParams& p, const Sequence& sequence,
                                                                const float* entries, ScoreGradient gradient,
                                                                const RowAt& row_at, const KeyAt& key_at) {
    const float scale = static_cast<float>(p.softmax_scale), softcap = static_cast<float>(p.softcap);
    const bool is_capped = softcap > 0, is_ds = gradient == ScoreGradient::kDs;
    const float inner = is_capped ? scale / softcap : scale;
#pragma unroll
    for (int m = 0; m < kMFragments; ++m)
#pragma unroll
        for (int n = 0; n < kNFragments; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] *= inner;
    if (is_capped) {
#pragma unroll
        for (int m = 0; m < kMFragments; ++m)
#pragma unroll
            for (int n = 0; n < kNFragments; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float tanh = fast_tanh(s[m][n][i]);
                    s[m][n][i] = softcap * tanh;
                    if (is_ds) dp[m][n][i] *= 1 - tanh * tanh;
                }
    }
    if (entries == nullptr) return;
    const RelativeBiasOf<true> bias(p.relative_bias, sequence, entries);
    // A row beyond the sequence reads what its last row does: other entries may be NaN, and its P is not masked.
    add_relative_bias(s, bias, [&](int i) { return min(row_at(i), sequence.rows - 1); }, key_at);
}

// Replaces S by P and dP - D by its product with P. The accumulators' origin is (row, key) of the tile.
//   stage                  lse and delta of the rows, and key_bias
//   visibility             word(row, w): visible keys 32 w .. 32 w + 31; only this lane's bits are valid
//   dense_bias(to, m, n)   loads the bias of a 16 x 16 block as an A fragment
template <typename T, BiasKind kBias, bool kMasked, int kMFragments, int kNFragments, typename Stage,
          typename Visibility, typename LoadDenseBias>
__device__ __forceinline__ void compute_p_ds(float (&s)[kMFragments][kNFragments][4],
                                             float (&dp)[kMFragments][kNFragments][4], const Stage& stage,
                                             const LoadDenseBias& dense_bias, const Visibility& visibility, int row,
                                             int key, int rows, float scale) {
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < kMFragments; ++m) {
        float lse[2];
        constexpr int kKeys = kNFragments * 8, kWords = ceil_div(kKeys, 32);
        uint32_t visible[2][kWords];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + m * 16 + h * 8 + fragment_row(lane);
            lse[h] = row_stats_of(stage, r, rows).lse;
            if (kMasked) {
#pragma unroll
                for (int w = 0; w < kWords; ++w)
                    visible[h][w] =
                        visibility.word(r, key / 32 + w) >> (kKeys % 32 ? key % 32 : 0) >> (fragment_col(lane));
            }
        }
#pragma unroll
        for (int n = 0; n < kNFragments; n += 2) {
            uint32_t bias[4];
            if (kBias == BiasKind::kDense) dense_bias(bias, m, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2, k = n + i / 2;
                float2 b = {0, 0};
                if (kBias == BiasKind::kDense) {
                    b = unpack<T>(bias[i]);
                    b = {b.x * kLog2E, b.y * kLog2E};
                } else if (kBias == BiasKind::kKey) {
                    b = *reinterpret_cast<const float2*>(stage.key_bias + key + k * 8 + fragment_col(lane));
                }
                const float shift[2] = {b.x - lse[h], b.y - lse[h]};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool is_visible = !kMasked || visible[h][k / 4] & (1u << (k % 4 * 8 + e));
                    const float prob = probability<true>(s[m][k][2 * h + e], scale * kLog2E, shift[e]);
                    s[m][k][2 * h + e] = is_visible ? prob : 0;
                    dp[m][k][2 * h + e] = is_visible ? prob * dp[m][k][2 * h + e] : 0;
                }
            }
        }
    }
}

// Recomputes P and the gradient of the scores of one pass over this warp's part of a tile: S = Q K^T, dP - D = dO V^T -
// D, `adjust_scores`, which apply_softcap_and_relative_bias() where the call has one of them, and compute_p_ds(). Calls
// make_visibility after the GEMMs, to save registers.
template <typename Traits, BiasKind kBias, bool kAdjustsScores, int kPassN, typename Rows, typename Keys,
          typename Stage, typename DenseBias, typename AdjustScores, typename MakeVisibility>
__device__ __forceinline__ void recompute_p_ds(float (&scores)[Traits::kScoreM][kPassN][4],
                                               float (&dprobs)[Traits::kScoreM][kPassN][4], const AttentionParams& p,
                                               const Rows& query, const Keys& key, const Rows& dout, const Keys& value,
                                               const Stage& stage, const DenseBias& dense_bias,
                                               const AdjustScores& adjust_scores, const MakeVisibility& make_visibility,
                                               int first_row, int first_key, int rows) {
    using T = typename Traits::T;
    clear(scores);
#pragma unroll
    for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float delta = row_stats_of(stage, first_row + m * 16 + h * 8 + fragment_row(), rows).delta;
#pragma unroll
            for (int n = 0; n < kPassN; ++n) dprobs[m][n][2 * h] = dprobs[m][n][2 * h + 1] = -delta;
        }
    warp_gemm<T, Traits::kHeadDim>(scores, query, key);
    warp_gemm<T, Traits::kHeadDim>(dprobs, dout, value);
    float scale = static_cast<float>(p.softmax_scale);
    if (kAdjustsScores && has_softcap_or_relative_bias(p)) {
        adjust_scores(scores, dprobs);
        scale = 1;
    }
    const auto visibility = make_visibility();
    if (visibility.full()) {
        compute_p_ds<T, kBias, false>(scores, dprobs, stage, dense_bias, visibility, first_row, first_key, rows, scale);
    } else {
        compute_p_ds<T, kBias, true>(scores, dprobs, stage, dense_bias, visibility, first_row, first_key, rows, scale);
    }
}

}  // namespace flash_dmattn::cuda::sm80
