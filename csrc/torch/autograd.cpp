// The operators' gradients.
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "operators.h"

namespace flash_dmattn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor given(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }

// Whether gradients are to be made. Forward-mode tangents would be lost below, and are refused.
template <typename... Tensors>
bool is_differentiated(const Tensors&... tensors) {
    const auto has_tangent = [](const Tensor& x) { return x.defined() && x._fw_grad(/*level=*/0).defined(); };
    const auto requires_grad = [](const Tensor& x) { return x.defined() && x.requires_grad(); };
    TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...),
                                "flash_dmattn does not support forward-mode AD (jvp, jacfwd, dual tensors); use the "
                                "backend 'reference' for it");
    return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Tensors made in inference mode cannot be saved: nothing counts how often they are changed.
Tensor saveable(const OptionalTensor& tensor) {
    return tensor && tensor->is_inference() ? tensor->clone() : or_undefined(tensor);
}

// What the forward takes beside query, key, value and bias.
struct Others {
    OptionalTensor mask, mask_tiles, intervals, list_keys, list_spans, list_rows, cu_seqlens_q, cu_seqlens_k;
    OptionalSymInt max_seqlen_q, max_seqlen_k;
    OptionalTensor seqlens_k;
    double softmax_scale, softcap;
    bool is_causal, deterministic;
};

class Attention : public torch::autograd::Function<Attention> {
public:
    static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                                 const OptionalTensor& bias, const Others& o) {
        TORCH_CHECK_VALUE(!o.seqlens_k,
                          "cache_seqlens is for inference, and has no gradients: call under torch.no_grad()");
        at::AutoDispatchBelowADInplaceOrView below;
        const auto [out, lse] = call_attention_forward(query, key, value, bias, o.mask, o.mask_tiles, o.intervals,
                                                       o.list_keys, o.list_spans, o.list_rows, o.cu_seqlens_q,
                                                       o.cu_seqlens_k, o.max_seqlen_q, o.max_seqlen_k, o.seqlens_k,
                                                       o.softmax_scale, o.softcap, o.is_causal, o.deterministic);
        ctx->save_for_backward({query, key, value, or_undefined(bias), out, lse, saveable(o.mask),
                                saveable(o.mask_tiles), saveable(o.intervals), saveable(o.list_keys),
                                saveable(o.list_spans), saveable(o.list_rows), saveable(o.cu_seqlens_q),
                                saveable(o.cu_seqlens_k)});
        auto& kept = ctx->saved_data;
        if (o.max_seqlen_q) kept["max_seqlen_q"] = *o.max_seqlen_q;
        if (o.max_seqlen_k) kept["max_seqlen_k"] = *o.max_seqlen_k;
        kept["softmax_scale"] = o.softmax_scale;
        kept["softcap"] = o.softcap;
        kept["is_causal"] = o.is_causal;
        kept["deterministic"] = o.deterministic;
        ctx->set_materialize_grads(false);
        return {out, lse};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const variable_list saved = ctx->get_saved_variables();
        const Tensor &query = saved[0], &key = saved[1], &value = saved[2], &bias = saved[3], &out = saved[4];
        auto& kept = ctx->saved_data;
        const auto length = [&](const char* name) -> OptionalSymInt {
            const auto found = kept.find(name);
            return found == kept.end() ? std::nullopt : OptionalSymInt(found->second.toSymInt());
        };
        const bool needs_dbias = bias.defined() && ctx->needs_input_grad(3);
        const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
        const auto [dquery, dkey, dvalue, dbias] = call_attention_backward(
            dout, given(grads[1]), query, key, value, given(bias), out, saved[5], given(saved[6]), given(saved[7]),
            given(saved[8]), given(saved[9]), given(saved[10]), given(saved[11]), given(saved[12]), given(saved[13]),
            length("max_seqlen_q"), length("max_seqlen_k"), kept["softmax_scale"].toDouble(),
            kept["softcap"].toDouble(), kept["is_causal"].toBool(), kept["deterministic"].toBool(), needs_dbias);
        return {dquery, dkey, dvalue, needs_dbias ? dbias : Tensor(), Tensor()};
    }
};

template <typename... Rest>
std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const OptionalTensor& bias, Rest... rest) {
    if (!is_differentiated(query, key, value, or_undefined(bias))) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_attention_forward(query, key, value, bias, rest...);
    }
    const variable_list outputs = Attention::apply(query, key, value, bias, Others{rest...});
    return {outputs[0], outputs[1]};
}

// Gradients of gradients are refused where they are asked for, not where the first ones are made.
class Backward : public torch::autograd::Function<Backward> {
public:
    static variable_list forward(AutogradContext*, const Tensor& dout, const OptionalTensor& dlse, const Tensor& query,
                                 const Tensor& key, const Tensor& value, const OptionalTensor& bias, const Tensor& out,
                                 const Tensor& lse, const std::function<variable_list()>& gradients) {
        return gradients();
    }
    static variable_list backward(AutogradContext*, const variable_list&) {
        TORCH_CHECK(false, "flash_dmattn does not support double backward; use the backend 'reference' for it");
    }
};

template <typename... Rest>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& query,
                                                    const Tensor& key, const Tensor& value, const OptionalTensor& bias,
                                                    const Tensor& out, const Tensor& lse, Rest... rest) {
    const auto run = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_attention_backward(dout, dlse, query, key, value, bias, out, lse, rest...);
    };
    if (!is_differentiated(dout, or_undefined(dlse), query, key, value, or_undefined(bias), out, lse)) return run();
    const std::function<variable_list()> run_to_list = [&] {
        const auto [dquery, dkey, dvalue, dbias] = run();
        return variable_list{dquery, dkey, dvalue, dbias};
    };
    const variable_list gradients = Backward::apply(dout, dlse, query, key, value, bias, out, lse, run_to_list);
    return {gradients[0], gradients[1], gradients[2], gradients[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_dmattn, Autograd, m) {
    m.impl("attention_forward", static_cast<ForwardOperator*>(forward));
    m.impl("attention_backward", static_cast<BackwardOperator*>(backward));
}

}  // namespace flash_dmattn
