#include "inputs.h"

#include <algorithm>
#include <limits>

namespace flash_dmattn {
namespace {

void set_sequences(AttentionParams& p, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
    for (const auto& [tensor, name] :
         {std::pair(&cu_seqlens_q, "cu_seqlens_q"), std::pair(&cu_seqlens_k, "cu_seqlens_k")})
        check_last_contiguous(*tensor, name);
    p.cu_seqlens_q = cu_seqlens_q.const_data_ptr<int32_t>();
    p.cu_seqlens_k = cu_seqlens_k.const_data_ptr<int32_t>();
}

// max_seqlen may be far above any sequence. On the CPU the lengths are readable, and bound the work and the memory.
int64_t longest_sequence(const Tensor& cu_seqlens, int64_t max_seqlen) {
    if (!cu_seqlens.is_cpu()) return max_seqlen;
    const auto* at = cu_seqlens.const_data_ptr<int32_t>();
    int64_t longest = 0;
    for (int64_t b = 1; b < cu_seqlens.numel(); ++b) longest = std::max<int64_t>(longest, at[b] - at[b - 1]);
    return longest;
}

// The number of consecutive batch elements that share one of `batches`.
int64_t batch_group_size_of(const AttentionParams& p, int64_t batches) {
    return p.cu_seqlens_q != nullptr || batches == 0 ? 1 : p.batch / batches;
}

// The CPU kernels search a list by bisection and skip keys beyond the last one, so that sorted lists without negative
// keys read nothing else. The CUDA kernels test every key.
void check_list_contents(const KeyListsView& view, int64_t lists) {
    for (int64_t list = 0; list < lists; ++list) {
        const int64_t begin = view.begins[list], end = view.ends[list];
        TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= view.capacity, "kv_indptr must lie within the ",
                          view.capacity, " kv_indices, got a list from ", begin, " to ", end);
        if (list > 0 && begin == view.begins[list - 1] && end == view.ends[list - 1]) continue;  // m_blocks share it
        const int32_t* keys = view.keys + begin;
        int64_t size = end - begin;
        while (size > 0 && keys[size - 1] < 0) --size;
        int32_t unsorted = size > 0 && keys[0] < 0;  // as wide as a key, so that the compiler vectorizes the loop
        for (int64_t j = 1; j < size; ++j) unsorted |= keys[j - 1] >= keys[j];
        if (!unsorted) continue;
        int64_t wrong = 0;
        while (keys[wrong] > (wrong > 0 ? keys[wrong - 1] : -1)) ++wrong;
        TORCH_CHECK_VALUE(false, "kv_indices must ascend from 0 within a list, with -1 after its last key, got ",
                          keys[wrong], " at ", begin + wrong, ", in the list from ", begin, " to ", end,
                          ": KeyLists.to(\"cpu\") sorts lists that were built on CUDA");
    }
}

// A packed mask that comes with its lists: the device uses the lists where these are short.
void check_mask_of_lists(const Inputs& in, const AttentionParams& p) {
    TORCH_CHECK_VALUE(!in.query.is_cpu(), "mask and kv_indices cannot both be given on the CPU");
    TORCH_CHECK_VALUE(
        p.cu_seqlens_q == nullptr && p.bias.kind != BiasKind::kDense && !is_bias_matrix(in) && in.kv_row_bits,
        "mask and kv_indices are given together as pack_and_list_mask returned them, of fixed length and "
        "without a dense attn_bias");
}

// The sizes of kv_indptr, and the rows of a list.
void set_list_sizes(KeyListsView& view, const Inputs& in, const AttentionParams& p) {
    const Tensor& kv_indptr = *in.kv_indptr;
    TORCH_CHECK_VALUE(kv_indptr.dim() == 4 && kv_indptr.size(0) == 2 && kv_indptr.is_contiguous(),
                      "kv_indptr must be contiguous (2, {B|B/n|1}, {H|Hkv|1}, m_blocks), got shape ",
                      shape_of(kv_indptr), " and strides ", kv_indptr.strides());
    check_dtype(kv_indptr, "kv_indptr", at::kLong);
    view.batches = kv_indptr.size(1);
    view.heads = kv_indptr.size(2);
    view.num_m_blocks = kv_indptr.size(3);
    const bool row_broadcast = !in.intervals && !in.kv_row_bits;  // all rows of a head share one list
    if (in.kv_row_bits) {
        TORCH_CHECK_VALUE(in.kv_row_bits->dim() == 2 &&
                              (in.kv_row_bits->size(1) == KeyListsView::kRows / 32 ||
                               (in.kv_row_bits->size(0) == 0 && in.kv_row_bits->size(1) == KeyListsView::kRows / 64)),
                          "kv_row_bits must be (capacity, ", KeyListsView::kRows / 32,
                          "), or where every row of a list sees its keys (0, a 32nd of its rows), got shape ",
                          shape_of(*in.kv_row_bits));
        view.m_block_rows = in.kv_row_bits->size(1) * 32;
    }
    const int64_t num_m_blocks = row_broadcast ? 1 : (p.seqlen_q + view.m_block_rows - 1) / view.m_block_rows;
    const bool varlen = p.cu_seqlens_q != nullptr;
    const bool or_more = varlen && !row_broadcast;  // the lists may have been built for longer sequences
    TORCH_CHECK_VALUE(view.batches == p.batch || (!varlen && view.batches > 0 && p.batch % view.batches == 0),
                      "kv_indptr must be of ", p.batch,
                      varlen ? " sequences" : " batch elements or a number that divides them", ", got ", view.batches);
    TORCH_CHECK_VALUE(view.heads == p.heads || view.heads == p.kv_heads || view.heads == 1, "kv_indptr must be of ",
                      p.heads, ", ", p.kv_heads, " or 1 heads, got ", view.heads);
    TORCH_CHECK_VALUE(view.num_m_blocks == num_m_blocks || (or_more && view.num_m_blocks > num_m_blocks),
                      "kv_indptr must be of ", or_more ? "at least " : "", num_m_blocks, " m_blocks, got ",
                      view.num_m_blocks);
    view.batch_group_size = batch_group_size_of(p, view.batches);
}

KeyListsView lists_view(const Inputs& in, const AttentionParams& p) {
    TORCH_CHECK_VALUE(in.kv_indices && in.kv_indptr, "kv_indices comes with kv_indptr");
    if (in.mask) check_mask_of_lists(in, p);
    KeyListsView view;
    set_list_sizes(view, in, p);
    const Tensor &keys = *in.kv_indices, &kv_indptr = *in.kv_indptr;
    check_shape(keys, "kv_indices", {keys.numel()});
    check_dtype(keys, "kv_indices", at::kInt);
    check_last_contiguous(keys, "kv_indices");
    check_device(keys, "kv_indices", in.query, "query");
    check_device(kv_indptr, "kv_indptr", in.query, "query");
    view.keys = keys.const_data_ptr<int32_t>();
    view.capacity = keys.numel();
    view.begins = kv_indptr.const_data_ptr<int64_t>();
    view.ends = view.begins + kv_indptr.stride(0);
    const int64_t lists = view.batches * view.heads * view.num_m_blocks;
    view.estimated_length = lists > 0 ? keys.numel() / lists : 0;
    if (kv_indptr.is_cpu()) check_list_contents(view, lists);
    if (!in.kv_row_bits || in.kv_row_bits->size(0) == 0) return view;
    const Tensor& rows = *in.kv_row_bits;
    check_shape(rows, "kv_row_bits", {keys.numel(), KeyListsView::kRows / 32});
    check_dtype(rows, "kv_row_bits", at::kInt);
    check_device(rows, "kv_row_bits", in.query, "query");
    TORCH_CHECK_VALUE(rows.is_contiguous(), "kv_row_bits must be contiguous, got strides ", rows.strides());
    view.rows = reinterpret_cast<const uint32_t*>(rows.const_data_ptr<int32_t>());
    return view;
}

// Checks the sequences of a list's source. `reference`, named `whose`, holds total_q rows or total_k keys, where known.
void check_and_set_sequences(AttentionParams& p, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                             const Tensor& reference, const char* whose, std::optional<int64_t> total_q,
                             std::optional<int64_t> total_k) {
    check_same_sequences(*cu_seqlens_q, *cu_seqlens_k);
    const auto check = [&](const char* name, const Tensor& tensor, std::optional<int64_t> total, const char* counted,
                           const char* longest_name, int64_t longest) {
        check_cu_seqlens({name, tensor, &reference, whose, total, counted, /*or_less=*/false, longest_name, longest});
    };
    const std::string rows = std::string("the rows of ") + whose;
    check("cu_seqlens_q", *cu_seqlens_q, total_q, rows.c_str(), "seqlen_q", p.seqlen_q);
    check("cu_seqlens_k", *cu_seqlens_k, total_k, "the keys of mask", "seqlen_k", p.seqlen_k);
    set_sequences(p, *cu_seqlens_q, *cu_seqlens_k);
}

void check_lengths(int64_t seqlen_q, int64_t seqlen_k, const OptionalTensor& cu_seqlens_q,
                   const OptionalTensor& cu_seqlens_k) {
    TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                      "cu_seqlens_q and cu_seqlens_k come together");
    check_length("seqlen_q", seqlen_q);
    check_length("seqlen_k", seqlen_k);
}

// int32 ({B|1}, {H|Hkv|1}, rows, k), or of variable length (total_q, {H|Hkv|1}, k).
IndexView index_view(const Tensor& indices, int64_t tile_rows) {
    IndexView view;
    view.packed = indices.dim() == 3;
    view.data = indices.const_data_ptr<int32_t>();
    view.batches = view.packed ? 1 : indices.size(0);
    view.batch_stride = view.packed ? 0 : broadcast_stride(indices, 0);
    view.heads = indices.size(1);
    view.head_stride = broadcast_stride(indices, 1);
    view.row_stride = indices.stride(view.packed ? 0 : 2);
    view.count = indices.size(-1);
    view.col_stride = indices.stride(-1);
    view.tile_rows = tile_rows;
    return view;
}

// What the CUDA kernels lack beside a dense float32 bias, which they read score by score.
void check_bias_matrix(const Inputs& in, const AttentionParams& p) {
    constexpr int64_t kTile = 256;  // positions of the last tile may lie beyond the last row and key
    const char* name = "attn_bias of one number per score in float32 beside a 16-bit query";
    TORCH_CHECK_VALUE(!in.is_varlen(), name, " is for fixed length on CUDA, got cu_seqlens_q");
    TORCH_CHECK_VALUE(!in.relative_bias, name, " cannot be combined with relative_bias on CUDA");
    TORCH_CHECK_VALUE((p.seqlen_q + kTile) * (p.seqlen_k + kTile) <= std::numeric_limits<int32_t>::max(), name,
                      " must have (Sq + 256) * (Sk + 256) below 2^31 on CUDA, got shape ", shape_of(*in.bias));
}

// The CUDA kernels divide positions by w (RelativeBiasView::inverse_grid_width).
void check_grid(const RelativeBiasView& view) {
    const int64_t height = view.grid_height, width = view.grid_width;
    TORCH_CHECK_VALUE(
        !view.has_grid() || (height < int64_t{1} << 23 && height * width * width < int64_t{1} << 40),
        "relative_bias of a grid (h, w) must have h below 2^23 and h * w * w below 2^40 on CUDA, got a grid of ",
        height, " x ", width);
}

OptionalVarlen varlen_of(const Inputs& in) {
    const bool some = in.cu_seqlens_q || in.cu_seqlens_k || in.max_seqlen_q || in.max_seqlen_k;
    const bool all = in.cu_seqlens_q && in.cu_seqlens_k && in.max_seqlen_q && in.max_seqlen_k;
    TORCH_CHECK_VALUE(some == all, "cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k come together");
    if (!all) return std::nullopt;
    return Varlen{*in.cu_seqlens_q, *in.cu_seqlens_k, in.max_seqlen_q->guard_int(__FILE__, __LINE__),
                  in.max_seqlen_k->guard_int(__FILE__, __LINE__)};
}

std::optional<int64_t> max_seqlen_k_of(const OptionalVarlen& sequences) {
    return sequences ? std::optional(sequences->max_seqlen_k) : std::nullopt;
}

// query, key and value, their sizes and lengths, and the options.
void set_rows(AttentionParams& p, const Inputs& in, const OptionalVarlen& sequences) {
    const Tensor &query = in.query, &key = in.key, &value = in.value;
    const bool varlen = sequences.has_value();
    check_rows(query, key, value, varlen);
    check_same_head_dim("value", value, query);
    TORCH_CHECK_VALUE(query.size(-1) % 8 == 0, "query's head dimension must be a multiple of 8 up to 256, got ",
                      query.size(-1));
    for (const auto& [tensor, name] : {std::pair(&query, "query"), std::pair(&key, "key"), std::pair(&value, "value")})
        check_last_contiguous(*tensor, name);
    if (varlen) {
        check_varlen(*sequences, query, key);
        set_sequences(p, sequences->cu_seqlens_q, sequences->cu_seqlens_k);
    }
    p.batch = varlen ? sequences->cu_seqlens_q.numel() - 1 : query.size(0);
    p.seqlen_q = varlen ? longest_sequence(sequences->cu_seqlens_q, sequences->max_seqlen_q) : query.size(1);
    p.seqlen_k = varlen ? longest_sequence(sequences->cu_seqlens_k, sequences->max_seqlen_k) : key.size(1);
    check_length(varlen ? "max_seqlen_q" : "the number of query rows", p.seqlen_q);
    check_length(varlen ? "max_seqlen_k" : "the number of keys", p.seqlen_k);
    p.total_q = varlen ? query.size(0) : p.batch * p.seqlen_q;
    p.total_k = varlen ? key.size(0) : p.batch * p.seqlen_k;
    p.heads = query.size(-2);
    p.kv_heads = key.size(-2);
    p.head_dim = query.size(-1);
    p.dtype = data_type(query);
    p.softmax_scale = in.softmax_scale;
    p.softcap = in.softcap;
    p.is_causal = in.is_causal;
    p.query = rows_view(query, varlen);
    p.key = rows_view(key, varlen);
    p.value = rows_view(value, varlen);
    if (!in.seqused_k) return;
    TORCH_CHECK_VALUE(!varlen, "cache_seqlens is for fixed length; cu_seqlens_k holds the lengths of sequences");
    check_seqused_k(*in.seqused_k, query, key);
    check_last_contiguous(*in.seqused_k, "cache_seqlens");
    p.seqused_k = in.seqused_k->const_data_ptr<int32_t>();
}

void set_biases(AttentionParams& p, const Inputs& in, const OptionalVarlen& sequences) {
    if (in.bias) {
        check_bias(*in.bias, in.query, in.key, max_seqlen_k_of(sequences));
        TORCH_CHECK_VALUE(sequences || in.bias->size(-1) == p.seqlen_k,
                          "attn_bias must have a column for every key, got shape ", shape_of(*in.bias));
        if (is_bias_matrix(in)) {
            check_bias_matrix(in, p);
            p.relative_bias = bias_matrix_view(*in.bias, batch_group_size_of(p, in.bias->size(0)));
        } else {
            p.bias = bias_view(*in.bias);
            p.bias.batch_group_size = batch_group_size_of(p, p.bias.batches);
        }
    }
    if (!in.relative_bias) return;
    check_relative_bias(*in.relative_bias, in.query, in.key, p.batch);
    check_dtype(*in.relative_bias, "relative_bias", accumulation_type(in.query));
    p.relative_bias = relative_bias_view(*in.relative_bias);
    if (!in.query.is_cpu()) check_grid(p.relative_bias);
}

void set_mask(AttentionParams& p, const Inputs& in, const OptionalVarlen& sequences) {
    const bool varlen = sequences.has_value(), is_packed = !in.query.is_cpu();
    TORCH_CHECK_VALUE(!in.mask || !in.intervals, "mask and intervals cannot both be given");
    if (in.mask) {
        TORCH_CHECK_VALUE(!is_packed || in.mask_summaries,
                          "on CUDA mask comes with mask_summaries, as pack_mask returned them");
        is_packed ? check_packed_mask(*in.mask, *in.mask_summaries, in.query, in.key, p.batch, varlen)
                  : check_mask(*in.mask, in.query, in.key, max_seqlen_k_of(sequences));
        p.mask = is_packed ? score_sizes(in.mask->sizes()) : score_view(*in.mask);
        p.mask.batch_group_size = batch_group_size_of(p, p.mask.batches);
    }
    if (in.intervals) {
        check_intervals(*in.intervals, in.query, in.key, varlen);
        p.intervals = interval_view(*in.intervals);
    }
    if (in.kv_indices || in.kv_indptr || in.kv_row_bits) p.lists = lists_view(in, p);
}

}  // namespace

bool is_bias_matrix(const Inputs& in) {
    if (in.query.is_cpu() || !in.bias || in.bias->scalar_type() != at::kFloat) return false;
    return in.bias->dim() == 3 || (in.bias->dim() == 4 && in.bias->size(2) != 1);
}

void fill(AttentionParams& p, const Inputs& in) {
    const OptionalVarlen sequences = varlen_of(in);
    set_rows(p, in, sequences);
    set_biases(p, in, sequences);
    set_mask(p, in, sequences);
}

AttentionParams mask_params(const OptionalTensor& mask, const OptionalTensor& intervals, int64_t seqlen_q,
                            int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                            const OptionalTensor& cu_seqlens_k) {
    TORCH_CHECK_VALUE(mask.has_value() != intervals.has_value(), "exactly one of mask and intervals must be given");
    check_lengths(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k);
    const bool varlen = cu_seqlens_q.has_value();
    TORCH_CHECK_VALUE(mask || (intervals->dim() > 0 && intervals->size(0) == 2),
                      "intervals must be (2, ...), got shape ", shape_of(mask ? *mask : *intervals));
    const Tensor scores = mask ? *mask : (*intervals)[0];
    check_dtype(scores, mask ? "mask" : "intervals", mask ? at::kBool : at::kInt);
    const int64_t dims = scores.dim();
    TORCH_CHECK_VALUE(mask ? (varlen ? dims == 2 || dims == 3 : dims == 4) : dims == (varlen ? 2 : 3),
                      mask ? "mask" : "intervals", " has the wrong number of dimensions, got shape ",
                      shape_of(mask ? *mask : *intervals));
    AttentionParams p;
    p.batch = varlen ? cu_seqlens_q->numel() - 1 : scores.size(0);
    p.heads = p.kv_heads = scores.size(1);
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.is_causal = is_causal;
    if (varlen) {
        const auto total = [&](bool is_first) { return is_first ? std::optional(scores.size(0)) : std::nullopt; };
        check_and_set_sequences(p, cu_seqlens_q, cu_seqlens_k, scores, mask ? "mask" : "intervals", total(dims == 3),
                                total(dims == 2));
    }
    const auto fits = [](int64_t size, int64_t whole) { return size == whole || size == 1; };
    if (mask) {
        const bool whole = dims == 4   ? fits(scores.size(2), seqlen_q) && fits(scores.size(3), seqlen_k)
                           : dims == 3 ? scores.size(2) == seqlen_k
                                       : true;
        TORCH_CHECK_VALUE(whole, "mask must be of ", seqlen_q, " rows and ", seqlen_k, " keys, got shape ",
                          shape_of(*mask));
        p.mask = score_view(scores);
        if (dims == 3) p.total_q = scores.size(0);
    } else {
        TORCH_CHECK_VALUE(varlen || scores.size(2) == seqlen_k, "mask must be of ", seqlen_k,
                          " keys (seqlen_k), got shape ", shape_of(scores));
        p.intervals = interval_view(*intervals);
    }
    return p;
}

IndexListsParams index_params(const Tensor& indices, const OptionalTensor& intervals, int64_t tile_rows,
                              int64_t seqlen_q, int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                              const OptionalTensor& cu_seqlens_k) {
    constexpr int64_t kMaxIndices = (int64_t{1} << 24) - 1;  // in a row: a list counts its indices in 32 bits
    check_lengths(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k);
    const bool varlen = cu_seqlens_q.has_value();
    check_dtype(indices, "indices", at::kInt);
    TORCH_CHECK_VALUE(indices.dim() == 4 || (varlen && indices.dim() == 3), "indices must be (",
                      varlen ? "{B|1}" : "{B|B/n|1}", ", {H|Hkv|1}, rows, k)",
                      varlen ? " or (total_q, {H|Hkv|1}, k)" : "", ", got shape ", shape_of(indices));
    TORCH_CHECK_VALUE(tile_rows >= 1 && tile_rows <= std::numeric_limits<int32_t>::max(),
                      "tile_rows must be positive and fit in 32 bits, got ", tile_rows);
    TORCH_CHECK_VALUE(indices.size(-1) <= kMaxIndices, "indices must have at most ", kMaxIndices,
                      " keys per row, got shape ", shape_of(indices));
    IndexListsParams p;
    p.indices = index_view(indices, tile_rows);
    TORCH_CHECK_VALUE(!p.indices.packed || tile_rows == 1,
                      "tile_rows must be 1 for indices (total_q, {H|Hkv|1}, k), got ", tile_rows);
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.is_causal = is_causal;
    p.heads = p.indices.heads;
    p.batch = varlen ? cu_seqlens_q->numel() - 1 : p.indices.batches;
    const int64_t rows = (seqlen_q + tile_rows - 1) / tile_rows;
    TORCH_CHECK_VALUE(p.indices.packed || (varlen ? indices.size(2) >= rows : indices.size(2) == rows),
                      "indices must have ", varlen ? "at least " : "", rows, " rows for ", seqlen_q, " query rows, ",
                      tile_rows, " of which share one, got shape ", shape_of(indices));
    if (intervals) {
        check_dtype(*intervals, "intervals", at::kInt);
        check_device(*intervals, "intervals", indices, "indices");
        TORCH_CHECK_VALUE(intervals->dim() == (varlen ? 3 : 4) && intervals->size(0) == 2 &&
                              (varlen || intervals->size(3) == seqlen_k),
                          "intervals must be starts and ends of ", seqlen_k, " keys, got shape ", shape_of(*intervals));
        p.intervals = interval_view(*intervals);
        // The lists serve all batch elements and heads of both.
        p.heads = std::max(p.heads, p.intervals.heads);
        if (!varlen) p.batch = p.indices.batches == 1 ? p.intervals.batches : p.indices.batches;
    }
    const auto fits = [](int64_t size, int64_t whole) { return size == whole || size == 1; };
    const auto divides = [](int64_t heads, int64_t all) { return heads == 0 ? all == 0 : all % heads == 0; };
    TORCH_CHECK_VALUE(p.indices.packed || fits(p.indices.batches, p.batch), "indices must be of ", p.batch,
                      " batch elements or 1, got shape ", shape_of(indices));
    const bool names_batch = !varlen && p.indices.batches != 1;
    TORCH_CHECK_VALUE(
        !intervals || (fits(p.intervals.batches, p.batch) && divides(p.indices.heads, p.heads) &&
                       divides(p.intervals.heads, p.heads)),
        "mask must have ",
        names_batch ? "the batch size of indices (" + std::to_string(p.batch) + ") or 1, and " : std::string(),
        "a head count that divides or is a multiple of that of indices (", p.indices.heads, "), got shape ",
        shape_of((*intervals)[0]));
    p.kv_heads = p.heads;
    if (varlen) {
        const auto total = [](bool known, const Tensor& tensor, int64_t dim) {
            return known ? std::optional(tensor.size(dim)) : std::nullopt;
        };
        check_and_set_sequences(p, cu_seqlens_q, cu_seqlens_k, indices, "indices", total(p.indices.packed, indices, 0),
                                intervals ? total(true, *intervals, 1) : std::nullopt);
    }
    return p;
}

}  // namespace flash_dmattn
