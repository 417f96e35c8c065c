// The gradients of the attention operators.
#include <ATen/FuncTorchTLS.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <type_traits>

#include "grad.h"
#include "operators.h"

namespace flash_dmattn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

OptionalTensor optional_of(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }

// Whether autograd records the call. Forward-mode tangents are refused.
template <typename... Tensors>
bool records(const Tensors&... tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(tensors...),
                                "flash_dmattn does not support forward-mode AD (jvp, jacfwd, dual tensors); use the "
                                "backend 'reference' for it");
    return needs_grad(tensors...);
}

// What a node keeps of an input.
template <typename Field>
struct Saved {
    using type = Field;
};
template <>
struct Saved<Tensor> {
    using type = SavedVariable;
};
template <>
struct Saved<OptionalTensor> {
    using type = SavedVariable;
};
template <typename Field>
using SavedType = typename Saved<Field>::type;

struct SavedInputs {
#define FLASH_DMATTN_FIELD(schema, type, name) SavedType<type> name;
    FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_FIELD)
#undef FLASH_DMATTN_FIELD
};

// Calls `visit` with each field of both, in order.
template <typename SomeInputs, typename SomeSaved, typename Visit>
void for_each_pair(SomeInputs& inputs, SomeSaved& saved, const Visit& visit) {
#define FLASH_DMATTN_VISIT(schema, type, name) visit(inputs.name, saved.name);
    FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_VISIT)
#undef FLASH_DMATTN_VISIT
}

// The node of a forward in the graph: attention_backward of what it saved.
class AttentionNode : public Node {
public:
    // Sets the edges, saves the inputs, and makes the outputs depend on the node.
    void record(const Inputs& inputs, const Tensor& out, const Tensor& lse) {
        set_next_edges(torch::autograd::collect_next_edges(
            inputs.query, inputs.key, inputs.value, or_undefined(inputs.bias), or_undefined(inputs.relative_bias)));
        for_each_pair(inputs, saved_, [](const auto& input, auto& saved) {
            using Field = std::decay_t<decltype(input)>;
            if constexpr (std::is_same_v<Field, OptionalTensor>) {
                // Tensors made in inference mode have no version counter, and cannot be saved.
                if (input) saved = SavedVariable(input->is_inference() ? input->clone() : *input, /*is_output=*/false);
            } else if constexpr (std::is_same_v<Field, Tensor>) {
                saved = SavedVariable(input, /*is_output=*/false);
            } else {
                saved = input;
            }
        });
        for (const Tensor* output : {&out, &lse}) torch::autograd::set_history(*output, getptr());
        out_ = SavedVariable(out, /*is_output=*/true);
        lse_ = SavedVariable(lse, /*is_output=*/true);
    }

    variable_list apply(variable_list&& grads) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto self = getptr();
        const Tensor out = out_.unpack(self), lse = lse_.unpack(self);
        Inputs inputs;
        for_each_pair(inputs, saved_, [](auto& input, const auto& saved) {
            using Field = std::decay_t<decltype(input)>;
            if constexpr (std::is_same_v<Field, OptionalTensor>) {
                input = optional_of(saved.unpack());
            } else if constexpr (std::is_same_v<Field, Tensor>) {
                input = saved.unpack();
            } else {
                input = saved;
            }
        });
        const bool needs_dbias = task_should_compute_output(3), needs_drelative_bias = task_should_compute_output(4);
        const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
        auto [dquery, dkey, dvalue, dbias, drelative_bias] =
            call_attention_backward(dout, optional_of(grads[1]), out, lse, needs_dbias, needs_drelative_bias, inputs);
        return {std::move(dquery), std::move(dkey), std::move(dvalue), needs_dbias ? std::move(dbias) : Tensor(),
                needs_drelative_bias ? std::move(drelative_bias) : Tensor()};
    }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for_each_saved([](auto& saved) {
            if constexpr (is_saved<decltype(saved)>) saved.reset_data();
        });
    }

    std::string name() const override { return "FlashDmattnBackward"; }

    // For compiled autograd: what a graph depends on, and the backward with stand-ins for it.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
        const_cast<AttentionNode*>(this)->for_each_saved([&](const auto& saved) {
            if constexpr (is_saved<decltype(saved)>) {
                args.collect(saved, &saved == &out_ || &saved == &lse_);
            } else {
                args.collect(saved);
            }
        });
    }
    variable_list apply_with_saved(const variable_list& grads,
                                   torch::dynamo::autograd::SwapSavedVariables& stand_ins) override {
        for_each_saved([&](auto& saved) { stand_ins.before(saved); });
        variable_list gradients = apply(variable_list(grads));
        for_each_saved([&](auto& saved) { stand_ins.after(saved); });
        return gradients;
    }

private:
    template <typename Field>
    static constexpr bool is_saved = std::is_same_v<std::decay_t<Field>, SavedVariable>;

    template <typename Visit>
    void for_each_saved(const Visit& visit) {
        visit(out_);
        visit(lse_);
        for_each_field(saved_, visit);
    }

    SavedVariable out_, lse_;
    SavedInputs saved_;
};

// PyTorch before 2.13 holds nodes by std::shared_ptr.
template <typename Own>
auto make_node() {
    if constexpr (std::is_same_v<decltype(std::declval<Node&>().getptr()), std::shared_ptr<Node>>) {
        return std::shared_ptr<Own>(new Own, [](auto* node) { deleteNode(node); });
    } else {
        return c10::make_intrusive<Own>();
    }
}

// Attention over a cache has none.
void refuse_gradients(const Inputs& in) {
    const auto refuse = [](const char* name, const auto& tensor) {
        TORCH_CHECK_VALUE(
            !needs_grad(tensor), name,
            " must not require grad: cache_seqlens is for inference, and has no gradients; make the call under "
            "torch.no_grad()");
    };
    refuse("query", in.query);
    refuse("key", in.key);
    refuse("value", in.value);
    refuse("attn_bias", in.bias);
    refuse("relative_bias", in.relative_bias);
}

template <typename... Arguments>
ForwardResult forward(Arguments... arguments) {
    const Inputs inputs{std::move(arguments)...};
    if (!records(inputs.query, inputs.key, inputs.value, inputs.bias, inputs.relative_bias)) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_attention_forward(inputs);
    }
    if (inputs.seqused_k) refuse_gradients(inputs);
    if (const auto& transforms = at::functorch::functorchTLSAccessor()) transforms->checkSupportsCppAutogradFunction();
    ForwardResult result;
    {
        at::AutoDispatchBelowADInplaceOrView below;
        result = call_attention_forward(inputs);
    }
    make_node<AttentionNode>()->record(inputs, std::get<0>(result), std::get<1>(result));
    return result;
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
    if (!records(dout, dlse, query, key, value, bias, relative_bias, out, lse)) return run();
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
