// The float32 sums of dK and dV of the backward over key lists: BwdArgs::dkv_accum, [2, dkv_rows, Hkv, dkv_cols].
#pragma once

#include "cuda/plan.h"
#include "sequence.cuh"

namespace flash_dmattn::cuda {

// At key 0 of a sequence and KV head. `cols` is dkv_cols, which a kernel knows at compile time.
struct DkvAccum {
    int64_t row_stride;
    float *dkey, *dvalue;

    __device__ __forceinline__ DkvAccum(const BwdArgs& p, const Sequence& s, int kv_head, int64_t cols)
        : row_stride(p.kv_heads * cols) {
        const int64_t first_key = p.cu_seqlens_k == nullptr ? s.batch * p.seqlen_k : s.first_key;
        dkey = p.dkv_accum + first_key * row_stride + kv_head * cols;
        dvalue = dkey + p.dkv_rows * row_stride;
    }
};

}  // namespace flash_dmattn::cuda
