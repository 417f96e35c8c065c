// Attention on tensors, forward and backward: checks the inputs, fills the params, allocates the outputs, runs the
// kernels. Serves fixed and variable length on every device.
#pragma once

#include "inputs.h"
#include "operators.h"

namespace flash_dmattn {

ForwardResult mha_fwd(Inputs inputs);

// dbias is empty without needs_dbias, drelative_bias without needs_drelative_bias. A missing `dlse` counts as 0.
BackwardResult mha_bwd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& out, const Tensor& lse,
                       bool needs_dbias, bool needs_drelative_bias, Inputs inputs);

}  // namespace flash_dmattn
