// The CPU kernels: tiled, with online softmax, in O(S D) memory beside inputs and outputs.
//
// Half precisions are widened a tile at a time and computed in float32; float64 stays float64. Every output element has
// one owner, a work unit that runs on one thread, so the results do not depend on the number of threads:
//   out, lse, dquery, dbias of a dense bias    a tile of query rows
//   dkey, dvalue, dbias of a key bias          a tile of keys
#pragma once

#include "params.h"

namespace flash_dmattn {

void mha_fwd_cpu(const FwdParams& params);
void mha_bwd_cpu(const BwdParams& params);

}  // namespace flash_dmattn
