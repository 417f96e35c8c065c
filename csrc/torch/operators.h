// The two attention operators of the dispatcher: their signatures, and how C++ calls them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

#include "arguments.h"

namespace flash_dmattn {

using ForwardResult = std::tuple<Tensor, Tensor>;  // out, lse
using BackwardResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // dquery, dkey, dvalue, dbias, drelative_bias

// The second parameter absorbs the comma before the list of arguments.
template <typename Result, typename, typename... Arguments>
struct Signature {
    using type = Result(Arguments...);
};

#define FLASH_DMATTN_TYPE(schema, type, name) , type
using ForwardOperator = Signature<ForwardResult, void FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_TYPE)>::type;
// dout, dlse, out, lse, needs_dbias, needs_drelative_bias, and the arguments of the forward.
using BackwardOperator = Signature<BackwardResult, void, Tensor, OptionalTensor, Tensor, Tensor, bool,
                                   bool FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_TYPE)>::type;
#undef FLASH_DMATTN_TYPE

inline ForwardResult call_attention_forward(const Inputs& inputs) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("flash_dmattn::attention_forward", "").typed<ForwardOperator>();
    return apply_fields(inputs, [](const auto&... arguments) { return op.call(arguments...); });
}

inline BackwardResult call_attention_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& out,
                                              const Tensor& lse, bool needs_dbias, bool needs_drelative_bias,
                                              const Inputs& inputs) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("flash_dmattn::attention_backward", "")
                               .typed<BackwardOperator>();
    return apply_fields(inputs, [&](const auto&... arguments) {
        return op.call(dout, dlse, out, lse, needs_dbias, needs_drelative_bias, arguments...);
    });
}

}  // namespace flash_dmattn
