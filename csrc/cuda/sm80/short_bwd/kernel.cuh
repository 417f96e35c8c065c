// The backward of short sequences, such as windows of an image: all rows and keys of a head are one tile.
//
// A CTA has one head and every n-th batch element, of which it loads the next while it computes one. All gradients have
// one owner, and D_i is summed from P and dP, so that there is neither a preprocess nor a postprocess. A warp has 16
// rows of S and dP, and of dQ, which it computes from its registers; then 16 keys of dK and dV. The gradient of the
// relative bias stays in registers until the CTA's last batch element.
#pragma once

#include "config.h"
#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/cp_async.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "cuda/sm80/warp_gemm.cuh"
#include "cuda/softmax/relative_bias.cuh"
#include "cuda/softmax/scores.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T_, int kHeadDim_>
struct ShortBwdTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kThreads = kShortSeqlen / 16 * 32;
    static constexpr int kCtasPerSm = kHeadDim == 32 ? 3 : 2;
    static constexpr int kScoreN = kShortSeqlen / 8, kDimN = kHeadDim / 8;  // accumulator fragments
    using RowsTile = SmemTile<T, kShortSeqlen, kHeadDim>;                   // Q, dO, K, V and the gradients
    using ScoresTile = SmemTile<T, kShortSeqlen, kShortSeqlen>;             // P, dS
    using Scores = float[1][kScoreN][4];
    using Rows = float[1][kDimN][4];
};

// The gradient of the scores, summed over all batch elements of a CTA; row-major.
struct ShortBiasGradient {
    static constexpr int kRows = kShortSeqlen, kCols = kShortSeqlen;
    float data[kRows][kCols];
    __device__ float at(int row, int key) const { return data[row][key]; }
};

template <typename Traits>
struct ShortBwdSharedStorage {
    struct Stage {
        typename Traits::RowsTile query, dout, key, value;
    };
    Stage stages[2];
    typename Traits::ScoresTile probs, dscores;
    uint64_t visible_keys[kShortSeqlen];  // of each row
    union {
        float4 bias[Traits::kScoreN][Traits::kThreads];  // times log2(e), in the order of the accumulators
        ShortBiasGradient dbias;
    };
};

// An accumulator as the A operand of the next GEMM, rounded.
template <typename T, int kFragments>
struct AccumulatorA {
    const float (&acc)[1][kFragments][4];
    __device__ __forceinline__ void load_fragment(uint32_t (&to)[4], int, int k) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = acc[0][k / 8 + i / 2] + i % 2 * 2;
            to[i] = pack<T>(x[0], x[1]);
        }
    }
};

template <typename Traits, bool kRelative>
class ShortBwdKernel {
public:
    using T = typename Traits::T;
    using SharedStorage = ShortBwdSharedStorage<Traits>;
    using Stage = typename SharedStorage::Stage;
    using RowsTile = typename Traits::RowsTile;
    using ScoresTile = typename Traits::ScoresTile;

    __device__ ShortBwdKernel(const BwdArgs& p, SharedStorage& smem, int head)
        : p_(p), smem_(smem), head_(head), rows_(static_cast<int>(p.seqlen_q)), keys_(static_cast<int>(p.seqlen_k)),
          head_dim_(static_cast<int>(p.head_dim)) {}

    __device__ __forceinline__ void run(int first_batch, int batch_step) {
        const int batches = static_cast<int>(p_.batch);
        typename Traits::Scores dbias;
        clear(dbias);
        load(smem_.stages[0], first_batch);
        if (kRelative) load_relative_bias();
        int stage = 0;
        for (int batch = first_batch; batch < batches; batch += batch_step, stage ^= 1) {
            Stage& tiles = smem_.stages[stage];
            const Sequence s(p_, batch);
            float lse[2], dlse[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                lse[h] = load_stat(p_.lse, s, row(h), -kInfinity);
                dlse[h] = load_stat(p_.dlse, s, row(h), 0);
            }
            find_visible_keys(s);
            cp_async_wait<0>();
            __syncthreads();  // the tiles have been loaded, and those of the other stage stored
            if (batch + batch_step < batches) load(smem_.stages[stage ^ 1], batch + batch_step);
            clear_masked(tiles, s);

            typename Traits::Scores scores, dscores;
            compute_scores(tiles, lse, dlse, scores, dscores);
            store_accumulator<T>(scores, ScoresC(smem_address(&smem_.probs), first_row(), 0));
            store_accumulator<T>(dscores, ScoresC(smem_address(&smem_.dscores), first_row(), 0));
            if (kRelative) {
#pragma unroll
                for (int n = 0; n < Traits::kScoreN; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) dbias[0][n][i] += dscores[0][n][i];
            }
            typename Traits::Rows dquery, dkey, dvalue;
            clear(dquery);
            clear(dkey);
            clear(dvalue);
            warp_gemm<T, kShortSeqlen>(dquery, AccumulatorA<T, Traits::kScoreN>{dscores}, columns_of(tiles.key));
            __syncthreads();
            warp_gemm<T, kShortSeqlen>(dvalue, transposed(smem_.probs), columns_of(tiles.dout));
            warp_gemm<T, kShortSeqlen>(dkey, transposed(smem_.dscores), columns_of(tiles.query));
            __syncthreads();
            const auto scale = static_cast<float>(p_.softmax_scale);
            store_accumulator<T>(dquery, RowsC(smem_address(&tiles.query), first_row(), 0), scale);
            store_accumulator<T>(dkey, RowsC(smem_address(&tiles.key), first_row(), 0), scale);
            store_accumulator<T>(dvalue, RowsC(smem_address(&tiles.value), first_row(), 0));
            __syncthreads();
            store(tiles.query, p_.dquery, query_offset(p_.dquery, s, head_), rows_);
            store(tiles.key, p_.dkey, key_offset(p_.dkey, s, head_), keys_);
            store(tiles.value, p_.dvalue, key_offset(p_.dvalue, s, head_), keys_);
        }
        if (kRelative && p_.drelative_bias != nullptr) add_bias_gradient(dbias, Sequence(p_, first_batch));
    }

private:
    using RowsA = FragmentsA<RowsTile, Major::kK>;
    using RowsB = FragmentsB<RowsTile, Major::kK>;
    using ColumnsB = FragmentsB<RowsTile, Major::kMN>;
    using RowsC = SmemFragments<RowsTile, MatrixOrder::kColMajor>;
    using ScoresC = SmemFragments<ScoresTile, MatrixOrder::kColMajor>;
    using TransposedA = FragmentsA<ScoresTile, Major::kMN>;

    // This warp's first row, and first key of dK and dV.
    static __device__ int first_row() { return warp_id() * 16; }
    static __device__ int row(int h) { return first_row() + h * 8 + fragment_row(); }
    static __device__ ColumnsB columns_of(const RowsTile& tile) { return ColumnsB(smem_address(&tile), 0, 0); }
    static __device__ TransposedA transposed(const ScoresTile& tile) {
        return TransposedA(smem_address(&tile), 0, first_row());
    }

    // cp.async
    __device__ __forceinline__ void load(Stage& stage, int batch) const {
        const Sequence s(p_, batch);
        load(stage.query, p_.query, query_offset(p_.query, s, head_), rows_);
        load(stage.dout, p_.dout, query_offset(p_.dout, s, head_), rows_);
        load(stage.key, p_.key, key_offset(p_.key, s, head_), keys_);
        load(stage.value, p_.value, key_offset(p_.value, s, head_), keys_);
        cp_async_commit();
    }
    __device__ __forceinline__ void load(RowsTile& tile, const RowsView& view, int64_t offset, int rows) const {
        const T* const from = static_cast<const T*>(view.data) + offset;
        copy_rows_async<Traits::kThreads>(
            tile, head_dim_, [&](int row) -> const T* { return row < rows ? from + row * view.row_stride : nullptr; });
    }
    __device__ __forceinline__ void store(const RowsTile& tile, const RowsView& view, int64_t offset, int rows) const {
        copy_tile_out<Traits::kThreads>(tile, static_cast<T*>(view.data) + offset, view.row_stride, rows, head_dim_);
    }
    __device__ __forceinline__ float load_stat(const RowStatView& view, const Sequence& s, int row,
                                               float absent) const {
        if (view.data == nullptr || row >= rows_) return absent;
        return static_cast<const float*>(view.data)[stat_offset(view, s, head_) + row];
    }

    __device__ __forceinline__ void find_visible_keys(const Sequence& s) const {
        const int row = threadIdx.x;
        if (row >= kShortSeqlen) return;
        const int keys = row < rows_ ? s.keys_of(row, p_.is_causal) : 0;
        uint64_t visible = keys < 64 ? (uint64_t{1} << keys) - 1 : ~uint64_t{0};
        if (p_.packed_mask.present() && row < rows_) {
            const uint32_t* const words = mask_words(p_, s, head_) + row * p_.packed_mask.bits_row_stride;
            visible &= uint64_t{words[1]} << 32 | words[0];
        }
        smem_.visible_keys[row] = visible;
    }
    // Rows that see no key, and keys that no row sees, may hold NaN, and 0 * NaN would reach a sum.
    __device__ __forceinline__ void clear_masked(Stage& tiles, const Sequence& s) const {
        const int i = threadIdx.x;
        bool row_is_masked = false, key_is_masked = false;
        if (i < kShortSeqlen) {
            row_is_masked = i < rows_ && load_stat(p_.lse, s, i, 0) == -kInfinity;
            if (p_.packed_mask.present()) {
                uint64_t visible = 0;
                for (int row = 0; row < rows_; ++row) visible |= smem_.visible_keys[row];
                key_is_masked = i < keys_ && !(visible >> i & 1);
            }
        }
        if (!__syncthreads_or(row_is_masked || key_is_masked)) return;
        const auto clear_row = [&](RowsTile& tile) {
#pragma unroll 1
            for (int chunk = 0; chunk < Traits::kHeadDim / 8; ++chunk)
                *reinterpret_cast<uint4*>(tile.data + RowsTile::offset(i, chunk)) = uint4{};
        };
        if (row_is_masked) {
            clear_row(tiles.query);
            clear_row(tiles.dout);
        }
        if (key_is_masked) {
            clear_row(tiles.key);
            clear_row(tiles.value);
        }
        __syncthreads();
    }

    __device__ __forceinline__ RelativeBiasOf<true> relative_bias(const Sequence& s) const {
        return {p_.relative_bias, s, relative_bias_entries<true>(p_, s.batch, head_)};
    }
    // Beyond the sequence as its last row and key: other entries may be NaN.
    __device__ __forceinline__ void load_relative_bias() const {
        const RelativeBiasOf<true> bias = relative_bias(Sequence(p_, 0));
#pragma unroll 1
        for (int n = 0; n < Traits::kScoreN; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = min(n * 8 + fragment_col() + i % 2, keys_ - 1);
                x[i] = bias[bias.row_part(min(row(i / 2), rows_ - 1)) + bias.key_part(key)] * kLog2E;
            }
            smem_.bias[n][threadIdx.x] = {x[0], x[1], x[2], x[3]};
        }
    }

    // P and dS of this warp's rows.
    __device__ __forceinline__ void compute_scores(const Stage& tiles, const float (&lse)[2], const float (&dlse)[2],
                                                   typename Traits::Scores& scores,
                                                   typename Traits::Scores& dscores) const {
        clear(scores);
        clear(dscores);
        warp_gemm<T, Traits::kHeadDim>(scores, RowsA(smem_address(&tiles.query), first_row(), 0),
                                       RowsB(smem_address(&tiles.key), 0, 0));
        warp_gemm<T, Traits::kHeadDim>(dscores, RowsA(smem_address(&tiles.dout), first_row(), 0),
                                       RowsB(smem_address(&tiles.value), 0, 0));
        const float scale_log2 = static_cast<float>(p_.softmax_scale) * kLog2E;
        uint64_t visible[2];
        float lse_log2[2], delta[2] = {0, 0};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            visible[h] = smem_.visible_keys[row(h)] >> fragment_col();
            lse_log2[h] = lse_to_log2(lse[h], true);
        }
#pragma unroll
        for (int n = 0; n < Traits::kScoreN; ++n) {
            const float4 b = kRelative ? smem_.bias[n][threadIdx.x] : float4{};
            const float bias[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i / 2;
                const bool is_visible = visible[h] >> (n * 8) & (1 << i % 2);
                const float prob = probability<true>(scores[0][n][i], scale_log2, bias[i] - lse_log2[h]);
                scores[0][n][i] = is_visible ? prob : 0;
                dscores[0][n][i] = is_visible ? dscores[0][n][i] : 0;
                delta[h] += scores[0][n][i] * dscores[0][n][i];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(delta[h]);
            delta[h] = lse_log2[h] != kInfinity ? sum - dlse[h] : 0;
        }
#pragma unroll
        for (int n = 0; n < Traits::kScoreN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dscores[0][n][i] = scores[0][n][i] * (dscores[0][n][i] - delta[i / 2]);
    }

    __device__ __forceinline__ void add_bias_gradient(const typename Traits::Scores& dbias, const Sequence& s) const {
        __syncthreads();  // dbias takes the place of the bias
#pragma unroll
        for (int n = 0; n < Traits::kScoreN; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(smem_.dbias.data[row(h)] + n * 8 + fragment_col()) = {
                    dbias[0][n][2 * h], dbias[0][n][2 * h + 1]};
        __syncthreads();
        RelativeBiasGradientOf<true>(p_, s, head_).template add_tile<Traits::kThreads>(smem_.dbias);
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const int head_, rows_, keys_, head_dim_;
};

template <typename Traits, bool kRelative>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    short_bwd_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    using Kernel = ShortBwdKernel<Traits, kRelative>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_memory);
    const int heads = static_cast<int>(p.heads);
    Kernel(p, smem, blockIdx.x % heads).run(blockIdx.x / heads, gridDim.x / heads);
}

}  // namespace flash_dmattn::cuda::sm80
