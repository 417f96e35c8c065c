// A dense bias that batch elements share, over short sequences, as pair representations of proteins give it: which calls the
// kernels for it serve, and their tiles.
//
// A block keeps the biases of its query rows (or keys) with the whole of the other side in shared memory, and goes over the
// batch elements that share them.
#pragma once

#include "../../params.h"
#include "../common/basics.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairHeadDim = 32;

// `groups` warp groups multiply, 64 query rows each, by `keys` keys at a time, of which `stages` tiles are in shared memory
// beside the biases of the groups' rows and of up to `longest` keys.
struct PairFwdTileSizes {
    int groups, keys, stages, longest;
};
constexpr PairFwdTileSizes kPairFwdTiles[] = {
    {.groups = 3, .keys = 128, .stages = 4, .longest = 384},
    {.groups = 2, .keys = 64, .stages = 3, .longest = 768},
};

// What the kernels ask of a call besides strides (sm90/tensor_map.h), forward and backward.
inline bool is_pair_problem(const AttentionParams& p) {
    constexpr int64_t kLeastBatch = 16;  // of which each block has some
    const bool is_shared = p.bias.present() && p.bias.kind == BiasKind::kDense && p.bias.batches == 1;
    const bool rows_alike = !p.packed_mask.present() || p.packed_mask.bits_row_stride == 0;
    return is_shared && rows_alike && p.batch >= kLeastBatch && p.head_dim <= kPairHeadDim && p.cu_seqlens_q == nullptr &&
           p.seqlens_k == nullptr && !p.intervals.present() && !p.lists.present() && !p.is_causal && p.softcap == 0;
}

}  // namespace flash_dmattn::cuda::sm90
