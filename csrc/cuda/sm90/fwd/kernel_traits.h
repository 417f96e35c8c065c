// Compile-time parameters of a forward kernel: its tiles, stages and registers.
#pragma once

#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/softmax/relative_bias_segment.cuh"
#include "cuda/sm90/tile_sizes.h"

namespace flash_dmattn::cuda::sm90 {

// Whether S = Q K^T is accumulated onto the bias divided by the softmax scale.
constexpr __host__ __device__ bool starts_from_bias(BiasKind bias) {
    return bias == BiasKind::kKey || is_relative(bias);
}

template <int kHeadDim_, BiasKind kBias, bool kTall = false>
struct FwdKernelTraits {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes =
        kTall ? tall_fwd_tile_sizes(kHeadDim, kBias) : fwd_tile_sizes(kHeadDim, kBias);
    static constexpr int kConsumerWarpgroups = kSizes.warpgroups;
    static constexpr int kRows = kConsumerWarpgroups * kWarpgroupRows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kQueryStages = kSizes.query_stages;
    static constexpr int kKeyStages = kSizes.key_stages;
    static constexpr int kValueStages = kSizes.value_stages;
    static constexpr int kBiasStages = kSizes.bias_stages;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
    // Per thread. The consumers take what the producer releases of the registers that the CTA was launched with.
    static constexpr int kConsumerRegisters = kConsumerWarpgroups == 4   ? 112
                                              : kConsumerWarpgroups == 3 ? 160
                                              : kHeadDim == 256          ? 224
                                                                         : 208;
    static constexpr int kProducerRegisters =
        65536 / kThreads / 8 * 8 * (1 + kConsumerWarpgroups) - kConsumerWarpgroups * kConsumerRegisters;
    static_assert(2 <= kConsumerWarpgroups && kConsumerWarpgroups <= 4);
    static constexpr bool kGathers = false;
    static constexpr bool kServesMasks = !kTall || tall_fwd_tile_serves_masks(kBias);
    static constexpr bool kServesRowMasks = !kTall;  // masks that differ by row
    // Whether the consumers count the n_blocks of a work tile: a range, or those of a key list. In kernels that serve
    // masks the producer may skip some of a range, and writes beside each K stage which n_block it holds.
    static constexpr bool kCountsBlocks = !kServesMasks;
    // A relative bias often favors near keys: under causality the last n_blocks then have the row maxima, and the
    // softmax that begins with them keeps its base.
    static constexpr BlockOrder kOrder =
        kBias == BiasKind::kRelative ? BlockOrder::kDescending : BlockOrder::kAscending;
};

// Gathered keys: an m_block has the rows of a key list. Head dimensions 64 and 128 have another stage of V, 128 instead
// of one of K: the producer then finds the list of the next work tile earlier, while the MMA warpgroups are still busy.
template <int kHeadDim>
struct FwdGatherKernelTraits : FwdKernelTraits<kHeadDim, BiasKind::kNone> {
    static constexpr FwdTileSizes kSizes = gathered_fwd_tile_sizes(kHeadDim);
    static constexpr int kKeyStages = kSizes.key_stages;
    static constexpr int kValueStages = kSizes.value_stages;
    static constexpr bool kGathers = true, kCountsBlocks = true;
};

}  // namespace flash_dmattn::cuda::sm90
