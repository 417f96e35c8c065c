// The scores x_ij that the softmax sees: scaled, capped and biased, -inf where masked. Forward and backward share them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "linalg.h"
#include "params.h"
#include "relative_rows.h"
#include "tile.h"

namespace flash_dmattn {

// Whether the mask or the relative bias masks the whole tile, apart from causality, which bounds the loops.
bool is_fully_masked(const AttentionParams& params, const Tile& tile);

// For so few rows a product is faster than transposing its keys.
constexpr int64_t kFewRows = 8;
inline bool has_few_rows(const Sequence& sequence) { return sequence.rows <= kFewRows; }

// to = softmax_scale * <q_i, k_j>, [rows, keys], except where causality masks all. Uses `key` for a sequence of few
// rows, else `key_transposed`. Forward and backward have tiles of different sizes, but split them into the same
// products: a BLAS may sum in another order for other sizes, and with large scores the difference is a large relative
// error of p.
template <typename acc_t>
void score_products(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query,
                    const Matrix<acc_t>& key, const Matrix<acc_t>& key_transposed, const Matrix<acc_t>& to);

// Scratch memory for a row of a tile's bias and mask, where they are not contiguous or need conversion, and for the key
// intervals.
template <typename acc_t>
struct ScoreScratch {
    Buffer<acc_t> bias;
    std::vector<uint8_t> visible;
    std::vector<int32_t> start, end;
    RelativeScratch<acc_t> relative;

    explicit ScoreScratch(int64_t keys) : bias(keys), visible(keys), start(keys), end(keys) {}
};

// Completes the scores of a tile row by row, while a row is in the L1 cache.
template <typename acc_t>
class ScoreRows {
public:
    ScoreRows(const AttentionParams& params, const Tile& tile, ScoreScratch<acc_t>& scratch);

    // Applies softcap, biases and masks to row i of softmax_scale * <q_i, k_j>, [keys]. slope, if not null, receives
    // d(capped score) / d(score).
    void finish(int64_t i, acc_t* x, acc_t* slope);

private:
    const acc_t* bias(int64_t i);
    const uint8_t* visible(int64_t i);
    const uint8_t* gathered_visible(int64_t i);
    void apply_intervals(int64_t i, acc_t* x) const;
    void prefetch(int64_t i) const;

    const AttentionParams& p_;
    const Tile& tile_;
    ScoreScratch<acc_t>& scratch_;
    const uint8_t* mask_at_ = nullptr;  // bytes: comparisons of bool are not vectorized
    bool intervals_ = false;            // whether a key interval masks some score of the tile
    int64_t bias_at_ = 0;
    acc_t lowest_bias_ = 0;
    const acc_t* bias_row_ = nullptr;  // of the previous row
    std::optional<RelativeRows<acc_t>> relative_;
};

}  // namespace flash_dmattn
