#include "kvcache.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "checks.h"
#include "cuda_backend.h"
#include "fallback_log.h"
#include "lists.h"
#include "operators.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kMinPageSize = 16, kMaxPageSize = 256;
constexpr int64_t kInvariantRows = 384, kInvariantMinKeys = 4096;  // as in flash_dmattn/kvcache_composed.py

// The shape of a tensor beside others of its call: (first, second, heads, D), or without D.
void check_sizes(const char* name, const Tensor& tensor, at::IntArrayRef sizes, const char* layout) {
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, " must be ", layout, " = ", as_tuple(sizes), ", got shape ",
                      shape_of(tensor));
}

void check_cache_rows(const char* name, const Tensor& cache, const Tensor& query, const char* layout) {
    check_rows_of(name, cache, layout);
    check_matches_query(name, cache, query, true);
    check_head_dim(name, cache);
    TORCH_CHECK_VALUE(cache.stride(-1) == 1 || cache.numel() == 0, name,
                      " must be contiguous in its last dimension, got strides ", cache.strides());
    if (query.is_cpu()) return;
    TORCH_CHECK_VALUE(cache.size(3) % 8 == 0 && cache.size(3) == query.size(-1), name,
                      " must have query's head dimension and a multiple of 8 on CUDA, which pads no cache, got ",
                      cache.size(3), " beside query's ", query.size(-1));
    bool aligned = is_aligned(cache);
    for (int64_t dim = 0; dim < 3; ++dim) aligned &= cache.stride(dim) % (kVectorBytes / cache.element_size()) == 0;
    TORCH_CHECK_VALUE(aligned, name,
                      " must be aligned to 16 bytes, in its storage and in all strides but the last, got strides ",
                      cache.strides());
}

void check_caches(const KvCacheInputs& in) {
    const Tensor& query = in.query;
    const char* layout = in.block_table ? "(pages, page_size, Hkv, D)" : "(B, Sk, Hkv, D)";
    check_rows_of("query", query, in.is_packed() ? "(total_q, H, D)" : "(B, Sq, H, D)");
    check_head_dim("query", query);
    check_kernels(query);
    check_cache_rows("k_cache", in.k_cache, query, layout);
    check_same_head_dim("k_cache", in.k_cache, query);
    check_cache_rows("v_cache", in.v_cache, query, layout);
    const auto sizes = in.k_cache.sizes().slice(0, 3);
    TORCH_CHECK_VALUE(in.v_cache.sizes().slice(0, 3) == sizes,
                      "k_cache and v_cache must have the same shape except for the head dimension, got ",
                      shape_of(in.k_cache), " and ", shape_of(in.v_cache));
    if (!in.bias_cache) return;
    const Tensor& bias = *in.bias_cache;
    check_sizes("bias_cache", bias, sizes, in.block_table ? "(pages, page_size, Hkv)" : "(B, Sk, Hkv)");
    TORCH_CHECK_TYPE(bias.scalar_type() == at::kFloat || bias.scalar_type() == query.scalar_type(),
                     "bias_cache must be float32 or have the cache's dtype ", dtype_of(query), ", got ",
                     dtype_of(bias));
    check_device(bias, "bias_cache", query, "query");
}

// Whether two tensors of one layout, `distance` elements apart, share an element: whether the distance is a sum of
// strides, each times a difference of two indices. False for layouts in which elements of one tensor share memory.
bool share_elements(int64_t distance, std::vector<std::pair<int64_t, int64_t>> strides_and_sizes) {
    if (strides_and_sizes.empty()) return distance == 0;
    const auto largest = std::max_element(strides_and_sizes.begin(), strides_and_sizes.end());
    const auto [stride, size] = *largest;
    strides_and_sizes.erase(largest);
    int64_t reach = 0;  // of the other dimensions
    for (const auto& [other, count] : strides_and_sizes) reach += other * (count - 1);
    if (stride <= reach) return false;
    const int64_t steps = distance / stride;  // |distance - n * stride| <= reach < stride: n is steps or a neighbor
    for (int64_t n = std::max(steps - 1, 1 - size); n <= std::min(steps + 1, size - 1); ++n)
        if (share_elements(distance - n * stride, strides_and_sizes)) return true;
    return false;
}

// Whether two caches of one layout share a key of the same number: in pages, of the same page, since only the block
// table says which pages the sequences of each use. Views in different layouts are not compared.
bool share_keys(const Tensor& a, const Tensor& b, bool has_pages) {
    if (a.numel() == 0 || !a.is_alias_of(b) || a.scalar_type() != b.scalar_type()) return false;
    if (a.sizes() != b.sizes() || a.strides() != b.strides()) return false;
    std::vector<std::pair<int64_t, int64_t>> strides_and_sizes;
    for (int64_t dim = has_pages ? 1 : 0; dim < a.dim(); ++dim)
        if (a.size(dim) > 1) strides_and_sizes.emplace_back(a.stride(dim), a.size(dim));
    return share_elements(b.storage_offset() - a.storage_offset(), std::move(strides_and_sizes));
}

// Whether the memory from the first to the last element of one tensor overlaps that of another.
bool ranges_overlap(const Tensor& a, const Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0 || !a.is_alias_of(b)) return false;
    const auto begin = [](const Tensor& x) { return x.storage_offset() * x.element_size(); };
    const auto end = [&](const Tensor& x) {
        int64_t last = 0;
        for (int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
        return begin(x) + (last + 1) * x.element_size();
    };
    return begin(a) < end(b) && begin(b) < end(a);
}

// New tokens are written into caches that do not share memory. Their pages may alternate: transformers takes pages of K
// and of V from one tensor.
void check_writable(const KvCacheInputs& in) {
    using Named = std::pair<const char*, const Tensor*>;
    std::vector<Named> caches{{"k_cache", &in.k_cache}, {"v_cache", &in.v_cache}};
    if (in.bias_cache) caches.emplace_back("bias_cache", &*in.bias_cache);
    for (size_t i = 0; i < caches.size(); ++i) {
        const auto& [name, cache] = caches[i];
        TORCH_CHECK_VALUE(at::has_internal_overlap(*cache) != at::MemOverlap::Yes, name,
                          " must not be expanded where new tokens are written, got strides ", cache->strides());
        for (size_t j = 0; j < i; ++j)
            TORCH_CHECK_VALUE(!share_keys(*caches[j].second, *cache, in.block_table.has_value()), caches[j].first,
                              " and ", name,
                              " must not share memory where new tokens are written, got views that overlap");
        // Key, value and bias may be views of the slots to which they are written.
        TORCH_CHECK_VALUE(!ranges_overlap(in.query, *cache), "query must not share memory with ", name,
                          ", into which new tokens are written: pass query.clone()");
    }
}

void check_new_tokens(const KvCacheInputs& in) {
    TORCH_CHECK_VALUE(in.key.has_value() == in.value.has_value(), "key and value come together, got ",
                      in.key ? "key" : "value", " alone");
    const bool has_bias = in.key && in.bias_cache;
    TORCH_CHECK_VALUE(has_bias || !in.bias, "bias comes with key and bias_cache, got it without ",
                      in.key ? "bias_cache" : "key");
    TORCH_CHECK_VALUE(!has_bias || in.bias, "bias of the new tokens must be given with key and bias_cache, got none");
    if (!in.key) return;
    check_writable(in);
    std::vector<int64_t> sizes = in.query.sizes().vec();
    sizes[sizes.size() - 2] = in.k_cache.size(2);
    const char* layout = in.is_packed() ? "(total_q, Hkv, D)" : "(B, Sq, Hkv, D)";
    for (const auto& [name, rows, cache] :
         {std::tuple("key", &*in.key, &in.k_cache), std::tuple("value", &*in.value, &in.v_cache)}) {
        check_rows_of(name, *rows, layout);
        check_matches_query(name, *rows, in.query, true);
        sizes.back() = cache->size(3);
        check_sizes(name, *rows, sizes, layout);
    }
    if (!in.bias) return;
    sizes.pop_back();
    check_sizes("bias", *in.bias, sizes, in.is_packed() ? "(total_q, Hkv)" : "(B, Sq, Hkv)");
    TORCH_CHECK_TYPE(in.bias->scalar_type() == in.bias_cache->scalar_type(), "bias must have bias_cache's dtype ",
                     dtype_of(*in.bias_cache), ", got ", dtype_of(*in.bias));
    check_device(*in.bias, "bias", in.query, "query");
}

void check_integers(const char* name, const Tensor& tensor, const Tensor& query, int64_t batch, bool is_table) {
    TORCH_CHECK_VALUE(tensor.dim() == (is_table ? 2 : 1) && tensor.size(0) == batch, name, " must be ",
                      is_table ? "(B, pages of a sequence)" : "(B)", " for ", batch, " sequences, got shape ",
                      shape_of(tensor));
    check_dtype(tensor, name, at::kInt);
    check_device(tensor, name, query, "query");
    check_last_contiguous(tensor, name);
}

int64_t check_sequences(const KvCacheInputs& in) {
    TORCH_CHECK_VALUE(!in.cu_seqlens_q || in.max_seqlen_q,
                      "cu_seqlens_q requires max_seqlen_q, got cu_seqlens_q alone");
    TORCH_CHECK_VALUE(!in.max_seqlen_q || in.cu_seqlens_q,
                      "max_seqlen_q requires cu_seqlens_q, got max_seqlen_q alone");
    if (in.is_packed()) {
        CuSeqlens given{"cu_seqlens_q", *in.cu_seqlens_q, &in.query, "query"};
        given.total = in.query.size(0);
        given.counted = "the rows of query";
        given.or_less = true;  // rows after the last sequence are padding
        given.longest_name = "max_seqlen_q";
        given.longest = in.max_seqlen_q->guard_int(__FILE__, __LINE__);
        check_length("max_seqlen_q", *given.longest);
        check_cu_seqlens(given);
        check_last_contiguous(*in.cu_seqlens_q, "cu_seqlens_q");
    }
    const int64_t batch = in.is_packed() ? in.cu_seqlens_q->numel() - 1 : in.query.size(0);
    check_integers("cache_seqlens", in.cache_seqlens, in.query, batch, false);
    const int64_t page_size = in.k_cache.size(1);
    if (in.block_table) {
        check_integers("block_table", *in.block_table, in.query, batch, true);
        TORCH_CHECK_VALUE(!in.cache_batch_idx, "cache_batch_idx is for a contiguous cache, got block_table too");
        TORCH_CHECK_VALUE(kMinPageSize <= page_size && page_size <= kMaxPageSize, "k_cache must have pages of ",
                          kMinPageSize, " to ", kMaxPageSize, " keys with block_table, got shape ",
                          shape_of(in.k_cache));
    } else if (in.cache_batch_idx) {
        check_integers("cache_batch_idx", *in.cache_batch_idx, in.query, batch, false);
    } else {
        TORCH_CHECK_VALUE(
            in.k_cache.size(0) == batch, "k_cache must have ",
            in.is_packed() ? "as many batch elements as cu_seqlens_q has sequences, " : "query's batch size ", batch,
            ", without cache_batch_idx and block_table, got shape ", shape_of(in.k_cache));
    }
    check_length("the room for the keys of a sequence",
                 in.block_table ? in.block_table->size(1) * page_size : page_size);
    return batch;
}

void check_options(const KvCacheInputs& in, int64_t batch) {
    if (in.window_size) {
        TORCH_CHECK_VALUE(in.window_size->guard_int(__FILE__, __LINE__) >= 0, "window_size must not be negative, got ",
                          *in.window_size);
        TORCH_CHECK_VALUE(in.bias_cache, "window_size selects by bias_cache, got none");
        TORCH_CHECK_VALUE(in.is_causal,
                          "window_size selects among the keys up to a row: it needs is_causal=True, got False");
    }
    if (in.relative_bias) {
        TORCH_CHECK_VALUE(in.relative_bias->dim() == 3, "relative_bias must be ({B|1}, {H|Hkv|1}, 2R + 1), got shape ",
                          shape_of(*in.relative_bias),
                          missing_table_dimensions_hint(*in.relative_bias, in.query, in.k_cache, batch));
        check_relative_bias(*in.relative_bias, in.query, in.k_cache, batch);
        check_dtype(*in.relative_bias, "relative_bias", accumulation_type(in.query));
    }
    if (in.sinks) {
        TORCH_CHECK_VALUE(in.sinks->dim() == 1 && (in.sinks->size(0) == in.query.size(-2) || in.sinks->size(0) == 1),
                          "sinks must be ({H|1}), got shape ", shape_of(*in.sinks));
        check_dtype(*in.sinks, "sinks", accumulation_type(in.query));
        check_device(*in.sinks, "sinks", in.query, "query");
    }
}

KeyBiasView key_bias_view(const Tensor& bias, bool packed) {
    KeyBiasView view;
    view.data = data_of(bias);
    view.batch_stride = packed ? 0 : broadcast_stride(bias, 0);
    view.row_stride = bias.stride(packed ? 0 : 1);
    view.head_stride = broadcast_stride(bias, bias.dim() - 1);
    view.dtype = data_type(bias);
    return view;
}

KvCacheParams params_of(const KvCacheInputs& in, int64_t batch) {
    const bool packed = in.is_packed(), paged = in.block_table.has_value();
    KvCacheParams p;
    p.batch = batch;
    p.heads = in.query.size(-2);
    p.kv_heads = in.k_cache.size(2);
    p.head_dim = in.query.size(-1);
    p.seqlen_q = packed ? in.max_seqlen_q->guard_int(__FILE__, __LINE__) : in.query.size(1);
    p.total_q = packed ? in.query.size(0) : batch * p.seqlen_q;
    if (packed) p.cu_seqlens_q = in.cu_seqlens_q->const_data_ptr<int32_t>();
    p.cache_batch = in.k_cache.size(0);
    p.seqlen_k = in.k_cache.size(1);
    if (paged) {
        p.page_size = in.k_cache.size(1);
        p.seqlen_k = in.block_table->size(1) * p.page_size;
        p.block_table = in.block_table->const_data_ptr<int32_t>();
        p.block_table_stride = in.block_table->stride(0);
    }
    if (in.cache_batch_idx) p.cache_batch_idx = in.cache_batch_idx->const_data_ptr<int32_t>();
    if (in.cache_seqlens.defined()) p.cache_seqlens = in.cache_seqlens.const_data_ptr<int32_t>();
    p.dtype = data_type(in.query);
    p.softmax_scale = in.softmax_scale;
    p.softcap = in.softcap;
    p.is_causal = in.is_causal;
    if (in.window_size) p.window_size = in.window_size->guard_int(__FILE__, __LINE__);
    p.batch_invariant = in.batch_invariant;
    p.query = rows_view(in.query, packed);
    p.k_cache = rows_view(in.k_cache, false);
    p.v_cache = rows_view(in.v_cache, false);
    if (in.key) {
        p.key = rows_view(*in.key, packed);
        p.value = rows_view(*in.value, packed);
    }
    if (in.bias_cache) p.bias_cache = key_bias_view(*in.bias_cache, false);
    if (in.bias) p.bias = key_bias_view(*in.bias, packed);
    if (in.relative_bias) p.relative_bias = relative_bias_view(*in.relative_bias);
    if (in.sinks && in.sinks->scalar_type() == at::kFloat) {
        p.sinks = in.sinks->const_data_ptr<float>();
        p.sinks_stride = broadcast_stride(*in.sinks, 0);
    }
    return p;
}

// The values of lengths, pages and batch elements, read back from a GPU under FLASH_DMATTN_CHECK=1. CUDA kernels and
// the composition clamp them otherwise.
void check_positions(const KvCacheInputs& in, const KvCacheParams& p) {
    if (!is_host_readable(in.cache_seqlens)) return;
    const auto read = [](const OptionalTensor& tensor) {
        return tensor ? tensor->to(at::kCPU).contiguous() : Tensor();
    };
    const Tensor seqlens = read(in.cache_seqlens), table = read(in.block_table), elements = read(in.cache_batch_idx),
                 offsets = read(in.cu_seqlens_q);
    const auto at = [](const Tensor& tensor, int64_t i) { return int64_t{tensor.const_data_ptr<int32_t>()[i]}; };
    const bool has_pages = p.page_size > 0;
    const char* const name = has_pages ? "block_table" : "cache_batch_idx";
    const int64_t width = has_pages ? p.page_size : p.seqlen_k;
    // The page or batch element of a key of sequence b.
    const auto place = [&](int64_t b, int64_t key) {
        if (has_pages) return at(table, b * table.size(1) + key / width);
        return elements.defined() ? at(elements, b) : b;
    };
    using Pair = std::pair<int64_t, int64_t>;
    std::map<Pair, Pair> written;  // the sequence and key of a new token, by place and row there
    std::vector<int64_t> lengths;  // of each sequence, with the new tokens
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t rows = offsets.defined() ? at(offsets, b + 1) - at(offsets, b) : p.seqlen_q;
        const int64_t length = at(seqlens, b), keys = length + (in.key ? rows : 0);
        TORCH_CHECK_VALUE(length >= 0, "cache_seqlens must not be negative, got ", length, " for sequence ", b);
        TORCH_CHECK_VALUE(keys <= p.seqlen_k, "cache_seqlens must be at most the capacity of ", p.seqlen_k,
                          " keys per sequence", in.key ? ", with the new tokens" : "", ", got ", length,
                          in.key ? " and " + std::to_string(rows) + " new ones" : "", " for sequence ", b);
        for (int64_t first = 0; has_pages && first < keys; first += width) {
            const int64_t page = place(b, first);
            TORCH_CHECK_VALUE(0 <= page && page < p.cache_batch, name, " must be of pages from 0 to ",
                              p.cache_batch - 1, " of k_cache, got ", page, " for page ", first / width,
                              " of sequence ", b);
        }
        if (!has_pages) {
            const int64_t element = place(b, 0);
            TORCH_CHECK_VALUE(0 <= element && element < p.cache_batch, name, " must be from 0 to ", p.cache_batch - 1,
                              ", got ", element, " for sequence ", b);
        }
        lengths.push_back(keys);
        for (int64_t key = length; key < keys; ++key)
            TORCH_CHECK_VALUE(written.emplace(Pair(place(b, key), key % width), Pair(b, key)).second, name,
                              " must assign each new token its own slot, got two for slot ", key % width,
                              has_pages ? " of page " : " of batch element ", place(b, key));
    }
    if (written.empty()) return;
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t first = 0; first < lengths[b]; first += width) {
            const int64_t page = place(b, first), end = std::min(lengths[b] - first, width);
            const auto last = written.lower_bound({page, end});
            for (auto it = written.lower_bound({page, 0}); it != last; ++it) {
                const Pair key(b, first + it->first.second);
                TORCH_CHECK_VALUE(it->second == key, name, " must not give a key the slot of a new token, got key ",
                                  key.second, " of sequence ", b, " in the slot of the new key ", it->second.second,
                                  " of sequence ", it->second.first);
            }
        }
}

// Rows of the call as the kernels read them, copied at O(Sq D) where needed.
void make_readable(KvCacheInputs& in) {
    const auto readable = [](const Tensor& rows) {
        return readable_rows(rows.stride(-1) == 1 ? rows : rows.contiguous());
    };
    in.query = readable(in.query);
    if (in.key) {
        in.key = readable(*in.key);
        in.value = readable(*in.value);
    }
    if (in.relative_bias && !has_contiguous_entries(*in.relative_bias))
        in.relative_bias = in.relative_bias->contiguous();
}

// Reports the caches to autograd as changed in place.
void mark_written(const KvCacheInputs& in) {
    if (!in.key) return;
    for (const Tensor* cache : {&in.k_cache, &in.v_cache, in.bias_cache ? &*in.bias_cache : nullptr})
        if (cache != nullptr && !cache->is_inference()) cache->unsafeGetTensorImpl()->bump_version();
}

// Packed sequences that all have max_seqlen_q rows are a call of fixed length, which more CPU kernels serve. On CUDA
// the offsets are not read: rows may be padding.
bool has_equal_rows(const KvCacheInputs& in, int64_t batch) {
    return in.is_packed() && in.query.is_cpu() && batch > 0 &&
           in.query.size(0) == batch * in.max_seqlen_q->guard_int(__FILE__, __LINE__) &&
           in.cu_seqlens_q->const_data_ptr<int32_t>()[batch] == in.query.size(0);
}

KvCacheInputs packed(KvCacheInputs in, int64_t batch) {
    const int64_t rows = in.query.size(1);
    in.query = in.query.flatten(0, 1);
    for (OptionalTensor* tensor : {&in.key, &in.value, &in.bias})
        if (*tensor) *tensor = (*tensor)->flatten(0, 1);
    in.cu_seqlens_q = at::arange(0, batch * rows + 1, rows, in.cache_seqlens.options());
    in.max_seqlen_q = rows;
    return in;
}

KvCacheInputs unpacked(KvCacheInputs in, int64_t batch) {
    in.query = in.query.unflatten(0, {batch, -1});
    for (OptionalTensor* rows : {&in.key, &in.value, &in.bias})
        if (*rows) *rows = (*rows)->unflatten(0, {batch, -1});
    in.cu_seqlens_q.reset();
    in.max_seqlen_q.reset();
    return in;
}

using KvCacheHandle = c10::TypedOperatorHandle<KvCacheOperator>;

KvCacheHandle operator_named(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<KvCacheOperator>();
}

ForwardResult call(const KvCacheHandle& op, const KvCacheInputs& in) {
    const auto call_with = [&](std::nullptr_t, const auto&... arguments) { return op.call(arguments...); };
#define FLASH_DMATTN_PASS(schema, type, name) , in.name
    return call_with(nullptr FLASH_DMATTN_KVCACHE_ARGUMENTS(FLASH_DMATTN_PASS));
#undef FLASH_DMATTN_PASS
}

ForwardResult compose(const KvCacheInputs& in) {
    static const KvCacheHandle op = operator_named("flash_dmattn::compose_attention_with_kvcache");
    return call(op, in);
}

// Whether attend_directly serves gathered keys: packed ones, and selected ones for more rows than topk_lists selects
// for. Sinks and the log of fallbacks are in Python.
bool can_attend_directly(const KvCacheInputs& in) {
    const bool serves = in.is_packed() || (in.window_size && in.query.size(1) > kMaxListedRows);
    return serves && !in.sinks && !logs_fallbacks();
}

// batch_invariant: the max_seqlen_q of packed chunks, as attend_invariantly in flash_dmattn/kvcache_composed.py.
int64_t invariant_rows(const KvCacheInputs& in, int64_t rows) {
    const int64_t multiple = in.window_size ? KeyListsView::kRows : kInvariantRows;
    return (rows + multiple - 1) / multiple * multiple;
}

// Their least max_seqlen_k. Without a window it is above all keys, by which the sm90 forward would choose its tile.
int64_t invariant_keys(const KvCacheInputs& in, int64_t all_keys) {
    return in.window_size ? kInvariantMinKeys : std::max(kInvariantMinKeys, all_keys + 1);
}

// As the operator attend_to_gathered_keys, in less host time. With a window it uses key lists, also for few keys.
ForwardResult attend_directly(const GatheredCache& keys, const KvCacheInputs& in) {
    Inputs call{};
    call.query = in.query;
    call.key = keys.key;
    call.value = keys.value;
    call.bias = keys.bias;
    call.relative_bias = in.relative_bias;
    call.softmax_scale = in.softmax_scale;
    call.is_causal = in.is_causal;
    call.softcap = in.softcap;
    int64_t rows, longest = keys.max_keys, all_keys = longest;
    if (!in.is_packed()) {
        rows = in.query.size(1);
    } else {
        rows = in.max_seqlen_q->guard_int(__FILE__, __LINE__);
        all_keys = keys.key.size(0);
        longest = std::min(longest, all_keys);
        if (in.batch_invariant) {
            rows = invariant_rows(in, rows);
            longest = std::max(keys.max_keys, invariant_keys(in, all_keys));
        }
        call.cu_seqlens_q = in.cu_seqlens_q;
        call.cu_seqlens_k = keys.cu_seqlens_k;
        call.max_seqlen_q = rows;
        call.max_seqlen_k = longest;
    }
    if (in.window_size) {
        const int64_t window = std::min(in.window_size->guard_int(__FILE__, __LINE__), all_keys);
        call.intervals =
            topk_intervals(*keys.bias, window, in.is_packed() ? 0 : rows, in.cu_seqlens_q, keys.cu_seqlens_k, longest);
        Tensor row_bits;
        std::tie(call.kv_indices, call.kv_indptr, row_bits) =
            build_key_lists(std::nullopt, call.intervals, rows, longest, in.is_causal, in.cu_seqlens_q,
                            keys.cu_seqlens_k, window, std::nullopt);
    }
    const at::NoGradGuard no_grad;
    return call_attention_forward(call);
}

// The operator attend_to_gathered_keys.
ForwardResult attend_to(const GatheredCache& keys, const KvCacheInputs& in) {
    if (can_attend_directly(in)) return attend_directly(keys, in);
    using Operator =
        ForwardResult(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, OptionalSymInt, OptionalSymInt, OptionalSymInt, double, bool, double,
                      const OptionalTensor&, const OptionalTensor&, bool);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("flash_dmattn::attend_to_gathered_keys", "").typed<Operator>();
    const OptionalSymInt max_seqlen_k = in.is_packed() ? OptionalSymInt(keys.max_keys) : std::nullopt;
    return op.call(in.query, keys.key, keys.value, keys.bias, in.cu_seqlens_q, keys.cu_seqlens_k, in.max_seqlen_q,
                   max_seqlen_k, in.window_size, in.softmax_scale, in.is_causal, in.softcap, in.relative_bias, in.sinks,
                   in.batch_invariant);
}

// Whether kernels of cuda/kvcache serve the call, and not compose_attention_with_kvcache: attention over a contiguous
// cache needs none, with a window by the kernels that select key lists for few rows. Where offsets are read back for
// checks, rows may be removed as padding.
bool needs_cache_kernels(const KvCacheInputs& in, const KvCacheParams& p) {
    const bool in_place =
        !in.block_table && !in.cache_batch_idx && !in.is_packed() && (!in.window_size || p.seqlen_q <= kMaxListedRows);
    return !in_place && !(in.is_packed() && is_host_readable(*in.cu_seqlens_q));
}

void write_to(KvCacheParams& p, const ForwardResult& result, bool packed) {
    p.out = rows_view(std::get<0>(result), packed);
    p.lse = row_stat_view(std::get<1>(result), packed);
}

// Whether the kernels know such a call: KvCacheParams has no window of no keys.
bool has_rows_that_see(const KvCacheInputs& in, const KvCacheParams& p) {
    const bool sees_nothing = in.window_size && p.window_size == 0;
    return !sees_nothing && p.batch > 0 && p.total_q > 0 && p.heads > 0;
}

// The memory of the result, to which p then refers.
ForwardResult empty_result(const KvCacheInputs& in, KvCacheParams& p) {
    const auto stats = in.query.options().dtype(at::kFloat);
    const ForwardResult result{
        at::empty(in.query.sizes(), in.query.options()),
        in.is_packed() ? at::empty({p.heads, p.total_q}, stats) : at::empty({p.batch, p.heads, p.seqlen_q}, stats)};
    write_to(p, result, in.is_packed());
    return result;
}

// Serves the sequences of at most skipped_rows rows, which other kernels have left out, and writes their new tokens.
void decode_skipped(const KvCacheInputs& in, const KvCacheParams& p, int64_t skipped_rows) {
    if (skipped_rows == 0) return;
    TORCH_INTERNAL_ASSERT(decode_kvcache_cuda(p, in.query, true), "the decoding kernel serves short rows");
}

// Attention with a window to the selected keys where they are in the cache. Returns false, and has no effect, where
// kernels do not serve the call.
bool attend_in_cache(const KvCacheInputs& in, const KvCacheParams& p) {
    const bool has_chunks = in.is_packed() || p.seqlen_q > kMaxListedRows;
    if (!in.window_size || !has_chunks || in.sinks || !needs_cache_kernels(in, p)) return false;
    KvCacheParams chunks = p;
    if (in.batch_invariant) chunks.seqlen_q = invariant_rows(in, p.seqlen_q);
    const auto skipped_rows = attend_in_cache_cuda(chunks, in.query, *in.bias_cache);
    if (!skipped_rows) return false;
    decode_skipped(in, p, *skipped_rows);
    return true;
}

// Attention over keys that kernels gather; nothing, and no effect, where they do not serve the call.
std::optional<ForwardResult> attend_by_gathering(const KvCacheInputs& in, KvCacheParams p) {
    if (!needs_cache_kernels(in, p)) return std::nullopt;
    const auto keys = in.window_size ? gather_best_keys_cuda(p, in.k_cache, *in.bias_cache)
                                     : gather_all_keys_cuda(p, in.k_cache, in.bias_cache);
    if (!keys) return std::nullopt;
    const ForwardResult result = attend_to(*keys, in);
    write_to(p, result, in.is_packed());
    decode_skipped(in, p, keys->skipped_rows);
    return result;
}

// The result of the same sequences with fixed length.
ForwardResult unpack(const ForwardResult& result, int64_t batch) {
    const auto& [out, lse] = result;
    return {out.unflatten(0, {batch, -1}), lse.unflatten(1, {batch, -1}).transpose(0, 1)};
}

ForwardResult run(const KvCacheInputs& in, KvCacheParams p) {
    if (in.query.is_cpu() || !has_rows_that_see(in, p)) return compose(in);
    const ForwardResult result = empty_result(in, p);
    if (decode_kvcache_cuda(p, in.query, false)) return result;
    if (in.batch_invariant && in.window_size && !in.is_packed()) {
        const KvCacheInputs all = packed(in, p.batch);
        return unpack(run(all, params_of(all, p.batch)), p.batch);
    }
    if (attend_in_cache(in, p)) return result;
    if (in.window_size || in.is_packed()) {
        if (const auto gathered = attend_by_gathering(in, p)) return *gathered;
    } else if (needs_cache_kernels(in, p)) {  // all keys are gathered without gaps
        const KvCacheInputs all = packed(in, p.batch);
        if (const auto gathered = attend_by_gathering(all, params_of(all, p.batch))) return unpack(*gathered, p.batch);
    }
    const auto [composed_out, composed_lse] = compose(in);
    if (!in.batch_invariant || !in.is_packed()) return {composed_out, composed_lse};
    // A sequence of few rows gets the kernel's bits, also where the batch has longer ones.
    const ForwardResult composed{composed_out.contiguous(), composed_lse.contiguous()};
    write_to(p, composed, in.is_packed());
    decode_kvcache_cuda(p, in.query, true);
    return composed;
}

}  // namespace

ForwardResult call_attention_with_kvcache(const KvCacheInputs& in) {
    static const KvCacheHandle op = operator_named("flash_dmattn::attention_with_kvcache");
    return call(op, in);
}

std::optional<ForwardResult> decode_with_kvcache(const KvCacheInputs& in) {
    KvCacheParams p = params_of(in, in.query.size(0));
    if (!has_rows_that_see(in, p)) return std::nullopt;
    const ForwardResult result = empty_result(in, p);
    return decode_kvcache_cuda(p, in.query, false) ? std::optional(result) : std::nullopt;
}

ForwardResult attention_with_kvcache(KvCacheInputs in) {
    check_caches(in);
    const int64_t batch = check_sequences(in);
    check_new_tokens(in);
    check_options(in, batch);
    // max_seqlen_q may be far above any sequence, none of which has more rows than all of them.
    if (in.is_packed()) in.max_seqlen_q = std::min(in.max_seqlen_q->guard_int(__FILE__, __LINE__), in.query.size(0));
    make_readable(in);
    KvCacheParams p = params_of(in, batch);
    check_positions(in, p);
    mark_written(in);
    if (!has_equal_rows(in, batch)) return run(in, p);
    in = unpacked(std::move(in), batch);
    const auto [out, lse] = run(in, params_of(in, batch));
    return {out.flatten(0, 1), lse.transpose(0, 1).flatten(1)};
}

}  // namespace flash_dmattn
