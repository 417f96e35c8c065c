// A dense float32 bias beside 16-bit queries, which the sm80 kernels read score by score (RelativeBiasView).
#pragma once

#include "fallback_log.h"
#include "params.h"

namespace flash_dmattn::cuda::sm80 {

inline void report_bias_matrix(const AttentionParams& p) {
    if (!p.relative_bias.is_matrix() || !logs_fallbacks()) return;
    log_fallback(
        "float32 bias",
        "a dense attn_bias in float32 beside a 16-bit query is read score by score, and its gradient summed by "
        "atomics: pass it in query's dtype where rounding is acceptable");
}

}  // namespace flash_dmattn::cuda::sm80
