#include "scores.h"

#include <algorithm>
#include <limits>

namespace flash_dmattn {
namespace {

constexpr int64_t kRowsAhead = 8;
constexpr int64_t kProductRows = 128, kProductKeys = 256;  // tiles start at multiples of both

// x += bias where visible, else -inf. A masked score may be NaN, so -inf is selected, not added. A bias masks where it
// is at most `lowest`, the lowest finite number of its type, which additive masks contain. A NaN bias masks nothing.
template <typename acc_t>
void apply_mask_and_bias(acc_t* __restrict x, const acc_t* __restrict bias, acc_t lowest,
                         const uint8_t* __restrict visible, int64_t n) {
    constexpr acc_t masked = -std::numeric_limits<acc_t>::infinity();
    if (bias != nullptr && visible != nullptr) {
        for (int64_t j = 0; j < n; ++j) {
            const acc_t b = bias[j], sum = x[j] + b;
            x[j] = (visible[j] != 0) & !(b <= lowest) ? sum : masked;
        }
    } else if (bias != nullptr) {
        for (int64_t j = 0; j < n; ++j) {
            const acc_t b = bias[j], sum = x[j] + b;
            x[j] = b <= lowest ? masked : sum;
        }
    } else if (visible != nullptr) {
        for (int64_t j = 0; j < n; ++j) {
            const acc_t score = x[j];
            x[j] = visible[j] != 0 ? score : masked;
        }
    }
}

// Calls f(j, start, end) with the interval of each key of the tile.
template <typename F>
void for_each_interval(const AttentionParams& params, const Tile& tile, F&& f) {
    const IntervalView& view = params.intervals;
    const int64_t at = offset_of(view, tile.sequence, tile.head, params.heads);
    for (int64_t j = 0; j < tile.keys; ++j) {
        const int64_t key = at + (tile.gathered != nullptr ? tile.gathered[j] : tile.key + j) * view.col_stride;
        f(j, view.start[key], view.end[key]);
    }
}

bool intervals_mask_all(const AttentionParams& params, const Tile& tile) {
    bool seen = false;
    for_each_interval(params, tile, [&](int64_t, int64_t start, int64_t end) {
        seen |= std::max(start, tile.row) < std::min(end, tile.row + tile.rows);
    });
    return !seen;
}

// Whether any byte is not 0. PyTorch treats any byte but 0 as True, so the values are no bool.
bool any(const uint8_t* values, int64_t n, int64_t stride) {
    constexpr int64_t kChunk = 256;
    if (stride == 1) {
        for (int64_t j = 0; j < n; j += kChunk) {
            uint8_t some = 0;
            for (int64_t i = j; i < std::min(j + kChunk, n); ++i) some |= values[i];
            if (some != 0) return true;
        }
        return false;
    }
    for (int64_t j = 0; j < n; ++j)
        if (values[j * stride] != 0) return true;
    return false;
}

}  // namespace

bool is_fully_masked(const AttentionParams& params, const Tile& tile) {
    if (is_masked_by_relative_bias(params, tile)) return true;
    if (params.intervals.present()) return intervals_mask_all(params, tile);
    const MaskView& mask = params.mask;
    if (!mask.present()) return false;
    const auto* visible = static_cast<const uint8_t*>(mask.data) + offset_of(mask, tile, params.heads);
    const int64_t rows = mask.row_stride == 0 ? 1 : tile.rows;
    const int64_t keys = mask.col_stride == 0 ? 1 : tile.keys;
    for (int64_t i = 0; i < rows; ++i)
        if (any(visible + i * mask.row_stride, keys, mask.col_stride)) return false;
    return true;
}

template <typename acc_t>
void score_products(const AttentionParams& params, const Tile& tile, const Matrix<acc_t>& query,
                    const Matrix<acc_t>& key, const Matrix<acc_t>& key_transposed, const Matrix<acc_t>& to) {
    if (has_few_rows(tile.sequence)) return row_products<acc_t>(query, stored(key), params.softmax_scale, to);
    for (int64_t i = 0; i < tile.rows; i += kProductRows) {
        const int64_t rows = std::min(kProductRows, tile.rows - i);
        const int64_t last = tile.row + i + rows - 1;
        const int64_t end = params.is_causal ? tile.keys_before(tile.sequence.causal_end(last)) : tile.keys;
        for (int64_t j = 0; j < end; j += kProductKeys) {
            const int64_t keys = std::min(kProductKeys, end - j);
            product<acc_t>({query.row(i), rows, query.cols, query.stride},
                           {key_transposed.data + j, key_transposed.rows, keys, key_transposed.stride},
                           params.softmax_scale, {to.row(i) + j, rows, keys, to.stride});
        }
    }
}

template <typename acc_t>
ScoreRows<acc_t>::ScoreRows(const AttentionParams& params, const Tile& tile, ScoreScratch<acc_t>& scratch)
    : p_(params), tile_(tile), scratch_(scratch) {
    if (p_.mask.present()) mask_at_ = static_cast<const uint8_t*>(p_.mask.data) + offset_of(p_.mask, tile, p_.heads);
    if (p_.bias.present()) {
        bias_at_ = offset_of(p_.bias, tile, p_.heads);
        lowest_bias_ = lowest<acc_t>(p_.bias.dtype);
    }
    if (p_.relative_bias.present()) relative_.emplace(p_, tile, scratch.relative);
    if (p_.intervals.present()) {
        for_each_interval(p_, tile, [&](int64_t j, int32_t start, int32_t end) {
            scratch_.start[j] = start;
            scratch_.end[j] = end;
            intervals_ |= start > tile.row || end < tile.row + tile.rows;
        });
    }
}

template <typename acc_t>
void ScoreRows<acc_t>::finish(int64_t i, acc_t* x, acc_t* slope) {
    if (p_.softcap > 0) row_softcap<acc_t>(x, slope, p_.softcap, tile_.keys);
    const uint8_t* seen = tile_.row_words != nullptr ? gathered_visible(i) : visible(i);
    apply_mask_and_bias(x, bias(i), lowest_bias_, seen, tile_.keys);
    if (relative_) relative_->apply(i, x);
    if (intervals_) apply_intervals(i, x);
    if (p_.is_causal) {
        const int64_t end = tile_.keys_before(tile_.sequence.causal_end(tile_.row + i));
        if (end < tile_.keys) std::fill(x + end, x + tile_.keys, -std::numeric_limits<acc_t>::infinity());
    }
}

template <typename acc_t>
void ScoreRows<acc_t>::apply_intervals(int64_t i, acc_t* __restrict x) const {
    const int32_t* __restrict start = scratch_.start.data();
    const int32_t* __restrict end = scratch_.end.data();
    const int32_t row = static_cast<int32_t>(tile_.row + i);
    for (int64_t j = 0; j < tile_.keys; ++j) {
        const acc_t score = x[j];
        x[j] = (start[j] <= row) & (row < end[j]) ? score : -std::numeric_limits<acc_t>::infinity();
    }
}

// Row i of the bias, contiguous; null without a bias.
template <typename acc_t>
const acc_t* ScoreRows<acc_t>::bias(int64_t i) {
    const BiasView& bias = p_.bias;
    if (!bias.present()) return nullptr;
    if (i > 0 && bias.row_stride == 0) return bias_row_;
    const int64_t at = bias_at_ + i * bias.row_stride;
    acc_t* row = scratch_.bias.data();
    if (tile_.gathered != nullptr) {
        bias_row_ = gather<acc_t>(bias.data, bias.dtype, at, bias.col_stride, tile_.gathered, tile_.keys, 1, row).data;
    } else if (bias.col_stride == 1) {
        bias_row_ = load<acc_t>(bias.data, bias.dtype, at, tile_.keys, 1, tile_.keys, row).data;
    } else {
        const auto column = load<acc_t>(bias.data, bias.dtype, at, bias.col_stride, tile_.keys, 1, row);
        for (int64_t j = 0; j < tile_.keys; ++j) row[j] = *column.row(j);
        bias_row_ = row;
    }
    return bias_row_;
}

// Row i of the mask, contiguous; null without a mask.
template <typename acc_t>
const uint8_t* ScoreRows<acc_t>::visible(int64_t i) {
    const MaskView& mask = p_.mask;
    if (!mask.present()) return nullptr;
    const uint8_t* row = mask_at_ + i * mask.row_stride;
    if (mask.col_stride == 1) {
        prefetch(i + kRowsAhead);
        return row;
    }
    for (int64_t j = 0; j < tile_.keys; ++j) scratch_.visible[j] = row[j * mask.col_stride];
    return scratch_.visible.data();
}

// The bits of row i for the gathered keys, as bytes.
template <typename acc_t>
const uint8_t* ScoreRows<acc_t>::gathered_visible(int64_t i) {
    constexpr int64_t kWords = KeyListsView::kRows / 32;
    const uint32_t* words = tile_.row_words + i / 32;
    uint8_t* visible = scratch_.visible.data();
    for (int64_t j = 0; j < tile_.keys; ++j) visible[j] = words[j * kWords] >> (i % 32) & 1;
    return visible;
}

// The hardware prefetcher does not recognize rows of a mask, which are far apart.
template <typename acc_t>
void ScoreRows<acc_t>::prefetch(int64_t i) const {
    if (i >= tile_.rows) return;
    const uint8_t* row = mask_at_ + i * p_.mask.row_stride;
    for (int64_t j = 0; j < tile_.keys; j += 64) __builtin_prefetch(row + j);
}

template void score_products(const AttentionParams&, const Tile&, const Matrix<float>&, const Matrix<float>&,
                             const Matrix<float>&, const Matrix<float>&);
template void score_products(const AttentionParams&, const Tile&, const Matrix<double>&, const Matrix<double>&,
                             const Matrix<double>&, const Matrix<double>&);
template class ScoreRows<float>;
template class ScoreRows<double>;

}  // namespace flash_dmattn
