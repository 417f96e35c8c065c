// The operators' schemas, and what runs them on each device. Their gradients are in autograd.cpp, their fakes, by which
// graphs are traced, in flash_dmattn/ops.py.
#include <torch/library.h>

#include "attention.h"
#include "cuda.h"
#include "lists.h"

namespace flash_dmattn {
namespace {

using OptionalInt = std::optional<int64_t>;

OptionalVarlen varlen_of(const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                         OptionalInt max_seqlen_q, OptionalInt max_seqlen_k) {
    const bool some = cu_seqlens_q || cu_seqlens_k || max_seqlen_q || max_seqlen_k;
    const bool all = cu_seqlens_q && cu_seqlens_k && max_seqlen_q && max_seqlen_k;
    TORCH_CHECK_VALUE(some == all, "cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k come together");
    return all ? OptionalVarlen(Varlen{*cu_seqlens_q, *cu_seqlens_k, *max_seqlen_q, *max_seqlen_k}) : std::nullopt;
}

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, const OptionalTensor& mask,
    const OptionalTensor& mask_tiles, const OptionalTensor& intervals, const OptionalTensor& list_keys,
    const OptionalTensor& list_spans, const OptionalTensor& list_rows, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
    const OptionalTensor& seqlens_k, double softmax_scale, double softcap, bool is_causal, bool /*deterministic*/) {
    const auto varlen = varlen_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
    return forward({query,
                    key,
                    value,
                    bias,
                    {mask, mask_tiles, intervals, list_keys, list_spans, list_rows},
                    varlen,
                    seqlens_k,
                    {softmax_scale, softcap, is_causal}});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor& out, const Tensor& lse, const OptionalTensor& mask,
    const OptionalTensor& mask_tiles, const OptionalTensor& intervals, const OptionalTensor& list_keys,
    const OptionalTensor& list_spans, const OptionalTensor& list_rows, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, double softmax_scale,
    double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
    const auto varlen = varlen_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
    return backward(dout, dlse,
                    {query,
                     key,
                     value,
                     bias,
                     {mask, mask_tiles, intervals, list_keys, list_spans, list_rows},
                     varlen,
                     std::nullopt,
                     {softmax_scale, softcap, is_causal}},
                    out, lse, deterministic, needs_dbias);
}

}  // namespace

TORCH_LIBRARY(flash_dmattn, m) {
    m.def(
        "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? mask, Tensor? mask_tiles, "
        "Tensor? intervals, Tensor? list_keys, Tensor? list_spans, Tensor? list_rows, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? seqlens_k, float softmax_scale, "
        "float softcap, bool is_causal, bool deterministic) -> (Tensor, Tensor)");
    m.def(
        "attention_backward(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor "
        "out, "
        "Tensor lse, Tensor? mask, Tensor? mask_tiles, Tensor? intervals, Tensor? list_keys, Tensor? list_spans, "
        "Tensor? list_rows, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
        "float softmax_scale, float softcap, bool is_causal, bool deterministic, bool needs_dbias) "
        "-> (Tensor, Tensor, Tensor, Tensor)");
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
        "SymInt? longest) -> Tensor");
    m.def(
        "topk_lists(Tensor bias, SymInt window_size, SymInt seqlen_q, Tensor? seqlens_k) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) {
    m.impl("attention_forward", attention_forward);
    m.impl("attention_backward", attention_backward);
    m.impl("build_key_lists", build_key_lists);
    m.impl("index_key_lists", index_key_lists);
}

// Where the CUDA kernels were not built, these say so.
TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) {
    m.impl("attention_forward", attention_forward);
    m.impl("attention_backward", attention_backward);
    m.impl("build_key_lists", build_key_lists);
    m.impl("index_key_lists", index_key_lists);
    m.impl("pack_mask", pack_mask);
    m.impl("pack_and_list_mask", pack_and_list_mask);
    m.impl("topk_intervals", topk_intervals);
    m.impl("topk_lists", topk_lists);
}

}  // namespace flash_dmattn
