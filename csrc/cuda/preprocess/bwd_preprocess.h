// What precedes the main kernel of the backward: D_i = <do_i, o_i> - dlse_i of every row, and zeros for the sums in the
// workspace.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// Writes args.delta, and zeroes `zeroed_bytes` bytes, a multiple of 16, from the 16-byte aligned `zeroed` on. An
// inactive launch of a device-side dispatch writes nothing.
void preprocess_bwd(const BwdArgs& args, void* zeroed, int64_t zeroed_bytes, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
