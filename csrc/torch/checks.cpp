#include "checks.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <vector>

namespace flash_dmattn {
namespace {

using c10::SymInt;

constexpr int64_t kMaxHeadDim = 256;

int64_t dimensions_in(const char* layout) {
    const std::string text(layout);
    return std::count(text.begin(), text.end(), ',') + 1;
}

std::string dimensions(int64_t count) { return std::to_string(count) + (count == 1 ? " dimension" : " dimensions"); }

// Sparse, mkldnn and nested tensors have no strides.
void check_dense(const char* name, const Tensor& tensor) {
    if (tensor.layout() == at::kStrided && !tensor.is_nested()) return;
    TORCH_CHECK_TYPE(false, name, " must be a dense torch.Tensor, got a ",
                     tensor.is_nested() ? "nested" : layout_name(tensor.layout()), " one");
}

void check_ndim(const char* name, const Tensor& tensor, const char* layout) {
    check_dense(name, tensor);
    const int64_t count = dimensions_in(layout);
    if (tensor.dim() == count) return;
    const bool is_batch_of_one = tensor.dim() == count + 1 && tensor.sym_size(0) == 1;
    TORCH_CHECK_VALUE(false, name, " must have ", dimensions(count), " ", layout, ", got shape ", shape_of(tensor),
                      is_batch_of_one ? std::string(": pass ") + name + "[0]" : "");
}

// A dimension of a mask or bias: its accepted sizes.
struct Dimension {
    const char* label;
    std::array<SymInt, 3> sizes;
    int count;
    bool or_divisor = false;  // accepts divisors of the first size too
};
Dimension one_of(const char* label, SymInt a) { return {label, {std::move(a), 0, 0}, 1}; }
Dimension one_of(const char* label, SymInt a, SymInt b) { return {label, {std::move(a), std::move(b), 0}, 2}; }
Dimension one_of(const char* label, SymInt a, SymInt b, SymInt c) {
    return {label, {std::move(a), std::move(b), std::move(c)}, 3};
}

std::string layout_of(at::ArrayRef<Dimension> accepted) {
    std::string layout = "(";
    for (const Dimension& dimension : accepted)
        layout += (layout.size() > 1 ? ", " : "") + std::string(dimension.label);
    return layout + ")";
}

[[noreturn]] void refuse_dimension(const char* name, const Tensor& tensor, at::ArrayRef<Dimension> accepted,
                                   int64_t dim) {
    std::vector<int64_t> sizes;
    for (int i = 0; i < accepted[dim].count; ++i) sizes.push_back(accepted[dim].sizes[i].guard_int(__FILE__, __LINE__));
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    std::string some;
    for (const int64_t size : sizes) some += (some.empty() ? "" : " or ") + std::to_string(size);
    if (accepted[dim].or_divisor && sizes.back() > 3) some += " or divide " + std::to_string(sizes.back());
    TORCH_CHECK_VALUE(false, name, " must be ", layout_of(accepted), ": dimension ", dim, " must be ", some,
                      ", got shape ", shape_of(tensor));
}

// Checks the dimensions from `first` on. `hint`: the end of the error for a wrong number of dimensions.
void check_dimensions(const char* name, const Tensor& tensor, at::ArrayRef<Dimension> accepted, int64_t first = 0,
                      const std::string& hint = "") {
    const auto count = static_cast<int64_t>(accepted.size());
    if (tensor.dim() - first != count) {
        TORCH_CHECK_VALUE(false, name, " must have ", dimensions(count), " ", layout_of(accepted), ", got shape ",
                          shape_of(first == 0 ? tensor : tensor[0]), hint);
    }
    for (int64_t dim = 0; dim < count; ++dim) {
        const SymInt size = tensor.sym_size(first + dim);
        bool fits = false;
        for (int i = 0; i < accepted[dim].count && !fits; ++i) fits = size == accepted[dim].sizes[i];
        if (!fits && accepted[dim].or_divisor) fits = size > 0 && accepted[dim].sizes[0] % size == 0;
        if (!fits) refuse_dimension(name, first == 0 ? tensor : tensor[0], accepted, dim);
    }
}

// The dimensions of a mask or bias of fixed length.
std::array<Dimension, 4> fixed_dimensions(const Tensor& query, const Tensor& key) {
    Dimension batch = one_of("{B|B/n|1}", query.sym_size(0), 1);
    batch.or_divisor = true;
    return {std::move(batch), one_of("{H|Hkv|1}", query.sym_size(2), key.sym_size(2), 1),
            one_of("{Sq|1}", query.sym_size(1), 1), one_of("{Sk|1}", key.sym_size(1), 1)};
}
Dimension packed_heads(const Tensor& query, const Tensor& key) {
    return one_of("{H|Hkv|1}", query.sym_size(1), key.sym_size(1), 1);
}

// What to pass instead of a mask or bias (B, Sq, Sk), (H, Sq, Sk), (Sq, Sk) or (B, Sk); empty for other shapes, and
// where B could be another dimension.
std::string missing_dimensions_hint(const std::string& name, const Tensor& scores, const Tensor& query,
                                    const Tensor& key) {
    const SymInt batch = query.sym_size(0), rows = query.sym_size(1), keys = key.sym_size(1);
    const auto is_heads = [&](const SymInt& size) { return size == query.sym_size(2) || size == key.sym_size(2); };
    const auto sizes = scores.sym_sizes();
    if ((sizes.size() != 2 && sizes.size() != 3) || sizes.back() != keys) return "";
    if (sizes.size() == 3) {
        if (sizes[1] != rows || is_heads(rows) || (sizes[0] == batch) == is_heads(sizes[0])) return "";
        return ": pass " + name + (sizes[0] == batch ? "[:, None]" : "[None]");
    }
    if ((sizes[0] == rows) == (sizes[0] == batch)) return "";
    if (scores.scalar_type() == at::kBool && sizes[0] == batch) return ": pass KeyIntervalMask.padding(" + name + ")";
    if (is_heads(sizes[0])) return "";
    return ": pass " + name + (sizes[0] == rows ? "[None, None]" : "[:, None, None]");
}

void check_scores(const char* name, const Tensor& scores, const Tensor& query, const Tensor& key,
                  std::optional<int64_t> max_seqlen_k) {
    check_dense(name, scores);
    if (!max_seqlen_k) {
        check_dimensions(name, scores, fixed_dimensions(query, key), 0,
                         missing_dimensions_hint(name, scores, query, key));
    } else {
        TORCH_CHECK_VALUE(scores.dim() == 2 || scores.dim() == 3, name,
                          " must be (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k), got shape ",
                          shape_of(scores));
        if (scores.dim() == 2) {
            check_dimensions(name, scores, {one_of("total_k", key.sym_size(0)), packed_heads(query, key)});
        } else {
            check_dimensions(name, scores,
                             {one_of("total_q", query.sym_size(0)), packed_heads(query, key),
                              one_of("max_seqlen_k", *max_seqlen_k)});
        }
    }
    check_device(scores, name, query, "query");
}

bool is_floating(const Tensor& tensor) {
    const auto dtype = tensor.scalar_type();
    return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
}

// Whether lengths on a GPU are read back and checked too, which synchronizes: a debugging aid.
bool checks_devices() {
    static const bool checks = [] {
        const char* set = std::getenv("FLASH_DMATTN_CHECK");
        return set != nullptr && std::string(set) == "1";
    }();
    return checks;
}

// A CPU tensor skips the dispatcher, where a transform would wrap it.
Tensor read_back(const Tensor& lengths) { return lengths.is_cpu() ? lengths.contiguous() : lengths.cpu().contiguous(); }

// The error shows the first offset that does not fit; where it decreases, also the one before it.
[[noreturn]] void refuse_offsets(const CuSeqlens& given, at::ArrayRef<int32_t> offsets) {
    std::ostringstream upto, got;
    std::string hint;
    if (given.total) upto << " to " << (given.or_less ? "at most " : "") << *given.total << ", " << given.counted;
    const size_t decrease = std::is_sorted_until(offsets.begin(), offsets.end()) - offsets.begin();
    if (offsets[0] != 0) {
        got << "[0] = " << offsets[0];
        if (given.total && decrease == offsets.size() && offsets.back() == *given.total)
            hint = std::string(": pass torch.nn.functional.pad(") + given.name + ", (1, 0))";
    } else if (decrease < offsets.size()) {
        got << "[" << decrease - 1 << ":" << decrease + 1 << "] = [" << offsets[decrease - 1] << ", "
            << offsets[decrease] << "]";
    } else {
        got << "[-1] = " << offsets.back();
        if (given.total && offsets.back() < *given.total)
            hint = ": if the rest is padding, make it a sequence of its own";
    }
    if (given.total && std::accumulate(offsets.begin(), offsets.end(), int64_t{0}) == *given.total) {
        hint = std::string(": if these are lengths, pass torch.nn.functional.pad(") + given.name +
               ".cumsum(0, dtype=torch.int32), (1, 0))";
    }
    TORCH_CHECK_VALUE(false, given.name, " must be non-decreasing from 0", upto.str(), ", got ", given.name, got.str(),
                      hint);
}

}  // namespace

bool is_stand_in(const Tensor& tensor) {
    using Key = c10::DispatchKey;
    constexpr c10::DispatchKeySet stand_ins(
        {Key::Python, Key::FuncTorchBatched, Key::FuncTorchGradWrapper, Key::Functionalize});
    return tensor.key_set().has_any(stand_ins);
}

bool is_host_readable(const Tensor& tensor) {
    if (is_stand_in(tensor)) return false;
    return tensor.is_cpu() || (tensor.is_cuda() && checks_devices());
}

void check_rows_of(const char* name, const Tensor& tensor, const char* layout) {
    check_ndim(name, tensor, layout);
    TORCH_CHECK_TYPE(is_floating(tensor), name, " must be one of float16, bfloat16, float32, float64, got ",
                     dtype_of(tensor));
}

void check_head_dim(const char* name, const Tensor& tensor) {
    const SymInt head_dim = tensor.sym_size(-1);
    TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= kMaxHeadDim, name, " must have a head dimension from 1 to ",
                      kMaxHeadDim, ", got ", head_dim);
}

void check_matches_query(const char* name, const Tensor& tensor, const Tensor& query, bool same_dtype) {
    TORCH_CHECK_TYPE(!same_dtype || tensor.scalar_type() == query.scalar_type(), name, " must have query's dtype ",
                     dtype_of(query), ", got ", dtype_of(tensor));
    check_device(tensor, name, query, "query");
    const SymInt heads = query.sym_size(-2), kv_heads = tensor.sym_size(-2);
    TORCH_CHECK_VALUE(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0, "query's head count must be a multiple of ",
                      name, "'s, got ", heads, " and ", kv_heads);
}

void check_same_head_dim(const char* name, const Tensor& tensor, const Tensor& query) {
    TORCH_CHECK_VALUE(tensor.sym_size(-1) == query.sym_size(-1), name, " must have query's head dimension ",
                      query.sym_size(-1), ", got ", tensor.sym_size(-1));
}

void check_batch(const char* name, const Tensor& tensor, const Tensor& query) {
    TORCH_CHECK_VALUE(tensor.sym_size(0) == query.sym_size(0), name, " must have query's batch size ",
                      query.sym_size(0), ", got ", tensor.sym_size(0));
}

void check_rows(const Tensor& query, const Tensor& key, const Tensor& value, bool varlen) {
    const char* layout_q = varlen ? "(total_q, H, D)" : "(B, Sq, H, D)";
    const char* layout_k = varlen ? "(total_k, Hkv, D)" : "(B, Sk, Hkv, D)";
    check_rows_of("query", query, layout_q);
    check_rows_of("key", key, layout_k);
    check_rows_of("value", value, layout_k);
    check_matches_query("key", key, query, true);
    check_same_head_dim("key", key, query);
    check_matches_query("value", value, query, true);
    check_head_dim("query", query);
    check_head_dim("value", value);
    TORCH_CHECK_VALUE(key.sym_sizes().slice(0, key.dim() - 1) == value.sym_sizes().slice(0, value.dim() - 1),
                      "key and value must have the same shape except for the head dimension, got ", shape_of(key),
                      " and ", shape_of(value));
    if (!varlen) check_batch("key", key, query);
}

void check_kernels(const Tensor& query) {
    const auto dtype = query.scalar_type();
    TORCH_CHECK_TYPE(!query.device().is_cuda() || dtype == at::kHalf || dtype == at::kBFloat16,
                     "query must be float16 or bfloat16 on CUDA (float32 through the backend 'triton'), got ",
                     dtype_of(query));
}

void check_mask(const Tensor& mask, const Tensor& query, const Tensor& key, std::optional<int64_t> max_seqlen_k) {
    const auto dtype = mask.scalar_type();
    const char* hint = at::isFloatingType(dtype)
                           ? ": pass a mask of 0 and 1 as attn_mask.bool(), an additive one as attn_bias"
                       : at::isComplexType(dtype) ? ""
                                                  : ": pass attn_mask.bool()";
    TORCH_CHECK_TYPE(dtype == at::kBool, "attn_mask must be bool (True = visible), got ", dtype_of(mask), hint);
    check_scores("attn_mask", mask, query, key, max_seqlen_k);
}

void check_packed_mask(const Tensor& bits, const Tensor& summaries, const Tensor& query, const Tensor& key,
                       int64_t batch, bool varlen) {
    for (const auto& [tensor, name, dtype] :
         {std::tuple(&bits, "mask", at::kInt), std::tuple(&summaries, "mask_summaries", at::kByte)}) {
        TORCH_CHECK_TYPE(tensor->scalar_type() == dtype, name, " must be what pack_mask returned on CUDA, ",
                         dtype_name(dtype), ", got ", dtype_of(*tensor));
        check_device(*tensor, name, query, "query");
        TORCH_CHECK_VALUE(tensor->is_contiguous(), name, " must be contiguous, got strides ", tensor->strides());
    }
    const Dimension words = one_of("words", bits.dim() > 0 ? bits.sym_size(-1) : 0);
    if (!varlen) {
        const auto fixed = fixed_dimensions(query, key);
        check_dimensions("mask", bits, {fixed[0], fixed[1], fixed[2], words});
    } else if (bits.dim() == 4) {  // broadcast over rows
        check_dimensions("mask", bits, {one_of("B", batch), packed_heads(query, key), one_of("1", 1), words});
    } else {
        check_dimensions("mask", bits, {one_of("total_q", query.sym_size(0)), packed_heads(query, key), words});
    }
}

void check_intervals(const Tensor& intervals, const Tensor& query, const Tensor& key, bool varlen) {
    check_dtype(intervals, "attn_mask.start", at::kInt);
    TORCH_CHECK_VALUE(intervals.dim() > 0 && intervals.sym_size(0) == 2,
                      "attn_mask's intervals must be starts and ends (2, ...), got shape ", shape_of(intervals));
    if (varlen) {
        check_dimensions("attn_mask.start", intervals, {one_of("total_k", key.sym_size(0)), packed_heads(query, key)},
                         1);
    } else {
        const auto fixed = fixed_dimensions(query, key);
        const Dimension batch = one_of("{B|1}", query.sym_size(0), 1);
        check_dimensions("attn_mask.start", intervals, {batch, fixed[1], one_of("Sk", key.sym_size(1))}, 1);
    }
    check_device(intervals, "attn_mask", query, "query");
}

void check_bias(const Tensor& bias, const Tensor& query, const Tensor& key, std::optional<int64_t> max_seqlen_k) {
    const auto dtype = bias.scalar_type();
    TORCH_CHECK_TYPE(dtype == query.scalar_type() || dtype == at::kFloat, "attn_bias must be ", dtype_of(query),
                     query.scalar_type() == at::kFloat ? "" : " or float32", ", got ", dtype_of(bias),
                     dtype == at::kBool ? ": pass a mask as attn_mask" : "");
    check_scores("attn_bias", bias, query, key, max_seqlen_k);
}

std::string missing_table_dimensions_hint(const Tensor& table, const Tensor& query, const Tensor& key,
                                          const SymInt& batch) {
    if (table.dim() == 1) return ": pass relative_bias[None, None]";
    if (table.dim() != 2) return "";
    const SymInt size = table.sym_size(0);
    const bool is_per_head = (size == query.sym_size(-2) || size == key.sym_size(-2)) && size != batch;
    return is_per_head ? ": pass relative_bias[None]" : "";
}

void check_relative_bias(const Tensor& bias, const Tensor& query, const Tensor& key, const SymInt& batch) {
    const char* name = "relative_bias";
    check_dense(name, bias);
    const bool has_grid = bias.dim() == 4;
    TORCH_CHECK_VALUE(bias.dim() == 3 || has_grid, name,
                      " must be ({B|1}, {H|Hkv|1}, 2R + 1), or with grid=(h, w) ({B|1}, {H|Hkv|1}, 2h - 1, 2w - 1), "
                      "got shape ",
                      shape_of(bias), missing_table_dimensions_hint(bias, query, key, batch));
    const Dimension batches = one_of("{B|1}", batch, 1);
    const Dimension heads = one_of("{H|Hkv|1}", query.sym_size(-2), key.sym_size(-2), 1);
    if (has_grid) {
        TORCH_CHECK_VALUE(query.dim() == 4, name, " of a grid is for fixed length, got shape ", shape_of(bias));
        check_dimensions(name, bias,
                         {batches, heads, one_of("2h - 1", bias.sym_size(2)), one_of("2w - 1", bias.sym_size(3))});
    } else {
        check_dimensions(name, bias, {batches, heads, one_of("2R + 1", bias.sym_size(2))});
    }
    SymInt tokens = 1, entries = 1;
    for (int64_t dim = 2; dim < bias.dim(); ++dim) {
        const SymInt size = bias.sym_size(dim);
        entries *= size;
        TORCH_CHECK_VALUE(size % 2 == 1, name, " must have an odd number of entries in dimension ", dim, ", ",
                          has_grid ? (dim == 2 ? "2h - 1" : "2w - 1") : "2R + 1", ", got shape ", shape_of(bias));
        tokens *= (size + 1) / 2;
    }
    TORCH_CHECK_VALUE(entries < int64_t{1} << 31, name, " must have fewer than 2^31 entries per head, got shape ",
                      shape_of(bias));
    TORCH_CHECK_VALUE(!has_grid || (query.sym_size(1) == tokens && key.sym_size(1) == tokens), name, " of shape ",
                      shape_of(bias), " is of a grid of ", tokens, " tokens, got ", query.sym_size(1),
                      " query rows and ", key.sym_size(1), " keys");
    const auto dtype = bias.scalar_type();
    TORCH_CHECK_TYPE(dtype == query.scalar_type() || dtype == at::kFloat, name, " must be ", dtype_of(query),
                     query.scalar_type() == at::kFloat ? "" : " or float32", ", got ", dtype_of(bias));
    check_device(bias, name, query, "query");
}

void check_length(const char* name, int64_t length) {
    // Kernels step through rows and keys by up to 2^17, in 32 bits.
    constexpr int64_t kMax = (int64_t{1} << 31) - (int64_t{1} << 17);
    TORCH_CHECK_VALUE(length >= 0 && length <= kMax, name, " must be from 0 to ", kMax, ", got ", length);
}

void check_seqused_k(const Tensor& seqused_k, const Tensor& query, const Tensor& key) {
    check_ndim("cache_seqlens", seqused_k, "(B)");
    check_dtype(seqused_k, "cache_seqlens", at::kInt);
    check_device(seqused_k, "cache_seqlens", query, "query");
    TORCH_CHECK_VALUE(seqused_k.sym_size(0) == query.sym_size(0), "cache_seqlens must have query's batch size ",
                      query.sym_size(0), ", got ", seqused_k.sym_size(0));
    if (!is_host_readable(seqused_k)) return;
    const Tensor lengths = read_back(seqused_k);
    for (const int32_t length : at::ArrayRef<int32_t>(lengths.const_data_ptr<int32_t>(), lengths.numel())) {
        TORCH_CHECK_VALUE(length >= 0 && length <= key.sym_size(1), "cache_seqlens must be from 0 to ", key.sym_size(1),
                          ", the number of keys, got ", length);
    }
}

void check_cu_seqlens(const CuSeqlens& given) {
    check_ndim(given.name, given.tensor, "(B + 1)");
    check_dtype(given.tensor, given.name, at::kInt);
    if (given.reference != nullptr) check_device(given.tensor, given.name, *given.reference, given.whose);
    TORCH_CHECK_VALUE(given.tensor.sym_size(0) >= 1, given.name, " must have B + 1 elements, at least 1, got ",
                      given.tensor.sym_size(0));
    if (!is_host_readable(given.tensor)) return;
    const Tensor offsets = read_back(given.tensor);
    const at::ArrayRef<int32_t> at(offsets.const_data_ptr<int32_t>(), offsets.numel());
    int64_t longest = 0, shortest = 0;
    for (size_t b = 1; b < at.size(); ++b) {
        const int64_t length = int64_t{at[b]} - at[b - 1];
        longest = std::max(longest, length);
        shortest = std::min(shortest, length);
    }
    const bool ends = !given.total || at.back() == *given.total || (given.or_less && at.back() < *given.total);
    if (at[0] != 0 || !ends || shortest < 0) refuse_offsets(given, at);
    TORCH_CHECK_VALUE(!given.longest || longest <= *given.longest, given.longest_name,
                      " must be at least the longest sequence ", longest, ", got ", *given.longest);
}

void check_same_sequences(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
    check_ndim("cu_seqlens_q", cu_seqlens_q, "(B + 1)");
    check_ndim("cu_seqlens_k", cu_seqlens_k, "(B + 1)");
    TORCH_CHECK_VALUE(cu_seqlens_q.sym_size(0) == cu_seqlens_k.sym_size(0),
                      "cu_seqlens_q and cu_seqlens_k must both have B + 1 elements, got ", cu_seqlens_q.sym_size(0),
                      " and ", cu_seqlens_k.sym_size(0));
}

void check_varlen(const Varlen& varlen, const Tensor& query, const Tensor& key) {
    const auto check = [&](const char* name, const Tensor& tensor, const Tensor& rows, const char* counted,
                           const char* longest_name, int64_t longest) {
        std::optional<int64_t> total;
        if (!rows.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) total = rows.size(0);
        check_cu_seqlens({name, tensor, &query, "query", total, counted, /*or_less=*/false, longest_name, longest});
    };
    check_same_sequences(varlen.cu_seqlens_q, varlen.cu_seqlens_k);
    check("cu_seqlens_q", varlen.cu_seqlens_q, query, "the rows of query", "max_seqlen_q", varlen.max_seqlen_q);
    check("cu_seqlens_k", varlen.cu_seqlens_k, key, "the number of keys", "max_seqlen_k", varlen.max_seqlen_k);
}

}  // namespace flash_dmattn
