// Ownership of dbias entries.
#pragma once

#include "cuda/common/dquery_tiles.cuh"

namespace flash_dmattn::cuda::sm80 {

// Whether every entry of a dense bias belongs to one batch element and one query head: no sum over either is needed.
inline bool is_unshared_dbias(const BwdParams& p) {
    return p.dbias.heads == p.heads && (p.cu_seqlens_q != nullptr || p.dbias.batches == p.batch);
}

}  // namespace flash_dmattn::cuda::sm80
