// What autograd needs to know of the inputs, of which optional ones may be missing and others undefined.
#pragma once

#include <ATen/core/grad_mode.h>

#include "tensors.h"

namespace flash_dmattn {

inline const Tensor* tensor_in(const Tensor& x) { return x.defined() ? &x : nullptr; }
inline const Tensor* tensor_in(const OptionalTensor& x) { return x ? tensor_in(*x) : nullptr; }

// Whether a tensor carries a forward-mode tangent. The operators have none, and would lose it.
template <typename... Tensors>
bool has_tangent(const Tensors&... tensors) {
    const auto has = [](const Tensor* x) { return x != nullptr && x->_fw_grad(/*level=*/0).defined(); };
    return (has(tensor_in(tensors)) || ...);
}

// Whether autograd records a call of these tensors.
template <typename... Tensors>
bool needs_grad(const Tensors&... tensors) {
    const auto requires_grad = [](const Tensor* x) { return x != nullptr && x->requires_grad(); };
    return at::GradMode::is_enabled() && (requires_grad(tensor_in(tensors)) || ...);
}

}  // namespace flash_dmattn
