// The operators of the dispatcher, by which PyTorch sees every call: their signatures, and how C++ calls them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

#include "tensors.h"

namespace flash_dmattn {

using OptionalSymInt = std::optional<c10::SymInt>;

// query, key, value, bias; mask, mask_tiles, intervals, list_keys, list_spans, list_rows; cu_seqlens_q, cu_seqlens_k,
// max_seqlen_q, max_seqlen_k, seqlens_k; softmax_scale, softcap, is_causal, deterministic. To (out, lse).
using ForwardOperator = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                   const OptionalTensor&, const OptionalTensor&, OptionalSymInt,
                                                   OptionalSymInt, const OptionalTensor&, double, double, bool, bool);

// dout, dlse; query, key, value, bias, out, lse; the same from mask to max_seqlen_k; softmax_scale, softcap, is_causal,
// deterministic, needs_dbias. To (dquery, dkey, dvalue, dbias).
using BackwardOperator = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
    const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    OptionalSymInt, OptionalSymInt, double, double, bool, bool, bool);

template <typename... Arguments>
auto call_attention_forward(const Arguments&... arguments) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("flash_dmattn::attention_forward", "").typed<ForwardOperator>();
    return op.call(arguments...);
}

template <typename... Arguments>
auto call_attention_backward(const Arguments&... arguments) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("flash_dmattn::attention_backward", "")
                               .typed<BackwardOperator>();
    return op.call(arguments...);
}

}  // namespace flash_dmattn
