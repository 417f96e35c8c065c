// Traits sizes of the forward.
#pragma once

#include <stdexcept>

namespace flash_dmattn::cuda::sm90 {

// `groups` warp groups multiply, 64 query rows each, by 64 or 128 keys at a time. In shared memory lie `query_stages` tiles
// of queries, `key_stages` of keys, `value_stages` of values and, of a dense bias, `bias_stages` of 64 keys for each group.
struct FwdTileSizes {
    int groups, keys;
    int query_stages;
    int key_stages;
    int value_stages;
    int bias_stages;
};

// For many rows. A tile of dense biases costs shared memory and registers.
constexpr FwdTileSizes fwd_tile_sizes(int head_dim, bool has_dense_bias) {
    switch (head_dim) {
        case 32:
            return {.groups = 3, .keys = 128, .query_stages = 2, .key_stages = 4, .value_stages = 4, .bias_stages = 4};
        case 64:
            return {.groups = has_dense_bias ? 2 : 3,
                    .keys = 128,
                    .query_stages = 1,
                    .key_stages = 3,
                    .value_stages = 3,
                    .bias_stages = 4};
        case 96:
            return {.groups = 2, .keys = 128, .query_stages = 1, .key_stages = 2, .value_stages = 3, .bias_stages = 4};
        case 128:
            return {.groups = 2,
                    .keys = 128,
                    .query_stages = 1,
                    .key_stages = has_dense_bias ? 2 : 3,
                    .value_stages = 2,
                    .bias_stages = 3};
        case 192:
            return {.groups = 2, .keys = 64, .query_stages = 1, .key_stages = 2, .value_stages = 3, .bias_stages = 3};
        case 256:
            return {.groups = 2, .keys = 64, .query_stages = 1, .key_stages = 2, .value_stages = 2, .bias_stages = 1};
    }
    throw std::logic_error("head dimension");
}

// kFewer: two groups where there would be three.
template <int kHeadDim_, bool kHasDenseBias, bool kFewer = false>
struct FwdKernelTraits {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes = fwd_tile_sizes(kHeadDim, kHasDenseBias);
    static constexpr int kConsumerWarpgroups = kFewer ? 2 : kSizes.groups;  // warp groups that multiply
    static constexpr int kRows = kConsumerWarpgroups * 64;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kQueryStages = kSizes.query_stages;
    static constexpr int kKeyStages = kSizes.key_stages;
    static constexpr int kValueStages = kSizes.value_stages;
    static constexpr int kBiasStages = kSizes.bias_stages;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    // Of a thread that loads and of one that multiplies: of all groups together what a block is launched with.
    static constexpr int kConsumerRegisters = kConsumerWarpgroups == 3 ? 160 : kHeadDim == 256 ? 224 : 208;
    static constexpr int kProducerRegisters =
        65536 / kThreads / 8 * 8 * (1 + kConsumerWarpgroups) - kConsumerWarpgroups * kConsumerRegisters;
    static_assert(kConsumerWarpgroups == 2 || kConsumerWarpgroups == 3);
    static constexpr bool kGathers = false;
};

// For gathered keys: the rows are those of a tile of lists.
template <int kHeadDim>
struct FwdGatherKernelTraits : FwdKernelTraits<kHeadDim, false, true> {
    static constexpr bool kGathers = true;
};

}  // namespace flash_dmattn::cuda::sm90
