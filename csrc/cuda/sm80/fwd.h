// What the forward's instantiations and their dispatcher share.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace flash_dmattn::cuda {

// Whether all rows of the heads that share keys fit one small tile, and how many heads then share it.
struct FwdPacking {
    bool few_rows;
    int heads;
};
FwdPacking fwd_packing(const AttentionParams& params);

// One instantiation a file, written by scripts/generate_kernels.py.
template <typename T, int kHeadDim>
void run_fwd(const FwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
