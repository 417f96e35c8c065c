// Attention on tensors, forward and backward: checks the inputs, fills the params, allocates the outputs, runs the
// kernels. Serves fixed and variable length on every device.
#pragma once

#include <tuple>

#include "inputs.h"

namespace flash_dmattn {

// (out, lse)
std::tuple<Tensor, Tensor> mha_fwd(Inputs inputs);

// (dquery, dkey, dvalue, dbias). dbias is empty without needs_dbias. A missing `dlse` counts as 0.
std::tuple<Tensor, Tensor, Tensor, Tensor> mha_bwd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& out,
                                                   const Tensor& lse, bool needs_dbias, Inputs inputs);

}  // namespace flash_dmattn
