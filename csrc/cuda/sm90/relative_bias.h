// Which calls with a relative bias the sm90 kernels support, in both directions.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda::sm90 {

// Whether Q K^T can be accumulated onto a bias divided by the softmax scale.
inline bool can_start_from_bias(const AttentionParams& p) {
    constexpr double kLeastScale = 1e-30;  // a bias divided by it stays finite
    return p.softcap == 0 && p.softmax_scale >= kLeastScale;
}

inline bool supports_relative_bias(const AttentionParams& p) {
    return !p.relative_bias.has_grid() && !p.bias.present() && !p.lists.present() && can_start_from_bias(p);
}

// The kind of bias that a kernel for tiles is compiled for.
inline BiasKind kernel_bias_kind(const AttentionParams& p) {
    if (p.bias.present()) return p.bias.kind;
    return p.relative_bias.present() ? BiasKind::kRelative : BiasKind::kNone;
}

}  // namespace flash_dmattn::cuda::sm90
