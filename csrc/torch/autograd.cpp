// The gradients of the attention operators.
#include <ATen/core/ivalue.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <type_traits>

#include "operators.h"

namespace flash_dmattn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor optional_of(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
Tensor or_undefined(const Tensor& tensor) { return tensor; }
Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }

// Whether autograd records the call. Forward-mode tangents would be lost below, and are refused.
template <typename... Tensors>
bool needs_grad(const Tensors&... tensors) {
    const auto has_tangent = [](const Tensor& x) { return x.defined() && x._fw_grad(/*level=*/0).defined(); };
    const auto requires_grad = [](const Tensor& x) { return x.defined() && x.requires_grad(); };
    TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...),
                                "flash_dmattn does not support forward-mode AD (jvp, jacfwd, dual tensors); use the "
                                "backend 'reference' for it");
    return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

template <typename Field>
constexpr bool is_tensor = std::is_same_v<Field, Tensor> || std::is_same_v<Field, OptionalTensor>;

constexpr char kOptions[] = "options";  // the inputs that are no tensors, as one tuple

// Saves out, lse and all inputs.
void save(AutogradContext* ctx, const Inputs& inputs, const Tensor& out, const Tensor& lse) {
    variable_list tensors{out, lse};
    std::vector<c10::IValue> options;
    for_each_field(inputs, [&](const auto& field) {
        using Field = std::decay_t<decltype(field)>;
        if constexpr (std::is_same_v<Field, OptionalTensor>) {
            // Tensors made in inference mode have no version counter, and cannot be saved.
            tensors.push_back(field && field->is_inference() ? field->clone() : or_undefined(field));
        } else if constexpr (is_tensor<Field>) {
            tensors.push_back(field);
        } else {
            options.emplace_back(field);
        }
    });
    ctx->save_for_backward(std::move(tensors));
    ctx->saved_data[kOptions] = c10::ivalue::Tuple::create(std::move(options));
}

Inputs saved_inputs(AutogradContext* ctx, const variable_list& saved) {
    const auto options = ctx->saved_data[kOptions].toTuple();
    Inputs inputs;
    size_t tensor = 2, option = 0;  // after out and lse
    for_each_field(inputs, [&](auto& field) {
        using Field = std::decay_t<decltype(field)>;
        if constexpr (std::is_same_v<Field, OptionalTensor>) {
            field = optional_of(saved[tensor++]);
        } else if constexpr (is_tensor<Field>) {
            field = saved[tensor++];
        } else {
            field = options->elements()[option++].template to<Field>();
        }
    });
    return inputs;
}

class Attention : public torch::autograd::Function<Attention> {
public:
    // The first five arguments are those of `inputs` that may have a gradient.
    static variable_list forward(AutogradContext* ctx, const Tensor&, const Tensor&, const Tensor&,
                                 const OptionalTensor&, const OptionalTensor&, const Inputs& inputs) {
        TORCH_CHECK_VALUE(!inputs.seqlens_k,
                          "cache_seqlens is for inference, and has no gradients: call under torch.no_grad()");
        at::AutoDispatchBelowADInplaceOrView below;
        const auto [out, lse] = call_attention_forward(inputs);
        save(ctx, inputs, out, lse);
        ctx->set_materialize_grads(false);
        return {out, lse};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const variable_list saved = ctx->get_saved_variables();
        const Inputs inputs = saved_inputs(ctx, saved);
        const Tensor &out = saved[0], &lse = saved[1];
        const bool needs_dbias = inputs.bias && ctx->needs_input_grad(3);
        // Absent tensors have no edge.
        const bool needs_drelative_bias = inputs.relative_bias && ctx->needs_input_grad(inputs.bias ? 4 : 3);
        const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
        const auto [dquery, dkey, dvalue, dbias, drelative_bias] =
            call_attention_backward(dout, optional_of(grads[1]), out, lse, needs_dbias, needs_drelative_bias, inputs);
        return {dquery,  dkey, dvalue, needs_dbias ? dbias : Tensor(), needs_drelative_bias ? drelative_bias : Tensor(),
                Tensor()};
    }
};

template <typename... Arguments>
ForwardResult forward(Arguments... arguments) {
    const Inputs inputs{std::move(arguments)...};
    if (!needs_grad(inputs.query, inputs.key, inputs.value, or_undefined(inputs.bias),
                    or_undefined(inputs.relative_bias))) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_attention_forward(inputs);
    }
    const variable_list outputs =
        Attention::apply(inputs.query, inputs.key, inputs.value, inputs.bias, inputs.relative_bias, inputs);
    return {outputs[0], outputs[1]};
}

// Raises where a second derivative is computed, not where the first one is.
class Backward : public torch::autograd::Function<Backward> {
public:
    static variable_list forward(AutogradContext*, const Tensor& dout, const OptionalTensor& dlse, const Tensor& query,
                                 const Tensor& key, const Tensor& value, const OptionalTensor& bias,
                                 const OptionalTensor& relative_bias, const Tensor& out, const Tensor& lse,
                                 const std::function<variable_list()>& gradients) {
        return gradients();
    }
    static variable_list backward(AutogradContext*, const variable_list&) {
        TORCH_CHECK(false, "flash_dmattn does not support double backward; use the backend 'reference' for it");
    }
};

template <typename... Arguments>
BackwardResult backward(Tensor dout, OptionalTensor dlse, Tensor out, Tensor lse, bool needs_dbias,
                        bool needs_drelative_bias, Arguments... arguments) {
    const Inputs inputs{std::move(arguments)...};
    const auto run = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_attention_backward(dout, dlse, out, lse, needs_dbias, needs_drelative_bias, inputs);
    };
    const auto& [query, key, value, bias, relative_bias] =
        std::tie(inputs.query, inputs.key, inputs.value, inputs.bias, inputs.relative_bias);
    if (!needs_grad(dout, or_undefined(dlse), query, key, value, or_undefined(bias), or_undefined(relative_bias), out,
                    lse)) {
        return run();
    }
    const std::function<variable_list()> run_to_list = [&] {
        const auto [dquery, dkey, dvalue, dbias, drelative_bias] = run();
        return variable_list{dquery, dkey, dvalue, dbias, drelative_bias};
    };
    const variable_list gradients =
        Backward::apply(dout, dlse, query, key, value, bias, relative_bias, out, lse, run_to_list);
    return {gradients[0], gradients[1], gradients[2], gradients[3], gradients[4]};
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_dmattn, Autograd, m) {
    m.impl("attention_forward", static_cast<ForwardOperator*>(forward));
    m.impl("attention_backward", static_cast<BackwardOperator*>(backward));
}

}  // namespace flash_dmattn
