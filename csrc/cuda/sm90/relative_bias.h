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
    const int64_t width = view.grid_width;
    const auto fits = [&](int64_t tokens) {
        const int64_t new_rows = width % tokens == 0   ? 0
                                 : tokens % width == 0 ? tokens / width - 1
                                                       : (tokens - 2) / width + 1;
        return new_rows * (width - 1) <= (kMaxGridSpan - 1) * tokens;
    };
    return width % 16 == 0 && !view.is_matrix() && fits(64) && fits(128);
}

inline bool supports_relative_bias(const AttentionParams& p) {
    const RelativeBiasView& view = p.relative_bias;
    return (!view.has_grid() || supports_grid(view)) && !p.bias.present() && !p.lists.present() &&
           can_start_from_bias(p);
}

// The kind of bias that a kernel for tiles is compiled for.
inline BiasKind kernel_bias_kind(const AttentionParams& p) {
    if (p.bias.present()) return p.bias.kind;
    if (!p.relative_bias.present()) return BiasKind::kNone;
    return p.relative_bias.has_grid() ? BiasKind::kRelativeGrid : BiasKind::kRelative;
}

}  // namespace flash_dmattn::cuda::sm90
