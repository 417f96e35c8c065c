// The tile sizes of the sm90 kernels, for each compiled head dimension. Pair bias: pair_bias/config.h; the recomputed
// gradient of a dense bias: dbias/kernel_traits.h.
#pragma once

#include <stdexcept>

#include "params.h"

namespace flash_dmattn::cuda::sm90 {

constexpr int kWarpgroupRows = 64;  // query rows of an MMA warpgroup of the forward

// The function below lists these in order.
struct FwdTileSizes {
    int warpgroups;  // MMA warpgroups
    int keys;        // of an n_block: 64 or 128
    int query_stages, key_stages, value_stages;
    int bias_stages;  // each holds 64 keys of one warpgroup's dense bias
};

// Prefill only: at most 64 query rows use sm80/fwd, and up to a few rows over a KV cache sm90/decode.
// A dense bias takes shared memory.
constexpr FwdTileSizes fwd_tile_sizes(int head_dim, BiasKind bias) {
    const bool has_dense_bias = bias == BiasKind::kDense;
    switch (head_dim) {
        case 32: return {2, 128, 2, 4, 4, 4};
        case 64: return {2, 128, 1, 3, 3, 4};
        case 96: return {2, 128, 1, 2, 3, 4};
        case 128: return {2, 128, 1, has_dense_bias ? 2 : 3, 2, 3};
        case 192: return {2, 64, 1, 2, 3, 3};
        case 256: return {2, 64, 1, 2, 2, 1};
    }
    throw std::logic_error("head dimension");
}

// The tall tile has more warpgroups: while some compute a softmax, the GEMMs of others run, and K and V are read less
// often. Their threads have fewer registers, so that n_blocks have fewer keys; 128 with a relative bias, of which the
// producer copies entries for every n_block.
constexpr bool has_tall_fwd_tile(int head_dim, BiasKind bias) {
    return head_dim <= 64 || (head_dim == 128 && bias == BiasKind::kNone);
}
// Whether it serves masks, unless they differ by row. Without a dense bias it would be slower with them: the producer
// takes as long for 64 keys as for 128.
constexpr bool tall_fwd_tile_serves_masks(BiasKind bias) { return bias == BiasKind::kDense; }

constexpr FwdTileSizes tall_fwd_tile_sizes(int head_dim, BiasKind bias) {
    const bool has_dense_bias = bias == BiasKind::kDense;
    if (is_relative(bias)) return head_dim == 32 ? FwdTileSizes{3, 128, 2, 4, 4, 1} : FwdTileSizes{3, 128, 1, 3, 3, 1};
    switch (head_dim) {
        case 32: return {4, 64, 2, 4, 4, 4};
        case 64: return {4, 64, 1, 4, has_dense_bias ? 3 : 4, 3};
        case 128: return {3, 64, 1, 3, 3, 1};
    }
    throw std::logic_error("head dimension");
}

// Stages that differ for gathered keys: FwdGatherKernelTraits says why.
constexpr FwdTileSizes gathered_fwd_tile_sizes(int head_dim) {
    FwdTileSizes sizes = fwd_tile_sizes(head_dim, BiasKind::kNone);
    if (head_dim == 64) sizes.key_stages = sizes.value_stages = 4;
    if (head_dim == 128) sizes.key_stages = 2, sizes.value_stages = 3;
    return sizes;
}

// Query rows of an m_block, keys of an n_block.
struct BwdTileSizes {
    int rows, keys;
};

// For each compiled head dimension.
constexpr BwdTileSizes bwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32: return {.rows = 128, .keys = 128};
        case 64: return {.rows = 128, .keys = 128};
        case 128: return {.rows = 64, .keys = 128};
        case 192: return {.rows = 64, .keys = 64};
        case 256: return {.rows = 64, .keys = 64};
    }
    throw std::logic_error("head dimension");
}

// The tall backward tile has more rows, so that the GEMMs read the operands of the n_block less often. It leaves
// neither registers nor shared memory for masks, a softcap, and a dense or relative bias.
constexpr int kTallBwdRows = 80;
constexpr bool has_tall_bwd_tile(int head_dim) { return head_dim == 128; }

// The grouped sparse backward. Keys of an n_block: above head dimension 128 both MMA warpgroups share 64
// (bwd/kernel_traits.h).
constexpr int grouped_block_n(int head_dim) { return head_dim > 128 ? 64 : 128; }

// Whether the per-head sparse kernel is compiled, too.
constexpr bool can_run_per_head(int head_dim) { return head_dim <= 128; }

// Rows of an m_block for each head: those of one list.
constexpr __host__ __device__ int64_t grouped_block_m(const AttentionParams& p) {
    return p.lists.num_m_blocks > 1 ? p.lists.m_block_rows : KeyListsView::kRows;
}

}  // namespace flash_dmattn::cuda::sm90
