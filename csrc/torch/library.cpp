// The schemas of the operators, and their kernels by device. Gradients are in autograd.cpp, the fakes for tracing
// graphs in flash_dmattn/ops/fakes.py.
#include <torch/library.h>

#include <string>

#include "cuda_backend.h"
#include "kvcache.h"
#include "lists.h"
#include "mha.h"
#include "operators.h"
#include "topk.h"

namespace flash_dmattn {
namespace {

template <typename... Arguments>
ForwardResult attention_forward(Arguments... arguments) {
    return mha_fwd(Inputs{std::move(arguments)...});
}

template <typename... Arguments>
BackwardResult attention_backward(Tensor dout, OptionalTensor dlse, Tensor out, Tensor lse, bool needs_dbias,
                                  bool needs_drelative_bias, Arguments... arguments) {
    return mha_bwd(dout, dlse, out, lse, needs_dbias, needs_drelative_bias, Inputs{std::move(arguments)...});
}

template <typename... Arguments>
ForwardResult with_kvcache(Arguments... arguments) {
    return attention_with_kvcache(KvCacheInputs{std::move(arguments)...});
}

// ", Tensor query, Tensor key, ..."
std::string schema_arguments() {
#define FLASH_DMATTN_SCHEMA(schema, type, name) ", " schema " " #name
    return "" FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_SCHEMA);
}
std::string kvcache_schema_arguments() { return "" FLASH_DMATTN_KVCACHE_ARGUMENTS(FLASH_DMATTN_SCHEMA); }
#undef FLASH_DMATTN_SCHEMA

}  // namespace

TORCH_LIBRARY(flash_dmattn, m) {
    m.def(("attention_forward(" + schema_arguments().substr(2) + ") -> (Tensor, Tensor)").c_str());
    m.def(("attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool needs_dbias, "
           "bool needs_drelative_bias" +
           schema_arguments() + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
              .c_str());
    for (const char* name : {"attention_with_kvcache", "compose_attention_with_kvcache"})
        m.def((name + ("(" + kvcache_schema_arguments().substr(2)) + ") -> (Tensor, Tensor)").c_str());
    m.def(
        "attend_to_gathered_keys(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, SymInt? window_size, float softmax_scale, "
        "bool is_causal, float softcap, Tensor? relative_bias, Tensor? sinks, bool batch_invariant) "
        "-> (Tensor, Tensor)");
    m.def(
        "build_key_lists(Tensor? mask, Tensor? intervals, SymInt seqlen_q, SymInt seqlen_k, bool is_causal, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? keys_per_row, SymInt? limit) -> (Tensor, Tensor, Tensor)");
    m.def(
        "index_key_lists(Tensor indices, Tensor? intervals, SymInt tile_rows, SymInt seqlen_q, SymInt seqlen_k, "
        "bool is_causal, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k) -> (Tensor, Tensor, Tensor)");
    m.def(
        "pack_mask(Tensor mask, SymInt seqlen_q, SymInt seqlen_k, bool is_causal, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k) -> (Tensor, Tensor)");
    m.def(
        "pack_and_list_mask(Tensor mask, SymInt seqlen_q, SymInt seqlen_k, bool is_causal, int percent) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "topk_intervals(Tensor bias, SymInt window_size, SymInt seqlen_q, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "SymInt? max_keys, str name='bias') -> Tensor");
    m.def(
        "topk_lists(Tensor bias, SymInt window_size, SymInt seqlen_q, Tensor? seqused_k) -> (Tensor, Tensor, Tensor)");
    m.def("topk_mask(Tensor bias, Tensor candidates, SymInt window_size) -> Tensor");
}

TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) {
    m.impl("attention_forward", static_cast<ForwardOperator*>(attention_forward));
    m.impl("attention_backward", static_cast<BackwardOperator*>(attention_backward));
    m.impl("attention_with_kvcache", static_cast<KvCacheOperator*>(with_kvcache));
    m.impl("build_key_lists", build_key_lists);
    m.impl("index_key_lists", index_key_lists);
    m.impl("topk_lists", topk_lists);
    m.impl("topk_mask", topk_mask);
}

// In a build without CUDA kernels these raise an error (no_cuda.cpp).
TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) {
    m.impl("attention_forward", static_cast<ForwardOperator*>(attention_forward));
    m.impl("attention_backward", static_cast<BackwardOperator*>(attention_backward));
    m.impl("attention_with_kvcache", static_cast<KvCacheOperator*>(with_kvcache));
    m.impl("build_key_lists", build_key_lists);
    m.impl("index_key_lists", index_key_lists);
    m.impl("pack_mask", pack_mask);
    m.impl("pack_and_list_mask", pack_and_list_mask);
    // `name`: of the argument that an error of the CPU kernel reports (flash_dmattn/masks/topk.py).
    m.impl("topk_intervals",
           [](const Tensor& bias, int64_t window_size, int64_t seqlen_q, const OptionalTensor& cu_seqlens_q,
              const OptionalTensor& cu_seqlens_k, std::optional<int64_t> max_keys, c10::string_view) {
               return topk_intervals(bias, window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, max_keys);
           });
    m.impl("topk_lists", topk_lists);
}

}  // namespace flash_dmattn
