#include "scores.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace flash_dmattn {
namespace {

// Row after row of a tile's bias and mask, contiguous; null where there is none.
template <typename acc_t>
class PairRows {
public:
    PairRows(const AttentionParams& params, const Tile& tile, PairScratch<acc_t>& scratch)
        : mask_(params.mask), bias_(params.bias), keys_(tile.keys), rows_(tile.rows), scratch_(scratch) {
        if (mask_.present()) mask_at_ = static_cast<const uint8_t*>(mask_.data) + offset_of(mask_, tile, params.heads);
        if (bias_.present()) bias_at_ = offset_of(bias_, tile, params.heads);
    }

    const acc_t* bias(int64_t i) {
        if (!bias_.present()) return nullptr;
        if (i > 0 && bias_.row_stride == 0) return bias_row_;
        const int64_t at = bias_at_ + i * bias_.row_stride;
        acc_t* row = scratch_.bias.data();
        if (bias_.col_stride == 1) {
            bias_row_ = load<acc_t>(bias_.data, bias_.dtype, at, keys_, 1, keys_, row).data;
        } else {
            const auto column = load<acc_t>(bias_.data, bias_.dtype, at, bias_.col_stride, keys_, 1, row);
            for (int64_t j = 0; j < keys_; ++j) row[j] = *column.row(j);
            bias_row_ = row;
        }
        return bias_row_;
    }

    // Bytes, not bool: the compiler makes vector instructions of comparing those.
    const uint8_t* visible(int64_t i) {
        if (!mask_.present()) return nullptr;
        const uint8_t* row = mask_at_ + i * mask_.row_stride;
        if (mask_.col_stride == 1) {
            prefetch(i + kRowsAhead);
            return row;
        }
        for (int64_t j = 0; j < keys_; ++j) scratch_.visible[j] = row[j * mask_.col_stride];
        return scratch_.visible.data();
    }

private:
    static constexpr int64_t kRowsAhead = 8;

    // A tile's rows of a mask lie far apart: the processor does not see the next one coming.
    void prefetch(int64_t i) const {
        if (i >= rows_) return;
        const uint8_t* row = mask_at_ + i * mask_.row_stride;
        for (int64_t j = 0; j < keys_; j += 64) __builtin_prefetch(row + j);
    }

    const MaskView& mask_;
    const BiasView& bias_;
    int64_t keys_, rows_;
    PairScratch<acc_t>& scratch_;
    const uint8_t* mask_at_ = nullptr;
    int64_t bias_at_ = 0;
    const acc_t* bias_row_ = nullptr;
};

// x += bias where a pair is visible, else -inf: chosen, not added, for the score of an invisible pair may be NaN.
template <typename acc_t>
void apply_pairs(acc_t* __restrict x, const acc_t* __restrict bias, const uint8_t* __restrict visible, int64_t n) {
    constexpr acc_t hidden = -std::numeric_limits<acc_t>::infinity();
    if (bias != nullptr && visible != nullptr) {
        for (int64_t j = 0; j < n; ++j) {
            const acc_t b = bias[j], sum = x[j] + b;
            x[j] = (visible[j] != 0) & (b != hidden) ? sum : hidden;
        }
    } else if (bias != nullptr) {
        for (int64_t j = 0; j < n; ++j) {
            const acc_t b = bias[j], sum = x[j] + b;
            x[j] = b != hidden ? sum : hidden;
        }
    } else if (visible != nullptr) {
        for (int64_t j = 0; j < n; ++j) {
            const acc_t score = x[j];
            x[j] = visible[j] != 0 ? score : hidden;
        }
    }
}

bool any(const bool* values, int64_t n, int64_t stride) {
    if (stride == 1) return std::memchr(values, 1, n) != nullptr;
    for (int64_t j = 0; j < n; ++j)
        if (values[j * stride]) return true;
    return false;
}

}  // namespace

bool mask_hides(const AttentionParams& params, const Tile& tile) {
    const MaskView& mask = params.mask;
    if (!mask.present()) return false;
    const bool* visible = static_cast<const bool*>(mask.data) + offset_of(mask, tile, params.heads);
    const int64_t rows = mask.row_stride == 0 ? 1 : tile.rows;
    const int64_t keys = mask.col_stride == 0 ? 1 : tile.keys;
    for (int64_t i = 0; i < rows; ++i)
        if (any(visible + i * mask.row_stride, keys, mask.col_stride)) return false;
    return true;
}

template <typename acc_t>
void score_tile(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query,
                const Matrix<acc_t>& key_transposed, PairScratch<acc_t>& scratch, const Matrix<acc_t>& x, acc_t* slope) {
    product<acc_t>(query, key_transposed, params.softmax_scale, x);
    PairRows<acc_t> pairs(params, tile, scratch);
    for (int64_t i = 0; i < tile.rows; ++i) {
        acc_t* row = x.row(i);
        if (params.softcap > 0) {
            row_softcap<acc_t>(row, slope ? slope + i * x.stride : nullptr, params.softcap, tile.keys);
        }
        apply_pairs(row, pairs.bias(i), pairs.visible(i), tile.keys);
        if (params.is_causal) {
            const int64_t end = std::max<int64_t>(tile.sequence.causal_end(tile.row + i) - tile.key, 0);
            if (end < tile.keys) std::fill(row + end, row + tile.keys, -std::numeric_limits<acc_t>::infinity());
        }
    }
}

template void score_tile(const AttentionParams&, const Tile&, const Matrix<float>&, const Matrix<float>&,
                         PairScratch<float>&, const Matrix<float>&, float*);
template void score_tile(const AttentionParams&, const Tile&, const Matrix<double>&, const Matrix<double>&,
                         PairScratch<double>&, const Matrix<double>&, double*);

}  // namespace flash_dmattn
