// Pair bias: a dense bias over short sequences that many batch elements share, as in protein models. Which calls its
// kernels serve, and their block sizes.
//
// A CTA keeps the biases of its m_block (or n_block) with the whole other sequence dimension in shared memory, and
// loops over the batch elements that share them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "cuda/common/basics.cuh"
#include "cuda/common/device.h"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairBiasHeadDim = 32;

// `warpgroups` MMA warpgroups of 64 query rows each, n_blocks of `keys` keys, `stages` pipeline stages. Shared memory
// also holds the biases of the m_block and up to `longest` keys.
struct PairBiasFwdTileSizes {
    int warpgroups, keys, stages, longest;
};
constexpr PairBiasFwdTileSizes kPairBiasFwdTiles[] = {
    {.warpgroups = 3, .keys = 128, .stages = 4, .longest = 384},
    {.warpgroups = 2, .keys = 128, .stages = 4, .longest = 512},
};
constexpr int kPairBiasFwdLongest = kPairBiasFwdTiles[1].longest;

// The longest sequence of the backward: registers hold dbias of 64 rows, shared memory the bias of 192 keys.
constexpr int kPairBiasBwdLongest = 384;
constexpr int kPairBiasRows = 64;  // of an m_block of the backward

// Consecutive batch elements that share a bias.
inline int64_t pair_bias_batch_group_size(const AttentionParams& p) { return p.batch / p.bias.batches; }

// How many splits the batch elements that share a bias are cut into; `tiles` counts the blocks of all heads and biases.
// CTAs of a split process the same batch elements at the same time, so that L2 serves Q, K and V. Prefers a few full
// waves.
inline int64_t pair_bias_splits(int64_t tiles, int64_t batch_group_size) {
    constexpr int64_t kWaves = 4;
    const int64_t num_sms = current_device().num_sms;
    int64_t best = 1, least = INT64_MAX / 64;
    const int64_t max_splits = std::min(batch_group_size, std::max<int64_t>(kWaves * num_sms / tiles, 1));
    for (int64_t splits = 1; splits <= max_splits; ++splits) {
        // Batch elements that an SM processes in sequence.
        const int64_t steps = ceil_div(tiles * splits, num_sms) * ceil_div(batch_group_size, splits);
        // Each split also costs a prologue and an epilogue: more splits must save at least 2 %.
        if (steps * 50 >= least * 49) continue;
        best = splits;
        least = steps;
    }
    return best;
}
// m_blocks, of all heads and biases, and n_blocks of the kernel for dQ and dbias.
inline int64_t pair_bias_dquery_tiles(const AttentionParams& p) {
    return ceil_div<int64_t>(p.seqlen_q, kPairBiasRows) * p.heads * p.bias.batches;
}
inline int64_t pair_bias_dquery_key_tiles(const AttentionParams& p) { return ceil_div<int64_t>(p.seqlen_k, 128) * 2; }
constexpr int kPairBiasDbiasTile = 64 * 64;  // floats of a dbias block

// Whether these kernels are faster than the sm80 kernels, as measured on an H200.
inline bool should_use_pair_bias_fwd(const AttentionParams& p) {
    return p.dtype == DataType::kBFloat16 || (p.seqlen_k <= 384 && pair_bias_batch_group_size(p) >= 64);
}
inline bool should_use_pair_bias_bwd(const AttentionParams& p) {
    return p.seqlen_k <= 256 || pair_bias_batch_group_size(p) >= 64;
}

// The requirements of forward and backward besides strides (arch/tensor_map.h).
inline bool is_pair_bias_problem(const AttentionParams& p) {
    constexpr int64_t kMinBatchGroup = 16;  // every split has several batch elements
    const bool is_shared =
        p.bias.present() && p.bias.kind == BiasKind::kDense && pair_bias_batch_group_size(p) >= kMinBatchGroup;
    const bool row_broadcast = !p.packed_mask.present() || p.packed_mask.bits_row_stride == 0;
    return is_shared && row_broadcast && p.head_dim <= kPairBiasHeadDim && p.cu_seqlens_q == nullptr &&
           p.seqused_k == nullptr && !p.intervals.present() && !p.lists.present() && !p.is_causal && p.softcap == 0;
}

}  // namespace flash_dmattn::cuda::sm90
