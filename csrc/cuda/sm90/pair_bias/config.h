// A dense bias that batch elements share, over short sequences, as pair representations of proteins give it: which calls the
// kernels for it serve, and their tiles.
//
// A block keeps the biases of its query rows (or keys) with the whole of the other side in shared memory, and goes over the
// batch elements that share them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "cuda/common/basics.cuh"
#include "cuda/common/device.h"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairBiasHeadDim = 32;

// `groups` warp groups multiply, 64 query rows each, by `keys` keys at a time, of which `stages` tiles are in shared memory
// beside the biases of the groups' rows and of up to `longest` keys.
struct PairBiasFwdTileSizes {
    int groups, keys, stages, longest;
};
constexpr PairBiasFwdTileSizes kPairBiasFwdTiles[] = {
    {.groups = 3, .keys = 128, .stages = 4, .longest = 384},
    {.groups = 2, .keys = 128, .stages = 4, .longest = 512},
};
constexpr int kPairBiasFwdLongest = kPairBiasFwdTiles[1].longest;

// The longest sequence of the backward: the gradients of 64 rows' biases are in registers, the biases of 192 keys in shared
// memory.
constexpr int kPairBiasBwdLongest = 384;
constexpr int kPairBiasRows = 64;  // of a block that makes dQ, and of a tile of rows otherwise

// So many batch elements, one after the other, share a bias.
inline int64_t pair_bias_batch_group_size(const AttentionParams& p) { return p.batch / p.bias.batches; }

// Into how many parts the batch elements that share a bias are cut; `tiles` are those of all heads and biases. All blocks of
// a part go over its batch elements at the same time, so that queries, keys and values come from memory once; a few waves,
// as full as can be.
inline int64_t pair_bias_splits(int64_t tiles, int64_t sharers) {
    constexpr int64_t kWaves = 4;
    const int64_t slots = current_device().num_sms;
    int64_t best = 1, least = INT64_MAX / 64;
    for (int64_t splits = 1; splits <= std::min(sharers, std::max<int64_t>(kWaves * slots / tiles, 1)); ++splits) {
        const int64_t works = ceil_div(tiles * splits, slots) * ceil_div(sharers, splits);  // one block after the other
        if (works * 50 >= least * 49)
            continue;  // a part costs more than its works: biases are loaded, gradients stored
        best = splits;
        least = works;
    }
    return best;
}
// Tiles of rows of the kernel that makes dQ and the bias's gradient, of all heads and biases, and its tiles of keys.
inline int64_t pair_bias_dquery_tiles(const AttentionParams& p) {
    return ceil_div<int64_t>(p.seqlen_q, kPairBiasRows) * p.heads * p.bias.batches;
}
inline int64_t pair_bias_dquery_key_tiles(const AttentionParams& p) { return ceil_div<int64_t>(p.seqlen_k, 128) * 2; }
constexpr int kPairBiasDbiasTile = 64 * 64;  // floats of a part of the gradient

// Whether they are faster than those for 8.0, as measured on an H200.
inline bool should_use_pair_bias_fwd(const AttentionParams& p) {
    return p.dtype == DataType::kBFloat16 || (p.seqlen_k <= 384 && pair_bias_batch_group_size(p) >= 64);
}
inline bool should_use_pair_bias_bwd(const AttentionParams& p) {
    return p.seqlen_k <= 256 || pair_bias_batch_group_size(p) >= 64;
}

// What the kernels ask of a call besides strides (arch/tensor_map.h), forward and backward.
inline bool is_pair_bias_problem(const AttentionParams& p) {
    constexpr int64_t kMinBatchGroup = 16;  // of which each block has some
    const bool is_shared =
        p.bias.present() && p.bias.kind == BiasKind::kDense && pair_bias_batch_group_size(p) >= kMinBatchGroup;
    const bool row_broadcast = !p.packed_mask.present() || p.packed_mask.bits_row_stride == 0;
    return is_shared && row_broadcast && p.head_dim <= kPairBiasHeadDim && p.cu_seqlens_q == nullptr &&
           p.seqused_k == nullptr && !p.intervals.present() && !p.lists.present() && !p.is_causal && p.softcap == 0;
}

}  // namespace flash_dmattn::cuda::sm90
