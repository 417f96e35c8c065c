// x_ij: scaled and capped scores plus bias, -inf where a pair is invisible. Forward and backward both ask here.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg.h"
#include "params.h"
#include "work.h"

namespace flash_dmattn {

// Whether the mask hides the whole tile. Causality is a matter of loop bounds.
bool mask_hides(const AttentionParams& params, const Tile& tile);

// Room for a row of a tile's bias and mask, where they are not contiguous or of another type.
template <typename acc_t>
struct PairScratch {
    std::vector<acc_t> bias;
    std::vector<uint8_t> visible;

    explicit PairScratch(int64_t keys) : bias(keys), visible(keys) {}
};

// x = what the softmax sees of the tile; slope, where given, is d(capped score) / d(score), laid out like x.
template <typename acc_t>
void score_tile(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query,
                const Matrix<acc_t>& key_transposed, PairScratch<acc_t>& scratch, const Matrix<acc_t>& x, acc_t* slope);

}  // namespace flash_dmattn
