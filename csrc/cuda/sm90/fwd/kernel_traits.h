// Block sizes, stages and registers of the sm90 forward.
#pragma once

#include <stdexcept>

namespace flash_dmattn::cuda::sm90 {

// `warpgroups` MMA warpgroups of 64 query rows each, n_blocks of `keys` keys (64 or 128), and the stages of each
// pipeline. A bias stage holds 64 keys of one warpgroup's dense bias.
struct FwdTileSizes {
    int warpgroups, keys;
    int query_stages;
    int key_stages;
    int value_stages;
    int bias_stages;
};

// Prefill only: decoding uses the sm80 kernels. A dense bias takes shared memory and registers.
constexpr FwdTileSizes fwd_tile_sizes(int head_dim, bool has_dense_bias) {
    switch (head_dim) {
        case 32:
            return {
                .warpgroups = 3, .keys = 128, .query_stages = 2, .key_stages = 4, .value_stages = 4, .bias_stages = 4};
        case 64:
            return {.warpgroups = has_dense_bias ? 2 : 3,
                    .keys = 128,
                    .query_stages = 1,
                    .key_stages = 3,
                    .value_stages = 3,
                    .bias_stages = 4};
        case 96:
            return {
                .warpgroups = 2, .keys = 128, .query_stages = 1, .key_stages = 2, .value_stages = 3, .bias_stages = 4};
        case 128:
            return {.warpgroups = 2,
                    .keys = 128,
                    .query_stages = 1,
                    .key_stages = has_dense_bias ? 2 : 3,
                    .value_stages = 2,
                    .bias_stages = 3};
        case 192:
            return {
                .warpgroups = 2, .keys = 64, .query_stages = 1, .key_stages = 2, .value_stages = 3, .bias_stages = 3};
        case 256:
            return {
                .warpgroups = 2, .keys = 64, .query_stages = 1, .key_stages = 2, .value_stages = 2, .bias_stages = 1};
    }
    throw std::logic_error("head dimension");
}

// kFewer: two MMA warpgroups instead of three.
template <int kHeadDim_, bool kHasDenseBias, bool kFewer = false>
struct FwdKernelTraits {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes = fwd_tile_sizes(kHeadDim, kHasDenseBias);
    static constexpr int kConsumerWarpgroups = kFewer ? 2 : kSizes.warpgroups;
    static constexpr int kRows = kConsumerWarpgroups * 64;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kQueryStages = kSizes.query_stages;
    static constexpr int kKeyStages = kSizes.key_stages;
    static constexpr int kValueStages = kSizes.value_stages;
    static constexpr int kBiasStages = kSizes.bias_stages;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    // Per thread. The consumers take what the producer releases of the registers that the CTA was launched with.
    static constexpr int kConsumerRegisters = kConsumerWarpgroups == 3 ? 160 : kHeadDim == 256 ? 224 : 208;
    static constexpr int kProducerRegisters =
        65536 / kThreads / 8 * 8 * (1 + kConsumerWarpgroups) - kConsumerWarpgroups * kConsumerRegisters;
    static_assert(kConsumerWarpgroups == 2 || kConsumerWarpgroups == 3);
    static constexpr bool kGathers = false;
};

// Gathered keys: an m_block has the rows of a key list.
template <int kHeadDim>
struct FwdGatherKernelTraits : FwdKernelTraits<kHeadDim, false, true> {
    static constexpr bool kGathers = true;
};

}  // namespace flash_dmattn::cuda::sm90
