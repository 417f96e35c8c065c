#include "relative_rows.h"

#include <limits>

namespace flash_dmattn {
namespace {

template <typename acc_t>
bool masks_all(const AttentionParams& params, const Tile& tile) {
    const DistanceLine line(params.relative_bias, tile);
    const acc_t* table = relative_table<acc_t>(params, tile);
    const acc_t least = lowest<acc_t>(kDataType<acc_t>);
    const auto masks = [&](int64_t entry) { return table[entry] <= least; };
    if (line.below > 0 && !masks(0)) return false;
    if (line.above < line.size && !masks(params.relative_bias.size() - 1)) return false;
    for (int64_t t = 0; t < line.above - line.below; ++t)
        if (!masks(line.entry + t)) return false;
    return true;
}

}  // namespace

bool is_masked_by_relative_bias(const AttentionParams& params, const Tile& tile) {
    if (!params.relative_bias.present() || !reads_line(params.relative_bias, tile)) return false;
    return params.dtype == DataType::kFloat64 ? masks_all<double>(params, tile) : masks_all<float>(params, tile);
}

template <typename acc_t>
RelativeRows<acc_t>::RelativeRows(const AttentionParams& params, const Tile& tile, RelativeScratch<acc_t>& scratch)
    : view_(params.relative_bias), tile_(tile), table_(relative_table<acc_t>(params, tile)),
      is_line_(reads_line(view_, tile)), scratch_(scratch) {
    scratch.resize(view_, tile);
    if (!is_line_) {
        set_offsets(view_, tile, scratch.offsets);
        return;
    }
    const DistanceLine line(view_, tile);
    acc_t* values = scratch.values.data();
    std::fill_n(values, line.below, table_[0]);
    std::copy_n(table_ + line.entry, line.above - line.below, values + line.below);
    std::fill(values + line.above, values + line.size, table_[view_.size() - 1]);
}

template <typename acc_t>
const acc_t* RelativeRows<acc_t>::values(int64_t i) {
    acc_t* values = scratch_.values.data();
    if (is_line_) return values + (tile_.rows - 1 - i);
    const int64_t* offsets = scratch_.offsets.data();
    const int64_t base = entry_base(view_, tile_, i), last = view_.size() - 1;
    for (int64_t j = 0; j < tile_.keys; ++j) values[j] = table_[std::clamp<int64_t>(base - offsets[j], 0, last)];
    return values;
}

template <typename acc_t>
void RelativeRows<acc_t>::apply(int64_t i, acc_t* __restrict x) {
    constexpr acc_t masked = -std::numeric_limits<acc_t>::infinity();
    const acc_t least = lowest<acc_t>(kDataType<acc_t>);
    const acc_t* __restrict bias = values(i);
    for (int64_t j = 0; j < tile_.keys; ++j) {
        const acc_t score = x[j], b = bias[j], sum = score + b;
        x[j] = (score == masked) | (b <= least) ? masked : sum;  // a NaN entry does not show a masked score
    }
}

template class RelativeRows<float>;
template class RelativeRows<double>;

}  // namespace flash_dmattn
