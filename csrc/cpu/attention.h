// The CPU kernels: tiled, with online softmax, in O(S D) memory beside inputs and outputs.
//
// Half precisions are widened a tile at a time and computed in float32; float64 stays float64. Every output element has
// one owner, a unit of work that runs on one thread, and sums have one order, that of PyTorch's BLAS included: results
// do not depend on the number of threads (work.cpp), nor on where the inputs lie (linalg.h). A unit of the forward owns
// a tile of query rows, or of sequences of few rows a run of keys for all heads; what one of the backward owns stands in
// mha_bwd.cpp, and where keys are gathered by lists in gather_bwd.cpp.
#pragma once

#include "params.h"

namespace flash_dmattn {

void mha_fwd_cpu(const FwdParams& params);
void mha_bwd_cpu(const BwdParams& params);

}  // namespace flash_dmattn
