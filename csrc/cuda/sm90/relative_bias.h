// Which calls with a relative bias the sm90 kernels support, in both directions.
#pragma once

#include "cuda/softmax/relative_bias_segment.cuh"
#include "params.h"

namespace flash_dmattn::cuda::sm90 {

// Whether Q K^T can be accumulated onto a bias divided by the softmax scale.
inline bool can_start_from_bias(const AttentionParams& p) {
    constexpr double kLeastScale = 1e-30;  // a bias divided by it stays finite
    return p.softcap == 0 && p.softmax_scale >= kLeastScale;
}

// Whether GridBiasSegment holds the entries of each block. Blocks have 64 or 128 rows or keys and begin at a multiple.
inline bool supports_grid(const RelativeBiasView& view) {
    constexpr int64_t kMaxWidth = 1 << 24;  // spans are computed in 32 bits
    if (view.is_matrix() || view.grid_width % 16 != 0 || view.grid_width > kMaxWidth) return false;
    const int width = static_cast<int>(view.grid_width);
    return grid_span(width, 64) <= kMaxGridSpan * 64 && grid_span(width, 128) <= kMaxGridSpan * 128;
}

inline bool supports_relative_bias(const AttentionParams& p) {
    const RelativeBiasView& view = p.relative_bias;
    return (!view.has_grid() || supports_grid(view)) && !p.bias.present() && !p.lists.present() &&
           can_start_from_bias(p) && p.softmax_scale <= 1;
}

// The kind of bias that a kernel for tiles is compiled for.
inline BiasKind kernel_bias_kind(const AttentionParams& p) {
    if (p.bias.present()) return p.bias.kind;
    if (!p.relative_bias.present()) return BiasKind::kNone;
    return p.relative_bias.has_grid() ? BiasKind::kRelativeGrid : BiasKind::kRelative;
}

}  // namespace flash_dmattn::cuda::sm90
