// Tile sizes of the forward.
#pragma once

#include <stdexcept>

namespace flash_dmattn::cuda::sm90 {

// `rows` query rows, 64 for each warp group that multiplies, and `keys` keys at a time. In shared memory lie `query_stages`
// tiles of queries, `stages` tiles of keys, as many of values and, of a dense bias, `bias_stages` tiles of 64 keys for each
// group.
struct FwdTileSizes {
    int rows, keys;
    int query_stages;
    int stages;
    int bias_stages;
};

// A tile of dense biases costs shared memory and registers.
constexpr FwdTileSizes fwd_tile_sizes(int head_dim, bool has_dense_bias) {
    switch (head_dim) {
        case 32: return {.rows = 192, .keys = 128, .query_stages = 2, .stages = 4, .bias_stages = 4};
        case 64:
            return {.rows = has_dense_bias ? 128 : 192, .keys = 128, .query_stages = 1, .stages = 2, .bias_stages = 4};
        case 96: return {.rows = 128, .keys = 128, .query_stages = 1, .stages = 2, .bias_stages = 4};
        case 128: return {.rows = 128, .keys = 128, .query_stages = 1, .stages = 2, .bias_stages = 3};
        case 192: return {.rows = 128, .keys = 64, .query_stages = 1, .stages = 2, .bias_stages = 3};
        case 256: return {.rows = 128, .keys = 64, .query_stages = 1, .stages = 2, .bias_stages = 1};
    }
    throw std::logic_error("head dimension");
}

template <int kHeadDim_, bool kHasDenseBias>
struct FwdTile {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes = fwd_tile_sizes(kHeadDim, kHasDenseBias);
    static constexpr int kRows = kSizes.rows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kQueryStages = kSizes.query_stages;
    static constexpr int kStages = kSizes.stages;
    static constexpr int kBiasStages = kSizes.bias_stages;
    static constexpr int kConsumers = kRows / 64;  // warp groups that multiply
    static constexpr int kThreads = (1 + kConsumers) * 128;
    // Of a thread that loads and of one that multiplies.
    static_assert(kConsumers == 2 || kConsumers == 3);
    static constexpr int kProducerRegisters = kConsumers == 2 ? 56 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : 160;
};

}  // namespace flash_dmattn::cuda::sm90
