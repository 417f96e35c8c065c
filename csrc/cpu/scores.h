// x_ij: scaled and capped scores plus bias, -inf where a pair is invisible. Forward and backward both ask here.
#pragma once

#include "linalg.h"
#include "params.h"
#include "work.h"

namespace flash_dmattn {

// Whether the mask hides the whole tile. Causality is a matter of loop bounds.
bool mask_hides(const AttentionParams& params, const Tile& tile);

// x = what the softmax sees of the tile; slope, where given, is d(capped score) / d(score), laid out like x. bias_row
// is scratch for one row of the tile.
template <typename acc_t>
void score_tile(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query, const Matrix<acc_t>& key,
                acc_t* bias_row, const Matrix<acc_t>& x, acc_t* slope);

}  // namespace flash_dmattn
