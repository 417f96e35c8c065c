// The Python module: check the tensors, fill the params, hand them to the device's runner. Nothing else.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "build_info.h"
#include "cpu/attention.h"
#include "params.h"

#ifdef FLASH_DMATTN_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/attention.h"
#endif

namespace flash_dmattn {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_shape(const Tensor& tensor, const char* name, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " must have shape ", shape, ", got ", tensor.sizes());
}

void check_dtype(const Tensor& tensor, const char* name, at::ScalarType dtype) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be ", dtype, ", got ", tensor.scalar_type());
}

void check_device(const Tensor& tensor, const char* name, const Tensor& query) {
    TORCH_CHECK(tensor.device() == query.device(), name, " must be on ", query.device(), ", got ", tensor.device());
}

void check_last_contiguous(const Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(tensor.stride(-1) == 1 || tensor.size(-1) <= 1 || tensor.numel() == 0, name,
                      " must be contiguous in its last dimension, got strides ", tensor.strides());
}

// Sequences of variable length; absent where the length is fixed.
struct Varlen {
    Tensor cu_seqlens_q, cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k;
};
using OptionalVarlen = std::optional<Varlen>;

struct Options {
    double softmax_scale, softcap;
    bool is_causal;
};

DataType data_type(const Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
        case at::kHalf: return DataType::kFloat16;
        case at::kBFloat16: return DataType::kBFloat16;
        case at::kFloat: return DataType::kFloat32;
        case at::kDouble: return DataType::kFloat64;
        default: TORCH_CHECK_TYPE(false, name, " must be float16, bfloat16, float32 or float64, got ", tensor.scalar_type());
    }
}

at::ScalarType accumulation_type(const Tensor& query) {
    return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The CUDA kernels read rows in pieces of 16 bytes; rows that do not lie so are copied, at O(S D).
Tensor readable_rows(const Tensor& rows) {
    if (rows.is_cpu()) return rows;
    constexpr int64_t kBytes = 16;
    const int64_t elements = kBytes / rows.element_size();
    bool aligned = reinterpret_cast<uintptr_t>(rows.data_ptr()) % kBytes == 0 && rows.stride(-1) == 1;
    for (int64_t dim = 0; dim + 1 < rows.dim(); ++dim) aligned &= rows.stride(dim) % elements == 0;
    return aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// A stride of 0 where the dimension has one element: it serves every index.
int64_t broadcast_stride(const Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

RowsView rows_view(const Tensor& t, bool varlen) {
    if (varlen) return {t.data_ptr(), 0, t.stride(0), t.stride(1)};
    return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

RowStatView row_stat_view(const Tensor& t, bool varlen) {
    if (varlen) return {t.data_ptr(), 0, t.stride(0)};
    return {t.data_ptr(), t.stride(0), t.stride(1)};
}

// A mask or bias: 4 dimensions of fixed length; of variable length 2 (one number a key) or 3 (one a pair).
PairView pair_sizes(at::IntArrayRef shape) {
    PairView view;
    view.batches = shape.size() == 4 ? shape[0] : 1;
    view.heads = shape[1];
    view.per_key = shape.size() == 4 ? shape[2] == 1 : shape.size() == 2;
    return view;
}

PairView pair_view(const Tensor& t) {
    PairView view = pair_sizes(t.sizes());
    view.data = t.data_ptr();
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

void check_pairs(at::IntArrayRef shape, const char* name, const AttentionParams& p, const OptionalVarlen& varlen,
                 int64_t total_q, int64_t total_k) {
    const auto fits = [&](int64_t dim, std::initializer_list<int64_t> sizes) {
        return std::find(sizes.begin(), sizes.end(), shape[dim]) != sizes.end();
    };
    const bool heads_fit = shape.size() >= 2 && fits(1, {p.heads, p.kv_heads, 1});
    if (!varlen) {
        TORCH_CHECK_VALUE(shape.size() == 4 && heads_fit && fits(0, {p.batch, 1}) && fits(2, {p.seqlen_q, 1}) &&
                              fits(3, {p.seqlen_k, 1}),
                          name, " must be ({B|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), got ", shape);
        return;
    }
    const bool per_key = shape.size() == 2 && fits(0, {total_k});
    const bool per_pair = shape.size() == 3 && fits(0, {total_q}) && fits(2, {p.seqlen_k});
    TORCH_CHECK_VALUE(heads_fit && (per_key || per_pair), name,
                      " must be (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k), got ", shape);
}

// What forward and backward have in common.
void fill(AttentionParams& p, const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
          const OptionalVarlen& varlen, const Options& options) {
    const int64_t ndim = varlen ? 3 : 4;
    TORCH_CHECK_VALUE(query.dim() == ndim && key.dim() == ndim, "query and key must have ", ndim, " dimensions, got ",
                      query.sizes(), " and ", key.sizes());
    p.batch = varlen ? varlen->cu_seqlens_q.numel() - 1 : query.size(0);
    p.seqlen_q = varlen ? varlen->max_seqlen_q : query.size(1);
    p.seqlen_k = varlen ? varlen->max_seqlen_k : key.size(1);
    p.heads = query.size(-2);
    p.kv_heads = key.size(-2);
    p.head_dim = query.size(-1);
    p.dtype = data_type(query, "query");
    p.softmax_scale = options.softmax_scale;
    p.softcap = options.softcap;
    p.is_causal = options.is_causal;

    const int64_t total_q = query.size(0), total_k = key.size(0);
    varlen ? check_shape(key, "key", {total_k, p.kv_heads, p.head_dim})
           : check_shape(key, "key", {p.batch, p.seqlen_k, p.kv_heads, p.head_dim});
    check_shape(value, "value", key.sizes());
    TORCH_CHECK_VALUE(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0,
                      "query's head count must be a multiple of key's, got ", p.heads, " and ", p.kv_heads);
    TORCH_CHECK_VALUE(p.head_dim > 0 && p.head_dim <= 256 && p.head_dim % 8 == 0,
                      "query's head dimension must be a multiple of 8 up to 256, got ", p.head_dim);
    for (const auto& [tensor, name] : {std::pair(&query, "query"), std::pair(&key, "key"), std::pair(&value, "value")}) {
        check_dtype(*tensor, name, query.scalar_type());
        check_device(*tensor, name, query);
        check_last_contiguous(*tensor, name);
    }
    p.query = rows_view(query, varlen.has_value());
    p.key = rows_view(key, varlen.has_value());
    p.value = rows_view(value, varlen.has_value());

    if (varlen) {
        for (const auto& [tensor, name] : {std::pair(&varlen->cu_seqlens_q, "cu_seqlens_q"),
                                           std::pair(&varlen->cu_seqlens_k, "cu_seqlens_k")}) {
            check_dtype(*tensor, name, at::kInt);
            check_device(*tensor, name, query);
            check_shape(*tensor, name, {p.batch + 1});
            check_last_contiguous(*tensor, name);
        }
        p.cu_seqlens_q = varlen->cu_seqlens_q.const_data_ptr<int32_t>();
        p.cu_seqlens_k = varlen->cu_seqlens_k.const_data_ptr<int32_t>();
    }
    if (bias) {
        check_device(*bias, "bias", query);
        check_pairs(bias->sizes(), "bias", p, varlen, total_q, total_k);
        static_cast<PairView&>(p.bias) = pair_view(*bias);
        p.bias.kind = p.bias.per_key ? BiasKind::kKey : BiasKind::kDense;
        p.bias.dtype = data_type(*bias, "bias");
        TORCH_CHECK_TYPE(p.bias.dtype == p.dtype || (p.bias.per_key && bias->scalar_type() == at::kFloat),
                         "bias must have query's dtype ", query.scalar_type(), " (or float32 where it is one number a key), got ",
                         bias->scalar_type());
    }
}

bool nothing_to_do(const AttentionParams& p) { return p.batch == 0 || p.heads == 0; }

void check_mask(const AttentionParams& p, const Tensor& mask, const Tensor& query, const Tensor& key,
                const OptionalVarlen& varlen) {
    check_dtype(mask, "mask", at::kBool);
    check_device(mask, "mask", query);
    check_pairs(mask.sizes(), "mask", p, varlen, query.size(0), key.size(0));
}

#ifdef FLASH_DMATTN_WITH_CUDA
void check_cuda_dtype(const Tensor& query) {
    TORCH_CHECK_TYPE(query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16,
                     "query must be float16 or bfloat16 on CUDA (float32 through the backend 'triton'), got ",
                     query.scalar_type());
}

// The two tensors that hold a packed mask: bits int32 in the shape of the mask, 32 keys a word, and of every tile of
// 64 x 64 pairs nine bytes, uint8 (9, {B|1}, heads, row tiles, key tiles): its columns, and last its kind.
PackedMask in_tensors(PackedMask packed, const Tensor& bits, const Tensor& tiles) {
    packed.bits = reinterpret_cast<uint32_t*>(bits.data_ptr<int32_t>());
    packed.columns = reinterpret_cast<uint64_t*>(tiles.data_ptr());
    packed.kinds = reinterpret_cast<TileKind*>(packed.columns + packed.tiles_size);
    return packed;
}

std::pair<Tensor, Tensor> forward_cuda(FwdParams& p, const Tensor& query, const OptionalTensor& mask) {
    check_cuda_dtype(query);
    const c10::cuda::CUDAGuard guard(query.device());
    const auto stream = c10::cuda::getCurrentCUDAStream().stream();
    Tensor bits = at::empty({0}, query.options().dtype(at::kInt)), tiles = at::empty({0}, query.options().dtype(at::kByte));
    if (mask) {
        const PackedMask plan = plan_packed_mask(p, query.size(0));
        const bool by_row_of_all = mask->dim() == 3;
        bits = by_row_of_all ? at::empty({query.size(0), plan.heads, plan.words}, bits.options())
                             : at::empty({plan.batches, plan.heads, p.mask.per_key ? 1 : p.seqlen_q, plan.words}, bits.options());
        tiles = at::empty({9, plan.batches, plan.heads, plan.row_tiles, plan.key_tiles}, tiles.options());
        p.packed_mask = in_tensors(plan, bits, tiles);
        pack_mask_cuda(p, p.packed_mask, stream);
    }
    p.splits = plan_fwd_splits(p);
    const auto scratch = query.options().dtype(at::kFloat);
    const int64_t rows = p.splits > 1 ? p.splits * p.batch * p.heads * p.seqlen_q : 0;
    const Tensor split_out = at::empty({rows * p.head_dim}, scratch), split_lse = at::empty({rows}, scratch);
    p.split_out = split_out.data_ptr<float>();
    p.split_lse = split_lse.data_ptr<float>();
    mha_fwd_cuda(p, stream);
    return {bits, tiles};
}

void backward_cuda(BwdParams& p, const Tensor& query, const OptionalTensor& bits, const OptionalTensor& tiles) {
    check_cuda_dtype(query);
    const c10::cuda::CUDAGuard guard(query.device());
    if (bits) {
        const PackedMask plan = plan_packed_mask(p, query.size(0));
        TORCH_CHECK_VALUE(bits->numel() == plan.bits_size && tiles && tiles->numel() == 9 * plan.tiles_size,
                          "mask and mask_tiles must be what the forward returned");
        p.packed_mask = in_tensors(plan, *bits, *tiles);
    }
    const BwdScratch sizes = plan_bwd_scratch(p, query.size(0));
    const auto scratch = query.options().dtype(at::kFloat);
    const Tensor dquery_accum = at::empty({sizes.dquery_accum}, scratch);
    const Tensor dquery_turns = at::empty({sizes.dquery_turns}, scratch.dtype(at::kInt));
    const Tensor dbias_parts = at::empty({sizes.dbias_parts}, scratch);
    p.dquery_accum = dquery_accum.data_ptr<float>();
    p.dquery_turns = dquery_turns.data_ptr<int32_t>();
    p.dbias_parts = dbias_parts.data_ptr<float>();
    mha_bwd_cuda(p, c10::cuda::getCurrentCUDAStream().stream());
}
#else
[[noreturn]] void no_cuda(const Tensor& query) {
    TORCH_CHECK(false, "flash_dmattn was built without CUDA kernels, got tensors on ", query.device());
}
std::pair<Tensor, Tensor> forward_cuda(FwdParams&, const Tensor& query, const OptionalTensor&) { no_cuda(query); }
void backward_cuda(BwdParams&, const Tensor& query, const OptionalTensor&, const OptionalTensor&) { no_cuda(query); }
#endif

// (out, lse, mask_bits, mask_tiles); the last two are the packed mask, empty on the CPU.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& query_in, const Tensor& key_in, const Tensor& value_in,
                                                   const OptionalTensor& mask, const OptionalTensor& bias,
                                                   const OptionalVarlen& varlen, const Options& options) {
    const Tensor query = readable_rows(query_in), key = readable_rows(key_in), value = readable_rows(value_in);
    FwdParams p;
    fill(p, query, key, value, bias, varlen, options);
    if (mask) {
        check_mask(p, *mask, query, key, varlen);
        p.mask = pair_view(*mask);
    }
    Tensor out = at::empty(query.sizes(), query.options());
    const auto lse_options = query.options().dtype(accumulation_type(query));
    Tensor lse = varlen ? at::empty({p.heads, query.size(0)}, lse_options)
                        : at::empty({p.batch, p.heads, p.seqlen_q}, lse_options);
    p.out = rows_view(out, varlen.has_value());
    p.lse = row_stat_view(lse, varlen.has_value());
    if (!query.is_cpu()) {
        const auto [bits, tiles] = forward_cuda(p, query, mask);
        return {out, lse, bits, tiles};
    }
    if (!nothing_to_do(p)) mha_fwd_cpu(p);
    return {out, lse, at::empty({0}, query.options().dtype(at::kInt)), at::empty({0}, query.options().dtype(at::kByte))};
}

// Column sums of a key bias's gradient, [B, {H|Hkv}, 1, Sk] or [{H|Hkv}, total_k], to the bias's shape and dtype.
Tensor sum_to_bias(const Tensor& column_sums, const Tensor& bias, bool varlen) {
    if (varlen) {
        const Tensor sums = bias.size(1) == 1 ? column_sums.sum(0, /*keepdim=*/true) : column_sums;
        return sums.t().to(bias.scalar_type()).contiguous();
    }
    return column_sums.sum_to_size(bias.sizes()).to(bias.scalar_type());
}

// mask: bool on the CPU; on CUDA the mask_bits of the forward, mask_tiles beside it.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout, const Tensor& dlse, const Tensor& query_in,
                                                    const Tensor& key_in, const Tensor& value_in, const Tensor& out,
                                                    const Tensor& lse, const OptionalTensor& mask,
                                                    const OptionalTensor& mask_tiles,
                                                    const OptionalTensor& bias, const OptionalVarlen& varlen,
                                                    const Options& options, bool deterministic, bool needs_dbias) {
    const Tensor query = readable_rows(query_in), key = readable_rows(key_in), value = readable_rows(value_in);
    BwdParams p;
    fill(p, query, key, value, bias, varlen, options);
    if (mask) {
        check_device(*mask, "mask", query);
        if (query.is_cpu()) {
            check_mask(p, *mask, query, key, varlen);
            p.mask = pair_view(*mask);
        } else {
            check_dtype(*mask, "mask", at::kInt);
            TORCH_CHECK_VALUE(mask->dim() == 3 || mask->dim() == 4, "mask must be what the forward returned");
            p.mask = pair_sizes(mask->sizes());
        }
    }
    TORCH_CHECK_VALUE(!needs_dbias || bias, "a gradient of the bias was asked for, but there is no bias");
    for (const auto& [tensor, name] : {std::pair(&dout, "dout"), std::pair(&out, "out")}) {
        check_shape(*tensor, name, query.sizes());
        check_dtype(*tensor, name, query.scalar_type());
        check_device(*tensor, name, query);
    }
    const auto accumulation = query.options().dtype(accumulation_type(query));
    for (const auto& [tensor, name] : {std::pair(&dlse, "dlse"), std::pair(&lse, "lse")}) {
        varlen ? check_shape(*tensor, name, {p.heads, query.size(0)})
               : check_shape(*tensor, name, {p.batch, p.heads, p.seqlen_q});
        check_dtype(*tensor, name, accumulation_type(query));
        check_device(*tensor, name, query);
    }
    const bool is_varlen = varlen.has_value();
    check_last_contiguous(out, "out");
    check_last_contiguous(lse, "lse");
    const Tensor dout_rows = readable_rows(dout.stride(-1) == 1 ? dout : dout.contiguous());
    const Tensor dlse_rows = dlse.contiguous();
    const Tensor delta = at::empty_like(dlse_rows);
    Tensor dquery = at::empty(query.sizes(), query.options());
    Tensor dkey = at::empty(key.sizes(), key.options());
    Tensor dvalue = at::empty(value.sizes(), value.options());
    p.out = rows_view(out, is_varlen);
    p.lse = row_stat_view(lse, is_varlen);
    p.dout = rows_view(dout_rows, is_varlen);
    p.dlse = row_stat_view(dlse_rows, is_varlen);
    p.delta = row_stat_view(delta, is_varlen);
    p.dquery = rows_view(dquery, is_varlen);
    p.dkey = rows_view(dkey, is_varlen);
    p.dvalue = rows_view(dvalue, is_varlen);
    p.deterministic = deterministic;

    Tensor dbias = at::empty({0}, query.options());
    if (needs_dbias && p.bias.kind == BiasKind::kKey) {
        const int64_t heads = p.bias.heads == p.heads ? p.heads : p.kv_heads;
        if (is_varlen) {
            dbias = at::zeros({heads, key.size(0)}, accumulation);
            p.dbias.head_stride = dbias.stride(0);
        } else {
            dbias = at::zeros({p.batch, heads, 1, p.seqlen_k}, accumulation);
            p.dbias.batch_stride = dbias.stride(0);
            p.dbias.head_stride = dbias.stride(1);
        }
        p.dbias.data = dbias.data_ptr();
        p.dbias.batches = p.batch;
        p.dbias.heads = heads;
        p.dbias.col_stride = 1;
        p.dbias.per_key = true;
    } else if (needs_dbias) {
        // Of variable length the pairs beyond a sequence's keys are no pairs: no unit writes them.
        dbias = is_varlen || nothing_to_do(p) ? at::zeros(bias->sizes(), bias->options())
                                              : at::empty(bias->sizes(), bias->options());
        p.dbias = pair_view(dbias);
    }

    if (!query.is_cpu()) {
        backward_cuda(p, query, mask, mask_tiles);
    } else if (!nothing_to_do(p)) {
        mha_bwd_cpu(p);
    }
    if (needs_dbias && p.bias.kind == BiasKind::kKey) dbias = sum_to_bias(dbias, *bias, is_varlen);
    return {dquery, dkey, dvalue, dbias};
}

// What the CPU kernels were compiled for may be missing where they run.
std::optional<std::string> why_not_usable() {
#if defined(CPU_CAPABILITY_AVX512)
    const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(CPU_CAPABILITY_AVX2)
    const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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
    namespace py = pybind11;
    const auto no_gil = py::call_guard<py::gil_scoped_release>();

    m.def("why_not_usable", &why_not_usable, "None, or why the compiled kernels cannot run on this machine.");
    m.def("build_info", &build_info, "What was built, as a dict.");
#ifdef FLASH_DMATTN_WITH_CUDA
    m.attr("has_cuda") = true;
#else
    m.attr("has_cuda") = false;
#endif

    m.def(
        "mha_fwd",
        [](const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
           const OptionalTensor& bias, double softmax_scale, double softcap, bool is_causal) {
            return forward(query, key, value, mask, bias, std::nullopt, {softmax_scale, softcap, is_causal});
        },
        no_gil, "(out, lse, mask_bits, mask_tiles) of fixed length; the packed mask is empty on the CPU.");
    m.def(
        "mha_varlen_fwd",
        [](const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
           const OptionalTensor& bias, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
           int64_t max_seqlen_k, double softmax_scale, double softcap, bool is_causal) {
            const Varlen varlen{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
            return forward(query, key, value, mask, bias, varlen, {softmax_scale, softcap, is_causal});
        },
        no_gil, "(out, lse, mask_bits, mask_tiles) of variable length; the packed mask is empty on the CPU.");
    m.def(
        "mha_bwd",
        [](const Tensor& dout, const Tensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
           const Tensor& out, const Tensor& lse, const OptionalTensor& mask,
           const OptionalTensor& mask_tiles, const OptionalTensor& bias,
           double softmax_scale, double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
            return backward(dout, dlse, query, key, value, out, lse, mask, mask_tiles, bias, std::nullopt,
                            {softmax_scale, softcap, is_causal}, deterministic, needs_dbias);
        },
        no_gil, "(dquery, dkey, dvalue, dbias) of fixed length; dbias is empty where it is not needed.");
    m.def(
        "mha_varlen_bwd",
        [](const Tensor& dout, const Tensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
           const Tensor& out, const Tensor& lse, const OptionalTensor& mask,
           const OptionalTensor& mask_tiles, const OptionalTensor& bias,
           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
           double softmax_scale, double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
            const Varlen varlen{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
            return backward(dout, dlse, query, key, value, out, lse, mask, mask_tiles, bias, varlen,
                            {softmax_scale, softcap, is_causal}, deterministic, needs_dbias);
        },
        no_gil, "(dquery, dkey, dvalue, dbias) of variable length; dbias is empty where it is not needed.");
}
