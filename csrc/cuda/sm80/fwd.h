// What the forward's instantiations and their dispatcher share.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace flash_dmattn::cuda {

// How many query heads share a tile, and how many rows that makes of a key/value head's, or of a head's.
struct FwdPacking {
    int64_t rows;
    int heads;
};
constexpr int64_t kFewRows = 64;
FwdPacking fwd_packing(const AttentionParams& params);

// One instantiation a file, written by scripts/generate_kernels.py.
template <typename T, int kHeadDim>
void run_fwd(const FwdParams& params, cudaStream_t stream);
// The same over params.lists.
template <typename T, int kHeadDim>
void run_gather_fwd(const FwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
