#include "inputs.h"

namespace flash_dmattn {
namespace {

void set_sequences(AttentionParams& p, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
    for (const auto& [tensor, name] : {std::pair(&cu_seqlens_q, "cu_seqlens_q"), std::pair(&cu_seqlens_k, "cu_seqlens_k")})
        check_last_contiguous(*tensor, name);
    p.cu_seqlens_q = cu_seqlens_q.const_data_ptr<int32_t>();
    p.cu_seqlens_k = cu_seqlens_k.const_data_ptr<int32_t>();
}

// max_seqlen may be far above any sequence. On the CPU, where the lengths are at hand, work and memory go by these.
int64_t longest_sequence(const Tensor& cu_seqlens, int64_t max_seqlen) {
    if (!cu_seqlens.is_cpu()) return max_seqlen;
    const auto* at = cu_seqlens.const_data_ptr<int32_t>();
    int64_t longest = 0;
    for (int64_t b = 1; b < cu_seqlens.numel(); ++b) longest = std::max<int64_t>(longest, at[b] - at[b - 1]);
    return longest;
}

// How many batch elements, one after the other, share one of `batches`.
int64_t sharers(const AttentionParams& p, int64_t batches) {
    return p.cu_seqlens_q != nullptr || batches == 0 ? 1 : p.batch / batches;
}

KeyListsView lists_view(const MaskTensors& masks, const AttentionParams& p, const Tensor& query) {
    TORCH_CHECK_VALUE(masks.list_keys && masks.list_spans, "list_keys comes with list_spans");
    TORCH_CHECK_VALUE(!masks.mask, "mask and list_keys cannot both be given: the lists say what a bool mask does");
    const Tensor &keys = *masks.list_keys, &spans = *masks.list_spans;
    TORCH_CHECK_VALUE(spans.dim() == 4 && spans.size(0) == 2 && spans.is_contiguous(),
                      "list_spans must be contiguous (2, {B|B/n|1}, {H|Hkv|1}, row tiles), got shape ", shape_of(spans),
                      " and strides ", spans.strides());
    check_dtype(spans, "list_spans", at::kLong);
    KeyListsView view;
    view.batches = spans.size(1);
    view.heads = spans.size(2);
    view.rows_alike = !masks.intervals && !masks.list_rows;
    const int64_t row_tiles = view.rows_alike ? 1 : (p.seqlen_q + KeyListsView::kRows - 1) / KeyListsView::kRows;
    const bool varlen = p.cu_seqlens_q != nullptr;  // the lists may have been made for longer sequences than there are
    view.row_tiles = spans.size(3);
    TORCH_CHECK_VALUE(view.batches == p.batch || (view.batches > 0 && p.batch % view.batches == 0),
                      "list_spans must be of ", p.batch, " batch elements or a number that divides them, got ", view.batches);
    view.batch_sharers = sharers(p, view.batches);
    TORCH_CHECK_VALUE(view.heads == p.heads || view.heads == p.kv_heads || view.heads == 1, "list_spans must be of ",
                      p.heads, ", ", p.kv_heads, " or 1 heads, got ", view.heads);
    TORCH_CHECK_VALUE(view.row_tiles == row_tiles || (varlen && view.row_tiles > row_tiles), "list_spans must be of ",
                      varlen ? "at least " : "", row_tiles, " row tiles, got ", view.row_tiles);
    check_shape(keys, "list_keys", {keys.numel()});
    check_dtype(keys, "list_keys", at::kInt);
    check_last_contiguous(keys, "list_keys");
    check_device(keys, "list_keys", query, "query");
    check_device(spans, "list_spans", query, "query");
    view.keys = keys.const_data_ptr<int32_t>();
    view.capacity = keys.numel();
    view.begins = spans.const_data_ptr<int64_t>();
    view.ends = view.begins + spans.stride(0);
    const int64_t lists = view.batches * view.heads * view.row_tiles;
    view.longest = lists > 0 ? keys.numel() / lists : 0;
    for (int64_t list = 0; spans.is_cpu() && list < lists; ++list) {
        const int64_t begin = view.begins[list], end = view.ends[list];
        TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= view.capacity,
                          "list_spans must lie within the ", view.capacity, " list_keys, got a list from ", begin, " to ", end);
    }
    if (masks.list_rows) {
        const Tensor& rows = *masks.list_rows;
        check_shape(rows, "list_rows", {keys.numel(), KeyListsView::kRows / 32});
        check_dtype(rows, "list_rows", at::kInt);
        check_device(rows, "list_rows", query, "query");
        TORCH_CHECK_VALUE(rows.is_contiguous(), "list_rows must be contiguous, got strides ", rows.strides());
        view.rows = reinterpret_cast<const uint32_t*>(rows.const_data_ptr<int32_t>());
    }
    return view;
}

}  // namespace

void fill(AttentionParams& p, const Inputs& in) {
    const Tensor &query = in.query, &key = in.key, &value = in.value;
    const bool varlen = in.is_varlen();
    const std::optional<int64_t> max_seqlen_k = varlen ? std::optional(in.varlen->max_seqlen_k) : std::nullopt;
    check_rows(query, key, value, varlen);
    TORCH_CHECK_VALUE(query.size(-1) % 8 == 0, "query's head dimension must be a multiple of 8 up to 256, got ",
                      query.size(-1));
    for (const auto& [tensor, name] : {std::pair(&query, "query"), std::pair(&key, "key"), std::pair(&value, "value")})
        check_last_contiguous(*tensor, name);
    if (varlen) {
        check_varlen(*in.varlen, query, key);
        set_sequences(p, in.varlen->cu_seqlens_q, in.varlen->cu_seqlens_k);
    }

    p.batch = varlen ? in.varlen->cu_seqlens_q.numel() - 1 : query.size(0);
    p.seqlen_q = varlen ? longest_sequence(in.varlen->cu_seqlens_q, in.varlen->max_seqlen_q) : query.size(1);
    p.seqlen_k = varlen ? longest_sequence(in.varlen->cu_seqlens_k, in.varlen->max_seqlen_k) : key.size(1);
    p.total_q = varlen ? query.size(0) : p.batch * p.seqlen_q;
    p.total_k = varlen ? key.size(0) : p.batch * p.seqlen_k;
    p.heads = query.size(-2);
    p.kv_heads = key.size(-2);
    p.head_dim = query.size(-1);
    p.dtype = data_type(query);
    p.softmax_scale = in.options.softmax_scale;
    p.softcap = in.options.softcap;
    p.is_causal = in.options.is_causal;
    p.query = rows_view(query, varlen);
    p.key = rows_view(key, varlen);
    p.value = rows_view(value, varlen);

    if (in.seqlens_k) {
        TORCH_CHECK_VALUE(!varlen, "cache_seqlens is of fixed length; of variable length cu_seqlens_k says it");
        check_seqlens_k(*in.seqlens_k, query, key);
        check_last_contiguous(*in.seqlens_k, "cache_seqlens");
        p.seqlens_k = in.seqlens_k->const_data_ptr<int32_t>();
    }
    if (in.bias) {
        check_bias(*in.bias, query, key, max_seqlen_k);
        p.bias = bias_view(*in.bias);
        p.bias.batch_sharers = sharers(p, p.bias.batches);
        TORCH_CHECK_VALUE(varlen || in.bias->size(-1) == p.seqlen_k,
                          "attn_bias must have a column for every key, got shape ", shape_of(*in.bias));
    }
    const MaskTensors& masks = in.masks;
    TORCH_CHECK_VALUE(!masks.mask || !masks.intervals, "mask and intervals cannot both be given");
    if (masks.mask && query.is_cpu()) {
        check_mask(*masks.mask, query, key, max_seqlen_k);
        p.mask = pair_view(*masks.mask);
        p.mask.batch_sharers = sharers(p, p.mask.batches);
    } else if (masks.mask) {
        TORCH_CHECK_TYPE(masks.mask->scalar_type() == at::kInt && masks.mask_tiles,
                         "on CUDA mask and mask_tiles must be what pack_mask returned, got ", dtype_of(*masks.mask));
        check_device(*masks.mask, "mask", query, "query");
        check_device(*masks.mask_tiles, "mask_tiles", query, "query");
        TORCH_CHECK_VALUE(masks.mask->dim() == 3 || masks.mask->dim() == 4, "mask must be what pack_mask returned, got shape ",
                          shape_of(*masks.mask));
        p.mask = pair_sizes(masks.mask->sizes());
    }
    if (masks.intervals) {
        check_intervals(*masks.intervals, query, key, varlen);
        p.intervals = interval_view(*masks.intervals);
    }
    if (masks.list_keys || masks.list_spans || masks.list_rows) p.lists = lists_view(masks, p, query);
}

AttentionParams mask_params(const OptionalTensor& mask, const OptionalTensor& intervals, int64_t seqlen_q,
                            int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                            const OptionalTensor& cu_seqlens_k) {
    TORCH_CHECK_VALUE(mask.has_value() != intervals.has_value(), "exactly one of mask and intervals must be given");
    TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(), "cu_seqlens_q and cu_seqlens_k come together");
    const bool varlen = cu_seqlens_q.has_value();
    TORCH_CHECK_VALUE(seqlen_q >= 0 && seqlen_k >= 0, "seqlen_q and seqlen_k must not be negative, got ", seqlen_q, " and ",
                      seqlen_k);
    TORCH_CHECK_VALUE(mask || (intervals->dim() > 0 && intervals->size(0) == 2), "intervals must be (2, ...), got shape ",
                      shape_of(mask ? *mask : *intervals));
    const Tensor pairs = mask ? *mask : (*intervals)[0];
    check_dtype(pairs, mask ? "mask" : "intervals", mask ? at::kBool : at::kInt);
    const int64_t dims = pairs.dim();
    TORCH_CHECK_VALUE(mask ? (varlen ? dims == 2 || dims == 3 : dims == 4) : dims == (varlen ? 2 : 3),
                      mask ? "mask" : "intervals", " has the wrong number of dimensions, got shape ",
                      shape_of(mask ? *mask : *intervals));
    AttentionParams p;
    p.batch = varlen ? cu_seqlens_q->numel() - 1 : pairs.size(0);
    p.heads = p.kv_heads = pairs.size(1);
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.is_causal = is_causal;
    if (varlen) {
        check_same_sequences(*cu_seqlens_q, *cu_seqlens_k);
        for (const auto& [tensor, name] :
             {std::pair(&*cu_seqlens_q, "cu_seqlens_q"), std::pair(&*cu_seqlens_k, "cu_seqlens_k")}) {
            const bool of_queries = tensor == &*cu_seqlens_q;
            CuSeqlens given{name, *tensor, &pairs, mask ? "mask" : "intervals"};
            if (of_queries == (dims == 3)) given.total = pairs.size(0);
            given.longest_name = of_queries ? "seqlen_q" : "seqlen_k";
            given.longest = of_queries ? seqlen_q : seqlen_k;
            check_cu_seqlens(given);
        }
        set_sequences(p, *cu_seqlens_q, *cu_seqlens_k);
    }
    const auto fits = [](int64_t size, int64_t whole) { return size == whole || size == 1; };
    if (mask) {
        const bool whole = dims == 4   ? fits(pairs.size(2), seqlen_q) && fits(pairs.size(3), seqlen_k)
                           : dims == 3 ? pairs.size(2) == seqlen_k
                                       : true;
        TORCH_CHECK_VALUE(whole, "mask must be of ", seqlen_q, " rows and ", seqlen_k, " keys, got shape ", shape_of(*mask));
        p.mask = pair_view(pairs);
    } else {
        TORCH_CHECK_VALUE(varlen || pairs.size(2) == seqlen_k, "intervals must be of ", seqlen_k, " keys, got shape ",
                          shape_of(*intervals));
        p.intervals = interval_view(*intervals);
    }
    return p;
}

}  // namespace flash_dmattn
