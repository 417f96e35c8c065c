// The calls that the backward of short sequences serves.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda::sm80 {

constexpr int kShortSeqlen = 64;  // most rows, and most keys

// Heads share no keys, and all batch elements have the same bias.
inline bool is_short(const BwdParams& p) {
    return p.seqlen_q <= kShortSeqlen && p.seqlen_k > 0 && p.seqlen_k <= kShortSeqlen && p.cu_seqlens_q == nullptr &&
           p.kv_heads == p.heads && p.softcap == 0 && p.bias.kind == BiasKind::kNone && p.relative_bias.batches == 1 &&
           !p.intervals.present() && !p.lists.present();
}

}  // namespace flash_dmattn::cuda::sm80
