#include "scores.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace flash_dmattn {
namespace {

template <typename acc_t>
constexpr acc_t kHidden = -std::numeric_limits<acc_t>::infinity();

// to = bias where visible, else hidden; written so that the compiler makes vector instructions of it.
template <typename acc_t>
void select(const bool* visible, const acc_t* bias, acc_t* to, int64_t n) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(visible);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
        const acc_t b = bias[j];
        to[j] = bytes[j] != 0 ? b : kHidden<acc_t>;
    }
}

// Row after row of a tile's bias, -inf where the mask hides the pair; null where there is neither bias nor mask.
template <typename acc_t>
class PairRows {
public:
    PairRows(const AttentionParams& params, const Tile& tile, acc_t* scratch)
        : mask_(params.mask), bias_(params.bias), keys_(tile.keys), scratch_(scratch) {
        if (mask_.present()) mask_at_ = offset_of(mask_, tile, params.heads);
        if (bias_.present()) bias_at_ = offset_of(bias_, tile, params.heads);
    }

    const acc_t* row(int64_t i) {
        if (!mask_.present() && !bias_.present()) return nullptr;
        const bool every_row_alike = mask_.row_stride == 0 && bias_.row_stride == 0;
        if (i > 0 && every_row_alike) return current_;
        current_ = bias_row(i);
        if (mask_.present()) current_ = hide(current_, i);
        return current_;
    }

private:
    const acc_t* bias_row(int64_t i) {
        if (!bias_.present()) {
            std::memset(scratch_, 0, keys_ * sizeof(acc_t));
            return scratch_;
        }
        const int64_t at = bias_at_ + i * bias_.row_stride;
        if (bias_.col_stride == 1) return load<acc_t>(bias_.data, bias_.dtype, at, keys_, 1, keys_, scratch_).data;
        // A column of `keys_` rows of one element, gathered into a contiguous row.
        const Matrix<acc_t> column = load<acc_t>(bias_.data, bias_.dtype, at, bias_.col_stride, keys_, 1, scratch_);
        for (int64_t j = 0; j < keys_; ++j) scratch_[j] = *column.row(j);
        return scratch_;
    }

    const acc_t* hide(const acc_t* bias, int64_t i) {
        const bool* visible = static_cast<const bool*>(mask_.data) + mask_at_ + i * mask_.row_stride;
        if (mask_.col_stride == 1) {
            select(visible, bias, scratch_, keys_);
        } else {
            for (int64_t j = 0; j < keys_; ++j)
                scratch_[j] = visible[j * mask_.col_stride] ? bias[j] : kHidden<acc_t>;
        }
        return scratch_;
    }

    const MaskView& mask_;
    const BiasView& bias_;
    int64_t keys_;
    acc_t* scratch_;
    int64_t mask_at_ = 0;
    int64_t bias_at_ = 0;
    const acc_t* current_ = nullptr;
};

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
void score_tile(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query, const Matrix<acc_t>& key,
                acc_t* bias_row, const Matrix<acc_t>& x, acc_t* slope) {
    product_nt<acc_t>(query, key, params.softmax_scale, x);
    PairRows<acc_t> pairs(params, tile, bias_row);
    for (int64_t i = 0; i < tile.rows; ++i) {
        acc_t* row = x.row(i);
        if (params.softcap > 0) {
            row_softcap<acc_t>(row, slope ? slope + i * x.stride : nullptr, params.softcap, tile.keys);
        }
        if (const acc_t* bias = pairs.row(i)) row_add_bias(row, bias, tile.keys);
        if (params.is_causal) {
            const int64_t end = std::max<int64_t>(tile.sequence.causal_end(tile.row + i) - tile.key, 0);
            if (end < tile.keys) std::fill(row + end, row + tile.keys, kHidden<acc_t>);
        }
    }
}

template void score_tile(const AttentionParams&, const Tile&, const Matrix<float>&, const Matrix<float>&, float*,
                         const Matrix<float>&, float*);
template void score_tile(const AttentionParams&, const Tile&, const Matrix<double>&, const Matrix<double>&, double*,
                         const Matrix<double>&, double*);

}  // namespace flash_dmattn
