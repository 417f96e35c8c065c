// Attention of tensors, forward and backward: check, fill the params, allocate, run. One path serves every form.
#pragma once

#include <tuple>

#include "inputs.h"

namespace flash_dmattn {

// (out, lse)
std::tuple<Tensor, Tensor> forward(Inputs inputs);

// (dquery, dkey, dvalue, dbias); dbias is empty where it is not needed. Where `dlse` is absent it is 0.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout, const OptionalTensor& dlse, Inputs inputs,
                                                    const Tensor& out, const Tensor& lse, bool deterministic,
                                                    bool needs_dbias);

}  // namespace flash_dmattn
