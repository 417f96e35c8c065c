// Finds the distances outside which a relative bias of one dimension masks all scores: kernels do not visit the blocks
// there (VisibleDistances in cuda/softmax/relative_bias.cuh).
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// The ranges that find_visible_distances writes, [{B|1}, {H|Hkv|1}] as the table; 0 where it would not pay.
int64_t count_visible_distances(const AttentionParams& params);
void find_visible_distances(const AttentionParams& params, DistanceRange* ranges, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
