// What autograd needs to know of the inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

namespace flash_dmattn {

// Whether a tensor carries a forward-mode tangent. The operators have none, and would lose it.
template <typename... Tensors>
bool has_tangent(const Tensors&... tensors) {
    const auto has = [](const at::Tensor& x) { return x.defined() && x._fw_grad(/*level=*/0).defined(); };
    return (has(tensors) || ...);
}

// Whether autograd records a call of these tensors, which may be undefined.
template <typename... Tensors>
bool needs_grad(const Tensors&... tensors) {
    const auto requires_grad = [](const at::Tensor& x) { return x.defined() && x.requires_grad(); };
    return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

}  // namespace flash_dmattn
