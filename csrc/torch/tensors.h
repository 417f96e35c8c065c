// Tensors in error messages and in the params of kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <string>

#include "fallback_log.h"
#include "params.h"

namespace flash_dmattn {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// In Python's notation: "(2, 5, 8)", "float32", "sparse_coo".
template <typename Sizes>
std::string as_tuple(const Sizes& sizes) {
    std::ostringstream text;
    text << '(';
    for (size_t dim = 0; dim < sizes.size(); ++dim) text << (dim > 0 ? ", " : "") << sizes[dim];
    text << (sizes.size() == 1 ? ",)" : ")");
    return text.str();
}
inline std::string shape_of(const Tensor& tensor) { return as_tuple(tensor.sym_sizes()); }

inline std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }
inline std::string dtype_of(const Tensor& tensor) { return dtype_name(tensor.scalar_type()); }

inline std::string layout_name(at::Layout layout) {
    switch (layout) {
        case at::kSparse: return "sparse_coo";
        case at::kSparseCsr: return "sparse_csr";
        case at::kSparseCsc: return "sparse_csc";
        case at::kSparseBsr: return "sparse_bsr";
        case at::kSparseBsc: return "sparse_bsc";
        case at::kMkldnn: return "mkldnn";
        case at::kJagged: return "jagged";
        default: return "strided";
    }
}

inline void check_shape(const Tensor& tensor, const char* name, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " must have shape ", as_tuple(shape), ", got ", shape_of(tensor));
}

inline void check_dtype(const Tensor& tensor, const char* name, at::ScalarType dtype) {
    const bool has_other_integers = dtype == at::kInt && at::isIntegralType(tensor.scalar_type(), false);
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ", dtype_of(tensor),
                     has_other_integers ? std::string(": pass ") + name + ".int()" : "");
}

// `whose`: the name of `reference`, which is on the required device.
inline void check_device(const Tensor& tensor, const char* name, const Tensor& reference, const char* whose) {
    TORCH_CHECK(tensor.device() == reference.device(), name, " must be on ", whose, "'s device ", reference.device(),
                ", got ", tensor.device());
}

inline void check_last_contiguous(const Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(tensor.stride(-1) == 1 || tensor.size(-1) <= 1 || tensor.numel() == 0, name,
                      " must be contiguous in its last dimension, got strides ", tensor.strides());
}

inline DataType data_type(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kHalf: return DataType::kFloat16;
        case at::kBFloat16: return DataType::kBFloat16;
        case at::kFloat: return DataType::kFloat32;
        default: return DataType::kFloat64;  // checked to be floating
    }
}

inline at::ScalarType accumulation_type(const Tensor& query) {
    return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The CUDA kernels read rows, packed masks and row bits in vectors of 16 bytes.
constexpr int64_t kVectorBytes = 16;
inline bool is_aligned(const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}

// Unaligned rows are copied, at O(S D).
inline Tensor readable_rows(const Tensor& rows) {
    if (rows.is_cpu()) return rows;
    const int64_t elements = kVectorBytes / rows.element_size();
    bool aligned = is_aligned(rows) && rows.stride(-1) == 1;
    for (int64_t dim = 0; dim + 1 < rows.dim(); ++dim) aligned &= rows.stride(dim) % elements == 0;
    if (aligned) return rows;
    if (logs_fallbacks())
        log_fallback("copy of rows",
                     "query, key, value or the gradient of out is copied, because the kernels read rows of "
                     "16 bytes: align the storage and all strides but the last to 16 bytes");
    return rows.clone(at::MemoryFormat::Contiguous);
}

// 0 for a dimension of one element, which serves every index.
inline int64_t broadcast_stride(const Tensor& tensor, int64_t dim) {
    return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

// Kernels write only through the views of outputs.
inline void* data_of(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

inline RowsView rows_view(const Tensor& t, bool varlen) {
    if (varlen) return {data_of(t), 0, t.stride(0), t.stride(1)};
    return {data_of(t), t.stride(0), t.stride(1), t.stride(2)};
}

inline RowStatView row_stat_view(const Tensor& t, bool varlen) {
    if (varlen) return {data_of(t), 0, t.stride(0)};
    return {data_of(t), t.stride(0), t.stride(1)};
}

// A mask or bias: 4 dimensions of fixed length; of variable length 2 (one number per key) or 3 (one per score).
inline ScoreView score_sizes(at::IntArrayRef shape) {
    ScoreView view;
    view.batches = shape.size() == 4 ? shape[0] : 1;
    view.heads = shape[1];
    view.per_key = shape.size() == 4 ? shape[2] == 1 : shape.size() == 2;
    return view;
}

inline ScoreView score_view(const Tensor& t) {
    ScoreView view = score_sizes(t.sizes());
    view.data = data_of(t);
    view.head_stride = broadcast_stride(t, 1);
    if (t.dim() == 4) {
        view.batch_stride = broadcast_stride(t, 0);
        view.row_stride = broadcast_stride(t, 2);
        view.col_stride = broadcast_stride(t, 3);
    } else if (t.dim() == 3) {
        view.row_stride = t.stride(0);
        view.col_stride = t.stride(2);
    } else {
        view.col_stride = t.stride(0);
    }
    return view;
}

inline BiasView bias_view(const Tensor& bias) {
    BiasView view;
    static_cast<ScoreView&>(view) = score_view(bias);
    view.kind = view.per_key ? BiasKind::kKey : BiasKind::kDense;
    view.dtype = data_type(bias);
    return view;
}

// Whether the dimensions after batch and heads are contiguous.
inline bool has_contiguous_entries(const Tensor& bias) {
    int64_t stride = 1;
    for (int64_t dim = bias.dim() - 1; dim >= 2; stride *= bias.size(dim--))
        if (bias.size(dim) > 1 && bias.stride(dim) != stride) return false;
    return true;
}

// (batches, heads, ..) with contiguous entries; the caller sets the sizes of the table.
inline RelativeBiasView entries_view(const Tensor& bias) {
    RelativeBiasView view;
    view.data = bias.const_data_ptr();
    view.batches = bias.size(0);
    view.batch_stride = broadcast_stride(bias, 0);
    view.heads = bias.size(1);
    view.head_stride = broadcast_stride(bias, 1);
    return view;
}

// ({B|1}, heads, 2 R + 1) or ({B|1}, heads, 2 h - 1, 2 w - 1), with contiguous entries.
inline RelativeBiasView relative_bias_view(const Tensor& bias) {
    RelativeBiasView view = entries_view(bias);
    if (bias.dim() == 4) {
        view.grid_height = (bias.size(2) + 1) / 2;
        view.grid_width = (bias.size(3) + 1) / 2;
    } else {
        view.radius = bias.size(2) / 2;
    }
    return view;
}

// A dense float32 bias ({B|B/n|1}, heads, Sq, Sk) with contiguous entries; batch_group_size: n.
inline RelativeBiasView bias_matrix_view(const Tensor& bias, int64_t batch_group_size) {
    RelativeBiasView view = entries_view(bias);
    view.grid_height = bias.size(2);
    view.grid_width = bias.size(3);
    view.batch_group_size = batch_group_size;
    return view;
}

// (2, {B|1}, heads, Sk), or (2, total_k, heads).
inline IntervalView interval_view(const Tensor& intervals) {
    const bool varlen = intervals.dim() == 3;
    IntervalView view;
    view.start = intervals.const_data_ptr<int32_t>();
    view.end = view.start + intervals.stride(0);
    view.heads = intervals.size(2);
    view.head_stride = broadcast_stride(intervals, 2);
    view.batches = varlen ? 1 : intervals.size(1);
    view.batch_stride = varlen ? 0 : broadcast_stride(intervals, 1);
    view.col_stride = intervals.stride(varlen ? 1 : 3);
    return view;
}

}  // namespace flash_dmattn
