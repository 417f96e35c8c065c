// Attention of new query rows over a cache of keys, values and biases: the operator attention_with_kvcache. It checks
// the arguments, fills KvCacheParams, and runs a kernel where one serves the call: for few rows the decoding kernel, for
// chunks with a window the forward over key lists of rows of the cache. For other calls on CUDA kernels gather the keys,
// with a window only those that the rows may see. attention_forward attends to these if they are packed, or selected
// for more than 16 rows, without sinks; the operator attend_to_gathered_keys serves the rest.
// Every further call goes to compose_attention_with_kvcache. The last two operators are written in Python
// (flash_dmattn/kvcache_composed.py).
#pragma once

#include "kvcache_params.h"
#include "operators.h"

namespace flash_dmattn {

// X(schema type, C++ type, name), in the schema's order. flash_dmattn/ops/schema.py repeats it. flash_dmattn/kvcache.py
// documents the arguments.
#define FLASH_DMATTN_KVCACHE_ARGUMENTS(X)         \
    X("Tensor", Tensor, query)                    \
    X("Tensor(a!)", Tensor, k_cache)              \
    X("Tensor(b!)", Tensor, v_cache)              \
    X("Tensor?", OptionalTensor, key)             \
    X("Tensor?", OptionalTensor, value)           \
    X("Tensor(c!)?", OptionalTensor, bias_cache)  \
    X("Tensor?", OptionalTensor, bias)            \
    X("Tensor", Tensor, cache_seqlens)            \
    X("Tensor?", OptionalTensor, cache_batch_idx) \
    X("Tensor?", OptionalTensor, block_table)     \
    X("Tensor?", OptionalTensor, cu_seqlens_q)    \
    X("SymInt?", OptionalSymInt, max_seqlen_q)    \
    X("SymInt?", OptionalSymInt, window_size)     \
    X("float", double, softmax_scale)             \
    X("bool", bool, is_causal)                    \
    X("float", double, softcap)                   \
    X("Tensor?", OptionalTensor, relative_bias)   \
    X("Tensor?", OptionalTensor, sinks)           \
    X("bool", bool, batch_invariant)

struct KvCacheInputs {
#define FLASH_DMATTN_FIELD(schema, type, name) type name;
    FLASH_DMATTN_KVCACHE_ARGUMENTS(FLASH_DMATTN_FIELD)
#undef FLASH_DMATTN_FIELD

    bool is_packed() const { return cu_seqlens_q.has_value(); }
};

#define FLASH_DMATTN_TYPE(schema, type, name) , type
using KvCacheOperator = Signature<ForwardResult, void FLASH_DMATTN_KVCACHE_ARGUMENTS(FLASH_DMATTN_TYPE)>::type;
#undef FLASH_DMATTN_TYPE

ForwardResult attention_with_kvcache(KvCacheInputs inputs);
// The same through the dispatcher.
ForwardResult call_attention_with_kvcache(const KvCacheInputs& inputs);

// attention_with_kvcache for checked inputs on CUDA whose rows the kernels read where they are. Returns nothing, and
// launches nothing, where no kernel decodes them. cache_seqlens may be undefined: all keys.
std::optional<ForwardResult> decode_with_kvcache(const KvCacheInputs& inputs);

}  // namespace flash_dmattn
