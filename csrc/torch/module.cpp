// The Python module: the checks of every backend's inputs, the fast path, and the four entry points of the kernels.
// Loading it registers the operators (library.cpp).
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "build_info.h"
#include "fast_path.h"
#include "mha.h"
#include "operators.h"
#include "python_log.h"

namespace flash_dmattn {
namespace {

namespace py = pybind11;

// Raises the TypeError of Python's own checks where `object` is no tensor.
Tensor tensor_of(const char* name, py::handle object) {
    if (!THPVariable_Check(object.ptr()))
        py::module_::import("flash_dmattn.arguments").attr("require_tensor")(name, object);
    return THPVariable_Unpack(object.ptr());
}

void check_scores(const Tensor& query, const Tensor& key, py::handle mask, py::handle intervals, py::handle bias,
                  std::optional<int64_t> max_seqlen_k) {
    if (!mask.is_none()) check_mask(tensor_of("attn_mask", mask), query, key, max_seqlen_k);
    if (!intervals.is_none())
        check_intervals(tensor_of("attn_mask.start", intervals), query, key, max_seqlen_k.has_value());
    if (!bias.is_none()) check_bias(tensor_of("attn_bias", bias), query, key, max_seqlen_k);
}

void check_fixed(py::handle query_in, py::handle key_in, py::handle value_in, py::handle mask, py::handle intervals,
                 py::handle bias, py::handle seqused_k) {
    const Tensor query = tensor_of("query", query_in), key = tensor_of("key", key_in),
                 value = tensor_of("value", value_in);
    check_rows(query, key, value, false);
    check_scores(query, key, mask, intervals, bias, std::nullopt);
    if (!seqused_k.is_none()) check_seqused_k(tensor_of("cache_seqlens", seqused_k), query, key);
}

void check_variable(py::handle query_in, py::handle key_in, py::handle value_in, py::handle mask, py::handle intervals,
                    py::handle bias, py::handle cu_seqlens_q, py::handle cu_seqlens_k, int64_t max_seqlen_q,
                    int64_t max_seqlen_k) {
    const Tensor query = tensor_of("query", query_in), key = tensor_of("key", key_in),
                 value = tensor_of("value", value_in);
    check_rows(query, key, value, true);
    check_varlen(
        {tensor_of("cu_seqlens_q", cu_seqlens_q), tensor_of("cu_seqlens_k", cu_seqlens_k), max_seqlen_q, max_seqlen_k},
        query, key);
    check_scores(query, key, mask, intervals, bias, max_seqlen_k);
}

void check_relative(py::handle bias, py::handle query, py::handle key, int64_t batch) {
    check_relative_bias(tensor_of("relative_bias", bias), tensor_of("query", query), tensor_of("key", key), batch);
}

void check_own_rows(const char* name, py::handle rows, const char* layout) {
    const Tensor tensor = tensor_of(name, rows);
    check_rows_of(name, tensor, layout);
    check_head_dim(name, tensor);
}

// `parts` tensors of rows, stacked along the third dimension from the end.
void check_packed(const char* name, py::handle packed, const char* layout, int64_t parts) {
    const Tensor tensor = tensor_of(name, packed);
    check_rows_of(name, tensor, layout);
    TORCH_CHECK_VALUE(tensor.sym_size(-3) == parts, name, " must be ", layout, ", got shape ", shape_of(tensor));
    check_head_dim(name, tensor);
}

void check_kv(py::handle query_in, const Tensor& kv, const char* layout_q, bool same_dtype) {
    const Tensor query = tensor_of("query", query_in);
    check_rows_of("query", query, layout_q);
    check_matches_query("kv", kv, query, same_dtype);
    check_same_head_dim("kv", kv, query);
    if (query.dim() == 4) check_batch("kv", kv, query);
}

void check_offsets(const char* name, py::handle cu_seqlens, const OptionalTensor& reference, const char* whose,
                   std::optional<int64_t> total, const char* counted, bool or_less, const char* longest_name,
                   std::optional<int64_t> longest) {
    const Tensor tensor = tensor_of(name, cu_seqlens);
    check_cu_seqlens(
        {name, tensor, reference ? &*reference : nullptr, whose, total, counted, or_less, longest_name, longest});
}

Inputs plain_inputs(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
                    double softmax_scale, double softcap, bool is_causal, bool deterministic) {
    Inputs inputs;
    inputs.query = query;
    inputs.key = key;
    inputs.value = value;
    inputs.bias = bias;
    inputs.softmax_scale = softmax_scale;
    inputs.softcap = softcap;
    inputs.is_causal = is_causal;
    inputs.deterministic = deterministic;
    return inputs;
}

// MaskTensors of flash_dmattn/ops/schema.py.
using MaskTensors =
    std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

Inputs with_masks(Inputs inputs, const MaskTensors& masks) {
    std::tie(inputs.mask, inputs.mask_summaries, inputs.intervals, inputs.kv_indices, inputs.kv_indptr,
             inputs.kv_row_bits) = masks;
    return inputs;
}

Inputs with_sequences(Inputs inputs, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                      int64_t max_seqlen_k) {
    inputs.cu_seqlens_q = cu_seqlens_q;
    inputs.cu_seqlens_k = cu_seqlens_k;
    inputs.max_seqlen_q = max_seqlen_q;
    inputs.max_seqlen_k = max_seqlen_k;
    return inputs;
}

// The gradients of upstream's arguments, which have no relative_bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> first_four(const BackwardResult& gradients) {
    const auto& [dquery, dkey, dvalue, dbias, _] = gradients;
    return {dquery, dkey, dvalue, dbias};
}

// The processor may lack the vector instructions that the CPU kernels were compiled for.
std::optional<std::string> why_not_usable() {
#if defined(CPU_CAPABILITY_AVX512)
    const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(CPU_CAPABILITY_AVX2)
    const bool usable =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    const bool usable = true;
#endif
    if (usable) return std::nullopt;
    return "flash_dmattn's CPU kernels were compiled for a processor with more vector instructions than this one; "
           "build it here, or elsewhere with FLASH_DMATTN_CPU_CAPABILITY=DEFAULT";
}

}  // namespace
}  // namespace flash_dmattn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace flash_dmattn;
    const auto no_gil = py::call_guard<py::gil_scoped_release>();

    m.def("why_not_usable", &why_not_usable, "None, or why the compiled kernels cannot run on this machine.");
    m.def("build_info", &build_info, "What was built, as a dict.");
#ifdef FLASH_DMATTN_WITH_CUDA
    m.attr("has_cuda") = true;
#else
    m.attr("has_cuda") = false;
#endif

    m.def("report_fallbacks_to", &report_fallbacks_to, "Passes the kind and the text of each fallback to a function.");

    m.def("check_fixed", &check_fixed, "Refuses inputs of fixed length that do not fit.");
    m.def("check_varlen", &check_variable, "Refuses inputs of variable length that do not fit.");
    m.def("check_relative_bias", &check_relative, "Refuses a relative bias that does not fit.");
    m.def("check_kernels", &check_kernels, "Refuses a query that the kernels of its device do not take.");
    m.def("check_rows", &check_own_rows, "Refuses a tensor of rows that does not fit.");
    m.def("check_packed", &check_packed, "Refuses a packed tensor of rows that does not fit.");
    m.def("check_kv", &check_kv, "Refuses packed keys and values that do not fit query.");
    m.def("check_cu_seqlens", &check_offsets, "Refuses offsets of sequences that do not fit.");

    m.def("fast_path", &fast_path,
          "Attention of fixed length; None where Python must prepare the inputs, or raise an error.");
    m.def("varlen_fast_path", &varlen_fast_path,
          "Attention of packed sequences; None where Python must prepare the inputs, or raise an error.");

    m.def("kvcache_fast_path", &kvcache_fast_path,
          "Attention over a cache; None where Python must prepare the inputs, or raise an error.");

    m.def(
        "mha_fwd",
        [](const Tensor& query, const Tensor& key, const Tensor& value, const MaskTensors& masks,
           const OptionalTensor& bias, double softmax_scale, double softcap, bool is_causal) {
            const Inputs inputs = plain_inputs(query, key, value, bias, softmax_scale, softcap, is_causal, false);
            return mha_fwd(with_masks(inputs, masks));
        },
        no_gil, "(out, lse) of fixed length.");
    m.def(
        "mha_varlen_fwd",
        [](const Tensor& query, const Tensor& key, const Tensor& value, const MaskTensors& masks,
           const OptionalTensor& bias, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
           int64_t max_seqlen_k, double softmax_scale, double softcap, bool is_causal) {
            const Inputs inputs = plain_inputs(query, key, value, bias, softmax_scale, softcap, is_causal, false);
            return mha_fwd(
                with_sequences(with_masks(inputs, masks), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k));
        },
        no_gil, "(out, lse) of variable length.");
    m.def(
        "mha_bwd",
        [](const Tensor& dout, const OptionalTensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
           const Tensor& out, const Tensor& lse, const MaskTensors& masks, const OptionalTensor& bias,
           double softmax_scale, double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
            const Inputs inputs =
                plain_inputs(query, key, value, bias, softmax_scale, softcap, is_causal, deterministic);
            return first_four(mha_bwd(dout, dlse, out, lse, needs_dbias, false, with_masks(inputs, masks)));
        },
        no_gil, "(dquery, dkey, dvalue, dbias) of fixed length; dbias is empty where it is not needed.");
    m.def(
        "mha_varlen_bwd",
        [](const Tensor& dout, const OptionalTensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
           const Tensor& out, const Tensor& lse, const MaskTensors& masks, const OptionalTensor& bias,
           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
           double softmax_scale, double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
            const Inputs inputs =
                plain_inputs(query, key, value, bias, softmax_scale, softcap, is_causal, deterministic);
            return first_four(mha_bwd(
                dout, dlse, out, lse, needs_dbias, false,
                with_sequences(with_masks(inputs, masks), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)));
        },
        no_gil, "(dquery, dkey, dvalue, dbias) of variable length; dbias is empty where it is not needed.");
}
