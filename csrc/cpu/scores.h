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

// Of so few rows a product takes less time than to transpose its keys.
constexpr int64_t kFewRows = 8;
inline bool has_few_rows(const Sequence& sequence) { return sequence.rows <= kFewRows; }

// to = softmax_scale * <q_i, k_j>, but for pairs that causality hides. The tiles of forward and backward are cut otherwise,
// yet every number comes of the same product: a BLAS may sum in another order where a factor is smaller (a single row or
// column, as a rule), and what large scores differ by then is no small part of p. Of a sequence of few rows the keys are
// read, else the transposed ones.
template <typename acc_t>
void score_products(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query,
                    const Matrix<acc_t>& key, const Matrix<acc_t>& key_transposed, const Matrix<acc_t>& to);

// Room for a row of a tile's bias and mask, where they are not contiguous or of another type, and for its intervals.
template <typename acc_t>
struct PairScratch {
    Buffer<acc_t> bias;
    std::vector<uint8_t> visible;
    std::vector<int32_t> start, end;

    explicit PairScratch(int64_t keys) : bias(keys), visible(keys), start(keys), end(keys) {}
};

// The rows of a tile, taken one after the other while they are in the processor's nearest memory.
template <typename acc_t>
class ScoreRows {
public:
    ScoreRows(const AttentionParams& params, const Tile& tile, PairScratch<acc_t>& scratch);

    // Row i of softmax_scale * <q_i, k_j> becomes what the softmax sees; slope, where given, gets
    // d(capped score) / d(score).
    void finish(int64_t i, acc_t* x, acc_t* slope);

private:
    const acc_t* bias(int64_t i);
    const uint8_t* visible(int64_t i);
    const uint8_t* listed_visible(int64_t i);
    void hide_outside_intervals(int64_t i, acc_t* x) const;
    void prefetch(int64_t i) const;

    const AttentionParams& p_;
    const Tile& tile_;
    PairScratch<acc_t>& scratch_;
    const uint8_t* mask_at_ = nullptr;  // bytes, not bool: the compiler makes vector instructions of comparing those
    bool intervals_ = false;            // whether an interval hides some pair of the tile; they lie in the scratch then
    int64_t bias_at_ = 0;
    acc_t least_bias_ = 0;
    const acc_t* bias_row_ = nullptr;  // of the row before
};

}  // namespace flash_dmattn
