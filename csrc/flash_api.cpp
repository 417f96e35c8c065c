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
#include "cpu/key_lists.h"
#include "params.h"

#ifdef FLASH_DMATTN_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/attention.h"
#include "cuda/key_lists.h"
#include "cuda/prefix_topk.h"
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

// Which pairs the caller lets see each other: by at most one of mask and intervals, by lists of keys, or by both lists
// and intervals. See KeyListsView.
struct MaskTensors {
    // bool ({B|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}); of variable length (total_k, heads) or (total_q, heads, Sk)
    OptionalTensor mask;
    // int32 (2, {B|1}, {H|Hkv|1}, Sk), starts and ends; of variable length (2, total_k, heads)
    OptionalTensor intervals;
    OptionalTensor list_keys;    // int32 (capacity)
    OptionalTensor list_starts;  // int64 (lists + 1)
    OptionalTensor list_rows;    // int32 (capacity, 4)
    std::optional<int64_t> list_batches, list_heads;
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

IntervalView interval_view(const Tensor& intervals) {
    const Tensor start = intervals[0];
    IntervalView view;
    view.start = start.const_data_ptr<int32_t>();
    view.end = view.start + intervals.stride(0);
    view.heads = start.size(1);
    view.head_stride = broadcast_stride(start, 1);
    if (start.dim() == 3) {
        view.batches = start.size(0);
        view.batch_stride = broadcast_stride(start, 0);
        view.col_stride = start.stride(2);
    } else {
        view.col_stride = start.stride(0);
    }
    return view;
}

void check_intervals(const Tensor& intervals, const AttentionParams& p, bool varlen, int64_t total_k) {
    check_dtype(intervals, "intervals", at::kInt);
    const auto shape = intervals.sizes();
    const auto fits = [&](int64_t dim, std::initializer_list<int64_t> sizes) {
        return std::find(sizes.begin(), sizes.end(), shape[dim]) != sizes.end();
    };
    const bool fit = varlen ? shape.size() == 3 && fits(1, {total_k}) && fits(2, {p.heads, p.kv_heads, 1})
                            : shape.size() == 4 && fits(1, {p.batch, 1}) && fits(2, {p.heads, p.kv_heads, 1}) &&
                                  fits(3, {p.seqlen_k});
    TORCH_CHECK_VALUE(fit && shape[0] == 2, "intervals must be ",
                      varlen ? "(2, total_k, {H|Hkv|1})" : "(2, {B|1}, {H|Hkv|1}, Sk)", ", got ", shape);
}

KeyListsView lists_view(const MaskTensors& masks, const AttentionParams& p, const Tensor& query) {
    TORCH_CHECK_VALUE(masks.list_starts && masks.list_batches && masks.list_heads,
                      "list_keys comes with list_starts, list_batches and list_heads");
    TORCH_CHECK_VALUE(!masks.mask, "mask and list_keys cannot both be given: the lists say what a bool mask does");
    const Tensor &keys = *masks.list_keys, &starts = *masks.list_starts;
    KeyListsView view;
    view.batches = *masks.list_batches;
    view.heads = *masks.list_heads;
    view.rows_alike = !masks.intervals && !masks.list_rows;
    view.row_tiles = view.rows_alike ? 1 : (p.seqlen_q + KeyListsView::kRows - 1) / KeyListsView::kRows;
    TORCH_CHECK_VALUE(view.batches == p.batch || view.batches == 1, "list_batches must be ", p.batch, " or 1, got ",
                      view.batches);
    TORCH_CHECK_VALUE(view.heads == p.heads || view.heads == p.kv_heads || view.heads == 1, "list_heads must be ",
                      p.heads, ", ", p.kv_heads, " or 1, got ", view.heads);
    check_shape(starts, "list_starts", {view.batches * view.heads * view.row_tiles + 1});
    check_dtype(starts, "list_starts", at::kLong);
    check_shape(keys, "list_keys", {keys.numel()});
    check_dtype(keys, "list_keys", at::kInt);
    for (const auto& [tensor, name] : {std::pair(&keys, "list_keys"), std::pair(&starts, "list_starts")}) {
        check_device(*tensor, name, query);
        check_last_contiguous(*tensor, name);
    }
    view.keys = keys.const_data_ptr<int32_t>();
    view.starts = starts.const_data_ptr<int64_t>();
    if (masks.list_rows) {
        const Tensor& rows = *masks.list_rows;
        check_shape(rows, "list_rows", {keys.numel(), KeyListsView::kRows / 32});
        check_dtype(rows, "list_rows", at::kInt);
        check_device(rows, "list_rows", query);
        TORCH_CHECK_VALUE(rows.is_contiguous(), "list_rows must be contiguous, got strides ", rows.strides());
        view.rows = reinterpret_cast<const uint32_t*>(rows.const_data_ptr<int32_t>());
    }
    return view;
}

void set_sequences(AttentionParams& p, const Varlen& varlen, const Tensor& like) {
    for (const auto& [tensor, name] : {std::pair(&varlen.cu_seqlens_q, "cu_seqlens_q"),
                                       std::pair(&varlen.cu_seqlens_k, "cu_seqlens_k")}) {
        check_dtype(*tensor, name, at::kInt);
        check_device(*tensor, name, like);
        check_shape(*tensor, name, {p.batch + 1});
        check_last_contiguous(*tensor, name);
    }
    p.cu_seqlens_q = varlen.cu_seqlens_q.const_data_ptr<int32_t>();
    p.cu_seqlens_k = varlen.cu_seqlens_k.const_data_ptr<int32_t>();
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

    if (varlen) set_sequences(p, *varlen, query);
    if (bias) {
        check_device(*bias, "bias", query);
        check_pairs(bias->sizes(), "bias", p, varlen, total_q, total_k);
        static_cast<PairView&>(p.bias) = pair_view(*bias);
        p.bias.kind = p.bias.per_key ? BiasKind::kKey : BiasKind::kDense;
        TORCH_CHECK_VALUE(p.bias.per_key || bias->size(-1) == p.seqlen_k,
                          "bias must have a column for every key where it has rows, got ", bias->sizes());
        p.bias.dtype = data_type(*bias, "bias");
        TORCH_CHECK_TYPE(p.bias.dtype == p.dtype || (p.bias.per_key && bias->scalar_type() == at::kFloat),
                         "bias must have query's dtype ", query.scalar_type(), " (or float32 where it is one number a key), got ",
                         bias->scalar_type());
    }
}

bool nothing_to_do(const AttentionParams& p) { return p.batch == 0 || p.heads == 0; }

void check_bool_mask(const AttentionParams& p, const Tensor& mask, const Tensor& query, const Tensor& key,
                const OptionalVarlen& varlen) {
    check_dtype(mask, "mask", at::kBool);
    check_device(mask, "mask", query);
    check_pairs(mask.sizes(), "mask", p, varlen, query.size(0), key.size(0));
}

// `mask` itself is no bool in the backward on CUDA, and is left to the caller.
void fill_sparse(AttentionParams& p, const MaskTensors& masks, const Tensor& query, const Tensor& key, bool varlen) {
    TORCH_CHECK_VALUE(!masks.mask || !masks.intervals, "mask and intervals cannot both be given");
    if (masks.intervals) {
        check_intervals(*masks.intervals, p, varlen, key.size(0));
        check_device(*masks.intervals, "intervals", query);
        p.intervals = interval_view(*masks.intervals);
    }
    if (masks.list_keys) p.lists = lists_view(masks, p, query);
}

#ifdef FLASH_DMATTN_WITH_CUDA
void check_cuda_inputs(const AttentionParams& p, const Tensor& query) {
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

// Fills params.interval_tiles, where the kernels go over a mask of intervals in tiles; gives their memory.
Tensor summarize_intervals(AttentionParams& p, const Tensor& query, cudaStream_t stream) {
    const bool has_tiles = p.intervals.present() && !p.lists.present();
    const IntervalTiles plan = has_tiles ? plan_interval_tiles(p) : IntervalTiles();
    const Tensor memory = at::empty({plan.size * static_cast<int64_t>(sizeof(IntervalTile))}, query.options().dtype(at::kByte));
    if (plan.size == 0) return memory;
    p.interval_tiles = plan;
    p.interval_tiles.tiles = reinterpret_cast<IntervalTile*>(memory.data_ptr());
    summarize_intervals_cuda(p, p.interval_tiles, stream);
    return memory;
}

std::pair<Tensor, Tensor> forward_cuda(FwdParams& p, const Tensor& query, const OptionalTensor& mask) {
    check_cuda_inputs(p, query);
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
    const Tensor interval_tiles = summarize_intervals(p, query, stream);
    p.splits = plan_fwd_splits(p);
    const auto scratch = query.options().dtype(at::kFloat);
    const int64_t rows = p.splits > 1 ? p.splits * p.batch * p.heads * p.seqlen_q : 0;
    const Tensor split_out = at::empty({rows * p.head_dim}, scratch), split_lse = at::empty({rows}, scratch);
    p.split_out = split_out.data_ptr<float>();
    p.split_lse = split_lse.data_ptr<float>();
    mha_fwd_cuda(p, stream);
    return {bits, tiles};
}

void backward_cuda(BwdParams& p, const Tensor& query, const Tensor& key, const OptionalTensor& bits,
                   const OptionalTensor& tiles) {
    check_cuda_inputs(p, query);
    const c10::cuda::CUDAGuard guard(query.device());
    if (bits) {
        const PackedMask plan = plan_packed_mask(p, query.size(0));
        TORCH_CHECK_VALUE(bits->numel() == plan.bits_size && tiles && tiles->numel() == 9 * plan.tiles_size,
                          "mask and mask_tiles must be what the forward returned");
        p.packed_mask = in_tensors(plan, *bits, *tiles);
    }
    const auto stream = c10::cuda::getCurrentCUDAStream().stream();
    const Tensor interval_tiles = summarize_intervals(p, query, stream);
    const BwdScratch sizes = plan_bwd_scratch(p, query.size(0), key.size(0));
    const auto scratch = query.options().dtype(at::kFloat);
    const Tensor dquery_accum = at::empty({sizes.dquery_accum}, scratch);
    const Tensor dquery_turns = at::empty({sizes.dquery_turns}, scratch.dtype(at::kInt));
    const Tensor dbias_parts = at::empty({sizes.dbias_parts}, scratch);
    p.dquery_accum = dquery_accum.data_ptr<float>();
    p.dquery_turns = dquery_turns.data_ptr<int32_t>();
    p.dbias_parts = dbias_parts.data_ptr<float>();
    const Tensor dkv_accum = at::empty({sizes.dkv_accum}, scratch), dbias_accum = at::empty({sizes.dbias_accum}, scratch);
    const Tensor watermarks = at::empty({sizes.watermarks}, scratch.dtype(at::kInt));
    p.dkv_accum = dkv_accum.data_ptr<float>();
    p.dbias_accum = dbias_accum.data_ptr<float>();
    p.watermarks = watermarks.data_ptr<int32_t>();
    mha_bwd_cuda(p, stream);
}

// The plan that list_fill_cuda needs.
Tensor list_lengths_cuda(const AttentionParams& p, const Tensor& mask, const Tensor& lengths) {
    const c10::cuda::CUDAGuard guard(mask.device());
    const KeyListsPlan plan = plan_key_lists(p, mask.size(0));
    const Tensor scratch = at::empty({plan.scratch_bytes}, mask.options().dtype(at::kByte));
    key_list_lengths_cuda(p, plan, scratch.data_ptr(), lengths.data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream());
    return scratch;
}

void list_fill_cuda(const AttentionParams& p, const Tensor& mask, const Tensor& starts, const Tensor& scratch,
                    const Tensor& keys, const Tensor& rows) {
    const c10::cuda::CUDAGuard guard(mask.device());
    const KeyListsPlan plan = plan_key_lists(p, mask.size(0));
    TORCH_CHECK_VALUE(scratch.device() == mask.device() && scratch.numel() == plan.scratch_bytes,
                      "plan must be what list_lengths returned");
    key_list_fill_cuda(p, plan, scratch.data_ptr(), starts.const_data_ptr<int64_t>(), keys.numel(),
                       keys.data_ptr<int32_t>(), reinterpret_cast<uint32_t*>(rows.data_ptr<int32_t>()),
                       c10::cuda::getCurrentCUDAStream());
}

void search_prefixes_on(const Tensor& values, const Tensor& last, const Tensor& wanted, const Tensor& found,
                        int64_t levels) {
    const c10::cuda::CUDAGuard guard(values.device());
    const PrefixSearch search{values.const_data_ptr<int32_t>(), last.const_data_ptr<int32_t>(),
                              wanted.const_data_ptr<int32_t>(), found.data_ptr<int32_t>(), values.numel(),
                              found.numel(), static_cast<int>(levels)};
    const Tensor scratch = at::empty({prefix_search_scratch(search)}, values.options().dtype(at::kByte));
    search_prefixes_cuda(search, scratch.data_ptr(), c10::cuda::getCurrentCUDAStream());
}
#else
[[noreturn]] void no_cuda(const Tensor& query) {
    TORCH_CHECK(false, "flash_dmattn was built without CUDA kernels (" FLASH_DMATTN_WHY_NO_CUDA "), got tensors on ",
                query.device());
}
std::pair<Tensor, Tensor> forward_cuda(FwdParams&, const Tensor& query, const OptionalTensor&) { no_cuda(query); }
void backward_cuda(BwdParams&, const Tensor& query, const Tensor&, const OptionalTensor&, const OptionalTensor&) {
    no_cuda(query);
}
Tensor list_lengths_cuda(const AttentionParams&, const Tensor& mask, const Tensor&) { no_cuda(mask); }
void list_fill_cuda(const AttentionParams&, const Tensor& mask, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
    no_cuda(mask);
}
void search_prefixes_on(const Tensor& values, const Tensor&, const Tensor&, const Tensor&, int64_t) { no_cuda(values); }
#endif

// (out, lse, mask_bits, mask_tiles); the last two are the packed mask, empty on the CPU.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& query_in, const Tensor& key_in, const Tensor& value_in,
                                                   const MaskTensors& masks, const OptionalTensor& bias,
                                                   const OptionalVarlen& varlen, const Options& options) {
    const Tensor query = readable_rows(query_in), key = readable_rows(key_in), value = readable_rows(value_in);
    FwdParams p;
    fill(p, query, key, value, bias, varlen, options);
    fill_sparse(p, masks, query, key, varlen.has_value());
    if (masks.mask) {
        check_bool_mask(p, *masks.mask, query, key, varlen);
        p.mask = pair_view(*masks.mask);
    }
    Tensor out = at::empty(query.sizes(), query.options());
    const auto lse_options = query.options().dtype(accumulation_type(query));
    Tensor lse = varlen ? at::empty({p.heads, query.size(0)}, lse_options)
                        : at::empty({p.batch, p.heads, p.seqlen_q}, lse_options);
    p.out = rows_view(out, varlen.has_value());
    p.lse = row_stat_view(lse, varlen.has_value());
    if (!query.is_cpu()) {
        const auto [bits, tiles] = forward_cuda(p, query, masks.mask);
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

// masks.mask: bool on the CPU; on CUDA the mask_bits of the forward, mask_tiles beside it.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout, const Tensor& dlse, const Tensor& query_in,
                                                    const Tensor& key_in, const Tensor& value_in, const Tensor& out,
                                                    const Tensor& lse, const MaskTensors& masks,
                                                    const OptionalTensor& mask_tiles, const OptionalTensor& bias,
                                                    const OptionalVarlen& varlen, const Options& options,
                                                    bool deterministic, bool needs_dbias) {
    const Tensor query = readable_rows(query_in), key = readable_rows(key_in), value = readable_rows(value_in);
    BwdParams p;
    fill(p, query, key, value, bias, varlen, options);
    fill_sparse(p, masks, query, key, varlen.has_value());
    if (const OptionalTensor& mask = masks.mask) {
        check_device(*mask, "mask", query);
        if (query.is_cpu()) {
            check_bool_mask(p, *mask, query, key, varlen);
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
    const Tensor out_rows = readable_rows(out);
    const Tensor dlse_rows = dlse.contiguous();
    const Tensor delta = at::empty_like(dlse_rows);
    const auto gradient_of = [&](const Tensor& x) {
        return nothing_to_do(p) ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
    };
    Tensor dquery = gradient_of(query), dkey = gradient_of(key), dvalue = gradient_of(value);
    p.out = rows_view(out_rows, is_varlen);
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
        // Of variable length the pairs beyond a sequence's keys are no pairs: no unit writes them. Where there are lists,
        // those of them alone are written.
        dbias = is_varlen || p.lists.present() ? at::zeros(bias->sizes(), bias->options()) : gradient_of(*bias);
        p.dbias = pair_view(dbias);
    }

    if (!query.is_cpu()) {
        backward_cuda(p, query, key, masks.mask, mask_tiles);
    } else if (!nothing_to_do(p)) {
        mha_bwd_cpu(p);
    }
    if (needs_dbias && p.bias.kind == BiasKind::kKey) dbias = sum_to_bias(dbias, *bias, is_varlen);
    return {dquery, dkey, dvalue, dbias};
}

// What the lists of a mask are made from: its heads and batch elements are the lists'.
AttentionParams list_params(const MaskTensors& masks, int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                            const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
    TORCH_CHECK_VALUE(masks.mask.has_value() != masks.intervals.has_value(),
                      "exactly one of mask and intervals must be given");
    TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                      "cu_seqlens_q and cu_seqlens_k come together");
    OptionalVarlen varlen;
    if (cu_seqlens_q) varlen = Varlen{*cu_seqlens_q, *cu_seqlens_k, seqlen_q, seqlen_k};
    const Tensor pairs = masks.mask ? *masks.mask : (*masks.intervals)[0];
    AttentionParams p;
    p.batch = varlen ? cu_seqlens_q->numel() - 1 : pairs.size(0);
    p.heads = p.kv_heads = pairs.size(1);
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.is_causal = is_causal;
    if (varlen) set_sequences(p, *varlen, pairs);
    if (masks.mask) {
        check_dtype(pairs, "mask", at::kBool);
        check_pairs(pairs.sizes(), "mask", p, varlen, pairs.size(0), pairs.size(0));
        p.mask = pair_view(pairs);
    } else {
        check_intervals(*masks.intervals, p, varlen.has_value(), pairs.size(0));
        p.intervals = interval_view(*masks.intervals);
    }
    return p;
}

int64_t row_tiles_of(const AttentionParams& p) {
    return p.mask.per_key ? 1 : (p.seqlen_q + KeyListsView::kRows - 1) / KeyListsView::kRows;
}

// (lengths, plan): 0, then of every list its length, rounded up to KeyListsView::kAlign; and what list_fill needs to know.
std::pair<Tensor, Tensor> list_lengths(const MaskTensors& masks, int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
    const AttentionParams p = list_params(masks, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k);
    const Tensor& mask = masks.mask ? *masks.mask : *masks.intervals;
    Tensor lengths = at::zeros({p.batch * p.heads * row_tiles_of(p) + 1}, mask.options().dtype(at::kLong));
    if (mask.numel() == 0) return {lengths, at::empty({0}, lengths.options().dtype(at::kByte))};
    const Tensor of_lists = lengths.slice(0, 1);
    if (!mask.is_cpu()) return {lengths, list_lengths_cuda(p, mask, of_lists)};
    key_list_lengths_cpu(p, of_lists.data_ptr<int64_t>());
    return {lengths, at::empty({0}, lengths.options().dtype(at::kInt))};
}

// (keys, rows) of the lists that begin at `starts`; rows is empty but for a bool mask whose rows differ. Nothing is
// written from `capacity` on.
std::pair<Tensor, Tensor> list_fill(const MaskTensors& masks, int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                    const Tensor& starts, const Tensor& plan, int64_t capacity) {
    const AttentionParams p = list_params(masks, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k);
    const Tensor& mask = masks.mask ? *masks.mask : *masks.intervals;
    check_shape(starts, "starts", {p.batch * p.heads * row_tiles_of(p) + 1});
    check_dtype(starts, "starts", at::kLong);
    check_last_contiguous(starts, "starts");
    check_device(starts, "starts", mask);
    const auto options = mask.options().dtype(at::kInt);
    const bool with_rows = masks.mask && !p.mask.per_key;
    Tensor keys = at::empty({capacity}, options);
    Tensor rows = at::empty({with_rows ? capacity : 0, KeyListsView::kRows / 32}, options);
    if (mask.numel() == 0) return {keys, rows};
    if (!mask.is_cpu()) {
        list_fill_cuda(p, mask, starts, plan, keys, rows);
        return {keys, rows};
    }
    key_list_fill_cpu(p, starts.const_data_ptr<int64_t>(), capacity, keys.data_ptr<int32_t>(),
                      with_rows ? reinterpret_cast<uint32_t*>(rows.data_ptr<int32_t>()) : nullptr);
    return {keys, rows};
}

// (queries) int32: the number that would stand at `wanted` if values[: last + 1] were sorted. See PrefixSearch.
Tensor search_prefixes(const Tensor& values, const Tensor& last, const Tensor& wanted, int64_t levels) {
    for (const auto& [tensor, name] :
         {std::pair(&values, "values"), std::pair(&last, "last"), std::pair(&wanted, "wanted")}) {
        check_dtype(*tensor, name, at::kInt);
        check_device(*tensor, name, values);
        check_shape(*tensor, name, {tensor == &values ? values.numel() : last.numel()});
        check_last_contiguous(*tensor, name);
    }
    TORCH_CHECK_VALUE(values.numel() < int64_t{1} << 30 && levels >= 0 && levels <= 30,
                      "values must be fewer than 2^30 and levels at most 30, got ", values.numel(), " and ", levels);
    Tensor found = at::empty_like(wanted);
    search_prefixes_on(values, last, wanted, found, levels);
    return found;
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

    using OptionalInt = std::optional<int64_t>;
    py::class_<MaskTensors>(m, "MaskTensors", "Which pairs see each other: a mask, intervals, or lists of keys.")
        .def(py::init<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalInt,
                      OptionalInt>(),
             py::arg("mask") = py::none(), py::arg("intervals") = py::none(), py::arg("list_keys") = py::none(),
             py::arg("list_starts") = py::none(), py::arg("list_rows") = py::none(),
             py::arg("list_batches") = py::none(), py::arg("list_heads") = py::none());
    m.def("list_lengths", &list_lengths, no_gil, "(lengths, plan) of the lists of a mask's keys.");
    m.def("list_fill", &list_fill, no_gil, "(keys, rows) of the lists of a mask's keys.");
    m.def("search_prefixes", &search_prefixes, no_gil,
          "On CUDA: the numbers that would stand at `wanted` if the prefixes up to `last` of a permutation were sorted.");

    m.def(
        "mha_fwd",
        [](const Tensor& query, const Tensor& key, const Tensor& value, const MaskTensors& masks,
           const OptionalTensor& bias, double softmax_scale, double softcap, bool is_causal) {
            return forward(query, key, value, masks, bias, std::nullopt, {softmax_scale, softcap, is_causal});
        },
        no_gil, "(out, lse, mask_bits, mask_tiles) of fixed length; the packed mask is empty on the CPU.");
    m.def(
        "mha_varlen_fwd",
        [](const Tensor& query, const Tensor& key, const Tensor& value, const MaskTensors& masks,
           const OptionalTensor& bias, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
           int64_t max_seqlen_k, double softmax_scale, double softcap, bool is_causal) {
            const Varlen varlen{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
            return forward(query, key, value, masks, bias, varlen, {softmax_scale, softcap, is_causal});
        },
        no_gil, "(out, lse, mask_bits, mask_tiles) of variable length; the packed mask is empty on the CPU.");
    m.def(
        "mha_bwd",
        [](const Tensor& dout, const Tensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
           const Tensor& out, const Tensor& lse, const MaskTensors& masks, const OptionalTensor& mask_tiles,
           const OptionalTensor& bias, double softmax_scale, double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
            return backward(dout, dlse, query, key, value, out, lse, masks, mask_tiles, bias, std::nullopt,
                            {softmax_scale, softcap, is_causal}, deterministic, needs_dbias);
        },
        no_gil, "(dquery, dkey, dvalue, dbias) of fixed length; dbias is empty where it is not needed.");
    m.def(
        "mha_varlen_bwd",
        [](const Tensor& dout, const Tensor& dlse, const Tensor& query, const Tensor& key, const Tensor& value,
           const Tensor& out, const Tensor& lse, const MaskTensors& masks, const OptionalTensor& mask_tiles,
           const OptionalTensor& bias, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
           double softmax_scale, double softcap, bool is_causal, bool deterministic, bool needs_dbias) {
            const Varlen varlen{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
            return backward(dout, dlse, query, key, value, out, lse, masks, mask_tiles, bias, varlen,
                            {softmax_scale, softcap, is_causal}, deterministic, needs_dbias);
        },
        no_gil, "(dquery, dkey, dvalue, dbias) of variable length; dbias is empty where it is not needed.");
}
