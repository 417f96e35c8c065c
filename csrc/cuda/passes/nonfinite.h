// Which keys have a value that is not finite. The probability of a pair that a mask hides is 0, and 0 times NaN or infinity
// is NaN: a kernel must clear such values. Who knows that there are none need not clear any.
#pragma once

#include <cuda_runtime.h>

#include "../plan.h"

namespace flash_dmattn::cuda {

// Words of 32 keys, of one batch element and key/value head.
inline int64_t nonfinite_words(const AttentionParams& params) { return (params.seqlen_k + 31) / 32; }

// Fills args.nonfinite_values. A key beyond its sequence counts as one whose value is not finite.
void find_nonfinite_values(const FwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
