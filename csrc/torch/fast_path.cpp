#include "fast_path.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "checks.h"
#include "cuda_backend.h"
#include "grad.h"
#include "kvcache.h"
#include "lists.h"
#include "operators.h"
#include "topk.h"

namespace flash_dmattn {
namespace {

namespace py = pybind11;

// Whether `object` is an ordinary tensor: no subclass, no wrapper of a transform, no symbolic sizes, no negation that
// is yet to be done, no tangent, which `decode` would lose.
bool is_plain(py::handle object) {
    if (!THPVariable_CheckExact(object.ptr())) return false;
    const Tensor& tensor = THPVariable_Unpack(object.ptr());
    return !is_stand_in(tensor) && (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided &&
           !tensor.is_nested() && !tensor.is_neg() && !tensor.is_quantized() && !tensor._is_zerotensor() &&
           !has_tangent(tensor) && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}
bool is_plain(py::handle object, int64_t dims) {
    return is_plain(object) && THPVariable_Unpack(object.ptr()).dim() == dims;
}

// Whether the kernels accept the rows without padding and without a copy: kernel_rows of flash_dmattn/attend.py.
bool are_kernel_rows(const Tensor& rows) { return rows.size(-1) % 8 == 0 && rows.stride(-1) == 1; }

// Whether a dimension is expanded: Mask.unexpanded reads it once.
bool is_expanded(const Tensor& scores) {
    for (int64_t dim = 0; dim < 3; ++dim)
        if (scores.stride(dim) == 0 && scores.size(dim) > 1) return true;
    return false;
}

// Whether a mode or autocast intercepts calls of Python or of the dispatcher.
bool is_overridden(const Tensor& query) {
    return at::impl::torch_function_mode_enabled() || at::autocast::is_autocast_enabled(query.device().type()) ||
           !(c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set).empty();
}

// Each read_*() returns false for values that Python must prepare, or refuse.
bool read_rows(Inputs& in, py::handle query, py::handle key, py::handle value, int64_t dims) {
    for (const py::handle rows : {query, key, value})
        if (!is_plain(rows, dims) || !are_kernel_rows(THPVariable_Unpack(rows.ptr()))) return false;
    in.query = THPVariable_Unpack(query.ptr());
    in.key = THPVariable_Unpack(key.ptr());
    in.value = THPVariable_Unpack(value.ptr());
    return in.value.size(-1) == in.key.size(-1) && !is_overridden(in.query);
}

bool read_bias(Inputs& in, py::handle bias, std::initializer_list<int64_t> dims) {
    if (bias.is_none()) return true;
    for (const int64_t count : dims) {
        if (!is_plain(bias, count)) continue;
        in.bias = THPVariable_Unpack(bias.ptr());
        return true;
    }
    return false;
}

// `in` has its query.
template <typename AnyInputs>
bool read_scores(AnyInputs& in, py::handle softmax_scale, py::handle is_causal, py::handle softcap) {
    if (!PyBool_Check(is_causal.ptr()) || !PyFloat_CheckExact(softcap.ptr())) return false;
    if (!softmax_scale.is_none() && !PyFloat_CheckExact(softmax_scale.ptr())) return false;
    in.is_causal = is_causal.ptr() == Py_True;
    in.softcap = PyFloat_AS_DOUBLE(softcap.ptr());
    in.softmax_scale = softmax_scale.is_none() ? 1.0 / std::sqrt(static_cast<double>(in.query.size(-1)))
                                               : PyFloat_AS_DOUBLE(softmax_scale.ptr());
    constexpr double kLargest = std::numeric_limits<float>::max();
    const bool fits = in.softcap == 0 || (1 / kLargest <= in.softcap && in.softcap <= kLargest);
    return fits && std::abs(in.softmax_scale) <= kLargest;
}

bool read_options(Inputs& in, py::handle softmax_scale, py::handle is_causal, py::handle softcap,
                  py::handle deterministic, py::handle return_lse) {
    if (!PyBool_Check(deterministic.ptr()) || !PyBool_Check(return_lse.ptr())) return false;
    in.deterministic = deterministic.ptr() == Py_True;
    return read_scores(in, softmax_scale, is_causal, softcap);
}

// -1 for None; -2 for what is no int of 0 and above.
int64_t count_of(py::handle number) {
    if (number.is_none()) return -1;
    if (!PyLong_CheckExact(number.ptr())) return -2;
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    return overflow != 0 || value < 0 ? -2 : value;
}

// Both launch kernels on a GPU, and so without the GIL.
Tensor contiguous(const Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    const py::gil_scoped_release no_gil;
    return tensor.contiguous();
}
Tensor equal_lengths(int64_t batch, int64_t length, const Tensor& query) {
    const py::gil_scoped_release no_gil;
    return at::full({batch}, length, query.options().dtype(at::kInt));
}

// Lengths or offsets of sequences, contiguous. `in` has its query.
bool read_int32(const Inputs& in, py::handle given, OptionalTensor& to) {
    if (!is_plain(given, 1)) return false;
    const Tensor& tensor = THPVariable_Unpack(given.ptr());
    if (tensor.scalar_type() != at::kInt || tensor.device() != in.query.device()) return false;
    to = contiguous(tensor);
    return true;
}

bool records(const Inputs& in) { return needs_grad(in.query, in.key, in.value, in.bias); }

// A tensor, or an int for all sequences.
bool read_cache_seqlens(Inputs& in, py::handle given) {
    const int64_t length = count_of(given);
    if (length < 0) return given.is_none() || read_int32(in, given, in.seqused_k);
    if (length > std::min<int64_t>(in.key.size(1), std::numeric_limits<int32_t>::max())) return false;
    in.seqused_k = equal_lengths(in.query.size(0), length, in.query);
    return true;
}

bool read_sequences(Inputs& in, py::handle cu_seqlens_q, py::handle cu_seqlens_k) {
    return read_int32(in, cu_seqlens_q, in.cu_seqlens_q) && read_int32(in, cu_seqlens_k, in.cu_seqlens_k);
}

// The keys that a call reads: on the CPU up to the end of the longest sequence of a cache.
int64_t filled_keys(const Inputs& in) {
    const int64_t room = in.key.size(1);
    if (!in.seqused_k || !in.query.is_cpu()) return room;
    const at::ArrayRef<int32_t> lengths(in.seqused_k->const_data_ptr<int32_t>(), in.seqused_k->numel());
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

// Removes the keys that the call does not read: trim_to_longest of flash_dmattn/attend.py.
void trim_to_longest(Inputs& in) {
    const int64_t room = in.key.size(1), filled = filled_keys(in);
    if (filled == room) return;
    in.key = in.key.narrow(1, 0, filled);
    in.value = in.value.narrow(1, 0, filled);
    if (in.bias && in.bias->size(3) == room) in.bias = in.bias->narrow(3, 0, filled);
}

// The constants of masks/choice.py that bound calls which may use lists.
struct Limits {
    int64_t cpu_keys, cuda_keys, cuda_mask_rows, cuda_mask_keys;
};

// The mask of a call. Members are absent or -1 where the call has none.
struct CallMask {
    OptionalTensor visible;    // bool
    OptionalTensor intervals;  // of a KeyIntervalMask
    int64_t keys_per_row = -1;
    bool unstructured = false;
    int64_t window_size = -1;
};

// Reads attn_mask. Returns false where it is neither bool nor a KeyIntervalMask (masks/interval.py) of `rows` rows.
bool read_mask(CallMask& mask, py::handle given, int64_t rows) {
    if (given.is_none()) return true;
    if (is_plain(given, 4)) {
        mask.visible = THPVariable_Unpack(given.ptr());
        return !is_expanded(*mask.visible);
    }
    const py::object intervals = py::getattr(given, "list_intervals", py::none());
    if (!is_plain(intervals, 4)) return false;
    const int64_t made_for = count_of(given.attr("rows"));
    mask.intervals = THPVariable_Unpack(intervals.ptr());
    mask.keys_per_row = count_of(given.attr("keys_per_row"));
    mask.unstructured = given.attr("unstructured").ptr() == Py_True;
    return (made_for == -1 || made_for == rows) && mask.keys_per_row != -2;
}

// Whether the kernels read the mask as `prepare` makes it: `choose` and `can_dispatch_on_device` of masks/choice.py
// decide the rest.
bool is_prepared_here(const CallMask& mask, const Inputs& in, const Limits& limits) {
    const int64_t rows = in.query.size(1), keys = in.key.size(1);
    if (mask.window_size >= 0) {
        if (mask.visible || mask.intervals || !in.is_causal || !in.bias) return false;
        const Tensor& bias = *in.bias;
        const bool is_per_key = bias.size(2) == 1 && bias.size(3) == keys;
        if (!is_per_key || (bias.size(0) != 1 && bias.size(0) != in.query.size(0))) return false;
        const bool has_intervals = in.query.is_cuda() && !in.seqused_k;
        return rows <= kMaxListedRows || mask.window_size >= filled_keys(in) || has_intervals;
    }
    if (in.query.is_cpu()) return (!mask.visible && !mask.intervals) || keys < limits.cpu_keys;
    if (mask.visible) return rows < limits.cuda_mask_rows || keys < limits.cuda_mask_keys;
    return !mask.unstructured || mask.keys_per_row >= 0;
}

// Sets the mask of the operator. The inputs have been checked.
void prepare(Inputs& in, const CallMask& mask, const Limits& limits) {
    const int64_t rows = in.query.size(1), keys = in.key.size(1);
    in.intervals = mask.intervals;
    int64_t keys_per_row = mask.keys_per_row;
    bool unstructured = mask.unstructured;
    if (mask.visible) {
        in.mask = mask.visible;
        if (in.query.is_cuda())
            std::tie(in.mask, in.mask_summaries) =
                pack_mask(*mask.visible, rows, keys, in.is_causal, std::nullopt, std::nullopt);
    } else if (mask.window_size >= keys) {  // causality and the bias suffice
        refuse_nan(*in.bias, in.seqused_k);
    } else if (mask.window_size >= 0) {
        if (rows <= kMaxListedRows) {
            std::tie(in.kv_indices, in.kv_indptr, in.kv_row_bits) =
                topk_lists(*in.bias, mask.window_size, rows, in.seqused_k);
            if (rows <= 1) in.kv_row_bits.reset();
            return;
        }
        in.intervals = topk_intervals(*in.bias, mask.window_size, rows, std::nullopt, std::nullopt, std::nullopt);
        keys_per_row = mask.window_size;
        unstructured = true;
    }
    if (in.intervals && in.query.is_cuda() && unstructured && (records(in) || keys >= limits.cuda_keys)) {
        Tensor row_bits;
        std::tie(in.kv_indices, in.kv_indptr, row_bits) =
            build_key_lists(std::nullopt, in.intervals, rows, keys, in.is_causal, std::nullopt, std::nullopt,
                            std::min(keys_per_row, keys), std::nullopt);
    }
}

// Attention of one row of each sequence to the keys that it selects, in one kernel. Returns nothing where none serves
// the call.
std::optional<ForwardResult> decode(const Inputs& in, int64_t window_size) {
    const int64_t keys = in.key.size(1), kv_heads = in.key.size(2);
    if (!in.query.is_cuda() || in.query.size(1) != 1 || records(in)) return std::nullopt;
    if (in.bias->size(1) != 1 && in.bias->size(1) != kv_heads) return std::nullopt;
    KvCacheInputs cached{};
    cached.query = in.query;
    cached.k_cache = in.key;
    cached.v_cache = in.value;
    cached.bias_cache = in.bias->squeeze(2).transpose(1, 2).expand({in.query.size(0), keys, kv_heads});
    if (in.seqused_k) cached.cache_seqlens = *in.seqused_k;
    cached.window_size = window_size;
    cached.softmax_scale = in.softmax_scale;
    cached.is_causal = in.is_causal;
    cached.softcap = in.softcap;
    return decode_with_kvcache(cached);
}

py::object as_returned(const ForwardResult& result, py::handle return_lse) {
    const auto& [out, lse] = result;
    if (return_lse.ptr() == Py_True) return py::make_tuple(out, lse);
    return py::cast(out);
}

}  // namespace

py::object fast_path(py::handle query_in, py::handle key_in, py::handle value_in, py::handle mask_in,
                     py::handle bias_in, py::handle softmax_scale, py::handle is_causal, py::handle softcap,
                     py::handle deterministic, py::handle return_lse, py::handle window_size, py::handle cache_seqlens,
                     py::handle limits_in) {
    const py::object not_plain = py::none();
    Inputs in;
    if (!read_rows(in, query_in, key_in, value_in, 4) || !read_bias(in, bias_in, {4})) return not_plain;
    if (!read_options(in, softmax_scale, is_causal, softcap, deterministic, return_lse)) return not_plain;
    if (in.bias && in.bias->size(3) == 1 && in.key.size(1) != 1) return not_plain;  // constant along the keys
    if (!cache_seqlens.is_none() && !mask_in.is_none()) return not_plain;
    if (!read_cache_seqlens(in, cache_seqlens)) return not_plain;
    CallMask mask;
    Limits limits{};
    mask.window_size = count_of(window_size);
    const bool is_masked = !mask_in.is_none() || mask.window_size != -1;
    if (is_masked) {
        const auto [cpu_keys, cuda_keys, mask_rows, mask_keys] =
            limits_in.cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>();
        limits = {cpu_keys, cuda_keys, mask_rows, mask_keys};
        if (mask.window_size == -2 || !read_mask(mask, mask_in, in.query.size(1))) return not_plain;
        if (!is_prepared_here(mask, in, limits)) return not_plain;
    }

    ForwardResult result;
    {
        const py::gil_scoped_release no_gil;
        check_rows(in.query, in.key, in.value, false);
        if (mask.visible) check_mask(*mask.visible, in.query, in.key, std::nullopt);
        if (mask.intervals) check_intervals(*mask.intervals, in.query, in.key, false);
        if (in.bias) check_bias(*in.bias, in.query, in.key, std::nullopt);
        check_kernels(in.query);
        if (in.seqused_k) {
            check_seqused_k(*in.seqused_k, in.query, in.key);
            trim_to_longest(in);
        }
        std::optional<ForwardResult> decoded;
        if (mask.window_size >= 0) decoded = decode(in, mask.window_size);
        if (!decoded && is_masked) prepare(in, mask, limits);
        result = decoded ? *decoded : call_attention_forward(in);
    }
    return as_returned(result, return_lse);
}

py::object varlen_fast_path(py::handle query_in, py::handle key_in, py::handle value_in, py::handle bias_in,
                            py::handle cu_seqlens_q, py::handle cu_seqlens_k, py::handle max_seqlen_q,
                            py::handle max_seqlen_k, py::handle softmax_scale, py::handle is_causal, py::handle softcap,
                            py::handle deterministic, py::handle return_lse) {
    const py::object not_plain = py::none();
    Inputs in;
    if (!read_rows(in, query_in, key_in, value_in, 3) || !read_bias(in, bias_in, {2, 3})) return not_plain;
    if (!read_options(in, softmax_scale, is_causal, softcap, deterministic, return_lse)) return not_plain;
    if (!read_sequences(in, cu_seqlens_q, cu_seqlens_k)) return not_plain;
    const Varlen varlen{*in.cu_seqlens_q, *in.cu_seqlens_k, count_of(max_seqlen_q), count_of(max_seqlen_k)};
    if (varlen.max_seqlen_q < 0 || varlen.max_seqlen_k < 0) return not_plain;

    ForwardResult result;
    {
        const py::gil_scoped_release no_gil;
        check_rows(in.query, in.key, in.value, true);
        check_varlen(varlen, in.query, in.key);
        if (in.bias) check_bias(*in.bias, in.query, in.key, varlen.max_seqlen_k);
        check_kernels(in.query);
        // clamped_to_totals of flash_dmattn/attend.py: the given bounds may be far above the lengths.
        const bool column_per_key = in.bias && in.bias->dim() == 3;
        in.max_seqlen_q = std::min(varlen.max_seqlen_q, in.query.size(0));
        in.max_seqlen_k = column_per_key ? varlen.max_seqlen_k : std::min(varlen.max_seqlen_k, in.key.size(0));
        result = call_attention_forward(in);
    }
    return as_returned(result, return_lse);
}

py::object kvcache_fast_path(py::handle query, py::handle k_cache, py::handle v_cache, py::handle key, py::handle value,
                             py::handle bias_cache, py::handle bias, py::handle cache_seqlens,
                             py::handle cache_batch_idx, py::handle block_table, py::handle cu_seqlens_q,
                             py::handle max_seqlen_q, py::handle window_size, py::handle softmax_scale,
                             py::handle is_causal, py::handle softcap, py::handle return_lse,
                             py::handle batch_invariant) {
    const py::object not_plain = py::none();
    KvCacheInputs in{};
    const auto read = [&](py::handle given, auto& to) {
        if (!is_plain(given)) return false;
        const Tensor& tensor = THPVariable_Unpack(given.ptr());
        to = tensor;
        return tensor.device() == in.query.device();
    };
    const auto read_optional = [&](py::handle given, OptionalTensor& to) { return given.is_none() || read(given, to); };
    if (!read(query, in.query) || !read(k_cache, in.k_cache) || !read(v_cache, in.v_cache)) return not_plain;
    for (const auto& [given, to] :
         {std::pair(key, &in.key), std::pair(value, &in.value), std::pair(bias_cache, &in.bias_cache),
          std::pair(bias, &in.bias), std::pair(cache_batch_idx, &in.cache_batch_idx),
          std::pair(block_table, &in.block_table), std::pair(cu_seqlens_q, &in.cu_seqlens_q)})
        if (!read_optional(given, *to)) return not_plain;
    if (in.query.dim() != (in.is_packed() ? 3 : 4) || is_overridden(in.query)) return not_plain;
    if (!at::isFloatingType(in.query.scalar_type()) || in.query.size(-1) == 0) return not_plain;
    if (in.is_packed() && (in.cu_seqlens_q->dim() != 1 || in.cu_seqlens_q->size(0) == 0)) return not_plain;
    if (!read_scores(in, softmax_scale, is_causal, softcap)) return not_plain;
    const int64_t longest = count_of(max_seqlen_q), window = count_of(window_size);
    if (longest == -2 || window == -2 || !PyBool_Check(return_lse.ptr()) || !PyBool_Check(batch_invariant.ptr()))
        return not_plain;
    if (longest >= 0) in.max_seqlen_q = longest;
    if (window >= 0) in.window_size = window;
    in.batch_invariant = batch_invariant.ptr() == Py_True;
    if (const int64_t length = count_of(cache_seqlens); length >= 0) {
        if (length > std::numeric_limits<int32_t>::max()) return not_plain;
        const int64_t batch = in.is_packed() ? in.cu_seqlens_q->size(0) - 1 : in.query.size(0);
        in.cache_seqlens = equal_lengths(batch, length, in.query);
    } else if (!read(cache_seqlens, in.cache_seqlens)) {
        return not_plain;
    }
    if (needs_grad(in.query, in.k_cache, in.v_cache, in.key, in.value, in.bias_cache, in.bias, in.cache_seqlens,
                   in.cache_batch_idx, in.block_table, in.cu_seqlens_q))
        return not_plain;
    in.cache_seqlens = contiguous(in.cache_seqlens);
    for (OptionalTensor* const given : {&in.cache_batch_idx, &in.block_table, &in.cu_seqlens_q})
        if (*given) *given = contiguous(**given);

    ForwardResult result;
    {
        const py::gil_scoped_release no_gil;
        result = call_attention_with_kvcache(in);
    }
    return as_returned(result, return_lse);
}

}  // namespace flash_dmattn
