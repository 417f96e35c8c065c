// Pair bias: a dense bias that many batch elements share, over short sequences, as in the pair representations of
// protein models. Which calls the kernels support, their tiles, and how batch elements are split among CTAs.
//
// A CTA holds the biases of its m_block with all keys (or of its n_block with all rows) in shared memory, and loops
// over the batch elements that share them. The bias is in the dtype of Q or in float32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairBiasHeadDim = 32;

struct PairBiasFwdTileSizes {
    int warpgroups;  // consumer warpgroups, 64 query rows each
    int keys;        // of an n_block
    int stages;      // n_blocks of K and V in shared memory
    int max_keys;    // keys whose biases fit in shared memory
};
constexpr PairBiasFwdTileSizes kPairBiasFwdTiles[] = {
    {.warpgroups = 3, .keys = 128, .stages = 4, .max_keys = 384},
    {.warpgroups = 2, .keys = 128, .stages = 4, .max_keys = 512},
    {.warpgroups = 2, .keys = 64, .stages = 3, .max_keys = 384},  // float32 bias
};

// The longest sequence of the backward: registers hold dbias of 64 rows, shared memory the biases of 192 keys.
constexpr int kPairBiasBwdMaxSeqlen = 384;
constexpr int kPairBiasRows = 64;  // of an m_block of the backward

// A dense float32 bias comes as a matrix of relative_bias, its gradient as drelative_bias. Returns the call with both
// as `bias` and `dbias`, as these kernels read them, and other calls unchanged.
template <typename Params>
Params with_dense_bias(Params p) {
    const RelativeBiasView matrix = p.relative_bias;
    if (!matrix.is_matrix()) return p;
    p.relative_bias = {};
    p.bias.data = const_cast<void*>(matrix.data);
    p.bias.batch_stride = matrix.batch_stride;
    p.bias.head_stride = matrix.head_stride;
    p.bias.row_stride = matrix.grid_width;
    p.bias.col_stride = 1;
    p.bias.batches = matrix.batches;
    p.bias.batch_group_size = matrix.batch_group_size;
    p.bias.heads = matrix.heads;
    p.bias.kind = BiasKind::kDense;
    p.bias.dtype = DataType::kFloat32;
    if constexpr (std::is_base_of_v<BwdParams, Params>) {
        if (p.drelative_bias == nullptr) return p;
        p.dbias = p.bias;
        p.dbias.data = p.drelative_bias;
        p.dbias.head_stride = matrix.size();
        p.dbias.batch_stride = matrix.heads * matrix.size();
    }
    return p;
}
inline bool has_float32_bias(const AttentionParams& p) {
    return p.bias.kind == BiasKind::kDense && p.bias.dtype == DataType::kFloat32;
}

inline int64_t pair_bias_fwd_max_seqlen_k(const AttentionParams& p) {
    return kPairBiasFwdTiles[has_float32_bias(p) ? 2 : 1].max_keys;
}

// The kernel of dQ and dbias: m_blocks of all heads and biases, and n_blocks of 64 keys, an even number.
inline int64_t pair_bias_dq_m_blocks(const AttentionParams& p) {
    return ceil_div<int64_t>(p.seqlen_q, kPairBiasRows) * p.heads * p.bias.batches;
}
inline int64_t pair_bias_dq_n_blocks(const AttentionParams& p) { return ceil_div<int64_t>(p.seqlen_k, 128) * 2; }
constexpr int kPairBiasDbiasBlockSize = 64 * 64;  // floats of dbias in an m_block x n_block

// Whether the kernels are faster than sm80's, as measured on an H200. sm80 reads a float32 bias score by score.
inline bool should_use_pair_bias_fwd(const AttentionParams& p) {
    return has_float32_bias(p) || p.dtype == DataType::kBFloat16 ||
           (p.seqlen_k <= 384 && p.bias.batch_group_size >= 64);
}
inline bool should_use_pair_bias_bwd(const AttentionParams& p) {
    return has_float32_bias(p) || p.seqlen_k <= 256 || p.bias.batch_group_size >= 64;
}

// Whether the forward and the backward support a call, apart from strides (arch/tensor_map.h) and lengths.
inline bool is_pair_bias_problem(const AttentionParams& p) {
    constexpr int64_t kMinBatchGroup = 16;  // enough for each CTA to reuse its biases
    const bool is_shared =
        p.bias.present() && p.bias.kind == BiasKind::kDense && p.bias.batch_group_size >= kMinBatchGroup;
    const bool row_broadcast = !p.packed_mask.present() || p.packed_mask.row_broadcast();
    return is_shared && row_broadcast && p.head_dim <= kPairBiasHeadDim && p.cu_seqlens_q == nullptr &&
           p.seqused_k == nullptr && !p.intervals.present() && !p.lists.present() && !p.is_causal && p.softcap == 0;
}

}  // namespace flash_dmattn::cuda::sm90
