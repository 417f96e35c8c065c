// The CPU kernels: tiled, with online softmax, in O(S D) memory beside inputs and outputs.
//
// float16 and bfloat16 are converted tile by tile and computed in float32; float64 stays float64. Results depend
// neither on the number of threads (parallel.cpp) nor on the alignment of the inputs (linalg.h): every output element
// has one owner, a task that runs on one thread, and every sum has a fixed order, in the BLAS too. Tasks:
//
//     forward                     an m_block of one head                                  FwdTask, mha_fwd.cpp
//     forward, few query rows     split-KV: a split of the keys, for all heads            SplitKvFwd, mha_fwd.cpp
//     backward                    a split of the n_blocks of the heads that share dbias   BwdTask, mha_bwd.cpp
//                                 or K and V
//     backward over key lists     a split of the m_blocks of these heads                  GatherBwdTask, gather_bwd.cpp
#pragma once

#include "params.h"

namespace flash_dmattn {

void mha_fwd_cpu(const FwdParams& params);
void mha_bwd_cpu(const BwdParams& params);

}  // namespace flash_dmattn
