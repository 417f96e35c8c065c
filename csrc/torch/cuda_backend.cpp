#include "cuda_backend.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "cuda/api.h"
#include "cuda/kvcache/all_keys.h"
#include "cuda/kvcache/best_keys.h"
#include "cuda/kvcache/prefill_lists.h"
#include "cuda/mask/builders/bounded_list_builder.h"
#include "cuda/mask/builders/index_list_builder.h"
#include "cuda/mask/builders/list_builder.h"
#include "cuda/topk/topk.h"
#include "lists.h"
#include "topk.h"

namespace flash_dmattn {
namespace {

cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Undefined for 0 bytes.
Tensor workspace(int64_t bytes, const Tensor& like) {
    return bytes > 0 ? at::empty({bytes}, like.options().dtype(at::kByte)) : Tensor();
}
void* address(const Tensor& memory) { return memory.defined() ? memory.data_ptr() : nullptr; }

// The packed mask of a plan, in these tensors.
PackedMask in_tensors(PackedMask packed, const Tensor& bits, const Tensor& summaries) {
    packed.bits = reinterpret_cast<uint32_t*>(bits.data_ptr<int32_t>());
    packed.visible_keys = reinterpret_cast<uint64_t*>(summaries.data_ptr());
    packed.is_full = reinterpret_cast<bool*>(packed.visible_keys + packed.blocks_size);
    return packed;
}

// Packs params.mask, which is `mask`. Returns (bits, summaries).
std::tuple<Tensor, Tensor> pack(AttentionParams& p, const Tensor& mask) {
    const PackedMask plan = plan_packed_mask(p);
    const auto ints = mask.options().dtype(at::kInt);
    const Tensor bits = mask.dim() == 3
                            ? at::empty({mask.size(0), plan.heads, plan.words}, ints)
                            : at::empty({plan.batches, plan.heads, p.mask.per_key ? 1 : p.seqlen_q, plan.words}, ints);
    const Tensor summaries =
        at::empty({PackedMask::kSummaryBytes, plan.batches, plan.heads, plan.num_m_blocks, plan.num_n_blocks},
                  mask.options().dtype(at::kByte));
    p.packed_mask = in_tensors(plan, bits, summaries);
    pack_mask_cuda(p, p.packed_mask, current_stream());
    return {bits, summaries};
}

// Fills the params with a packed mask, or summarizes intervals by blocks. Returns the memory of the summaries.
template <typename Params>
Tensor prepare_mask(Params& p, const Inputs& in, cudaStream_t stream) {
    if (const OptionalTensor &bits = in.mask, &summaries = in.mask_summaries; bits) {
        const PackedMask plan = plan_packed_mask(p);
        TORCH_CHECK_VALUE(
            bits->numel() == plan.bits_size && summaries->numel() == PackedMask::kSummaryBytes * plan.blocks_size,
            "mask and mask_summaries must be what pack_mask returned for these lengths");
        p.packed_mask = in_tensors(plan, *bits, *summaries);
    }
    if (!p.intervals.present() || p.lists.present()) return {};
    const IntervalSummaries plan = plan_interval_summaries(p);
    if (plan.size == 0) return {};
    cuda::WorkspaceLayout layout;
    const auto blocks = layout.allocate<IntervalBlockSummary>(plan.size), counter = layout.allocate<int32_t>(1);
    const Tensor memory = workspace(layout.workspace_bytes, in.query);
    p.interval_summaries = plan;
    p.interval_summaries.blocks = blocks.in<IntervalBlockSummary>(address(memory));
    int32_t* tile_count_semaphore = nullptr;
    if constexpr (std::is_same_v<Params, FwdParams>)
        tile_count_semaphore = p.tile_count_semaphore = counter.in<int32_t>(address(memory));
    summarize_intervals_cuda(p, p.interval_summaries, tile_count_semaphore, stream);
    return memory;
}

// Runs a call once, or twice for a mask that is given both packed and as lists: the device selects one of the two.
template <typename Params, typename Run>
void for_each_dispatch(const Params& p, const Run& run) {
    if (!p.packed_mask.present() || !p.lists.present()) return run(p);
    Params by_lists = p, dense = p;
    by_lists.packed_mask = {};
    by_lists.device_dispatch = {p.lists.begins, true};
    dense.lists = {};
    dense.device_dispatch = {p.lists.begins, false};
    run(by_lists);
    run(dense);
}

}  // namespace

void forward_cuda(FwdParams& p, const Inputs& in) {
    check_kernels(in.query);
    const c10::cuda::CUDAGuard guard(in.query.device());
    const cudaStream_t stream = current_stream();
    const Tensor mask = prepare_mask(p, in, stream);
    for_each_dispatch(p, [&](const FwdParams& params) {
        const cuda::FwdPlan plan = cuda::plan_fwd(params);
        const Tensor memory = workspace(plan.workspace_bytes, in.query);
        cuda::run_fwd(params, plan, address(memory), stream);
    });
}

void backward_cuda(BwdParams& p, const Inputs& in) {
    check_kernels(in.query);
    const c10::cuda::CUDAGuard guard(in.query.device());
    const cudaStream_t stream = current_stream();
    const Tensor mask = prepare_mask(p, in, stream);
    Tensor sorted_keys;
    if (p.deterministic && p.lists.present() && p.intervals.present()) {
        // Additions are ordered by the position of the key.
        sorted_keys = at::empty({p.lists.capacity}, in.kv_indices->options());
        merge_bounded_lists_cuda(p.lists, sorted_keys.data_ptr<int32_t>(), stream);
        p.lists.keys = sorted_keys.const_data_ptr<int32_t>();
    }
    for_each_dispatch(p, [&](const BwdParams& params) {
        const cuda::BwdPlan plan = cuda::plan_bwd(params);
        const Tensor memory = workspace(plan.workspace_bytes, in.query);
        cuda::run_bwd(params, plan, address(memory), stream);
    });
}

bool decode_kvcache_cuda(const KvCacheParams& params, const Tensor& like, bool skips_longer) {
    const c10::cuda::CUDAGuard guard(like.device());
    return cuda::decode_kvcache(params, skips_longer, current_stream());
}

std::optional<GatheredCache> gather_best_keys_cuda(const KvCacheParams& p, const Tensor& like,
                                                   const Tensor& bias_like) {
    if (!cuda::can_gather_best_keys(p)) return std::nullopt;
    const c10::cuda::CUDAGuard guard(like.device());
    const bool packed = p.cu_seqlens_q != nullptr;
    cuda::BestKeys best;
    best.max_selected = std::min(p.window_size, p.seqlen_k);
    best.total = p.batch * best.max_selected + p.total_q;
    best.skipped_rows = packed ? cuda::decodable_rows(p) : 0;
    const int64_t width = best.max_selected + p.seqlen_q;

    const auto ints = like.options().dtype(at::kInt);
    const Tensor biases = at::empty({p.batch, p.kv_heads, p.seqlen_k}, bias_like.options());
    const Tensor prefix = at::empty({p.batch}, ints), offsets = at::empty({packed ? p.batch + 1 : 0}, ints);
    cuda::read_biases(p, best.max_selected, biases.data_ptr(), prefix.data_ptr<int32_t>(),
                      packed ? offsets.data_ptr<int32_t>() : nullptr, current_stream());
    const auto [lists, kv_indptr, kv_row_bits] = topk_lists(biases, best.max_selected, 1, prefix);

    const auto rows = [&] {
        return packed ? at::empty({best.total, p.kv_heads, p.head_dim}, like.options())
                      : at::empty({p.batch, width, p.kv_heads, p.head_dim}, like.options());
    };
    const Tensor key = rows(), value = rows();
    const Tensor bias = packed ? at::empty({best.total, p.kv_heads}, bias_like.options())
                               : at::empty({p.batch, p.kv_heads, 1, width}, bias_like.options());
    best.lists = lists.const_data_ptr<int32_t>();
    best.begins = kv_indptr.const_data_ptr<int64_t>();
    best.ends = best.begins + p.batch * p.kv_heads;
    best.key = key.data_ptr();
    best.value = value.data_ptr();
    best.bias = bias.data_ptr();
    cuda::gather_best_keys(p, best, current_stream());
    return GatheredCache{key, value, bias, packed ? OptionalTensor(offsets) : std::nullopt, width, best.skipped_rows};
}

std::optional<GatheredCache> gather_all_keys_cuda(const KvCacheParams& p, const Tensor& like,
                                                  const OptionalTensor& bias_like) {
    if (!cuda::can_gather_all_keys(p)) return std::nullopt;
    const c10::cuda::CUDAGuard guard(like.device());
    const int64_t total = p.batch * p.seqlen_k;
    const auto rows = [&] { return at::empty({total, p.kv_heads, p.head_dim}, like.options()); };
    const Tensor key = rows(), value = rows(), offsets = at::empty({p.batch + 1}, like.options().dtype(at::kInt));
    OptionalTensor bias;
    if (bias_like) bias = at::empty({total, p.kv_heads}, bias_like->options());
    cuda::AllKeys all;
    all.skipped_rows = cuda::decodable_rows(p);
    all.offsets = offsets.data_ptr<int32_t>();
    all.key = key.data_ptr();
    all.value = value.data_ptr();
    if (bias) all.bias = bias->data_ptr();
    cuda::gather_all_keys(p, all, current_stream());
    return GatheredCache{key, value, bias, offsets, p.seqlen_k, all.skipped_rows};
}

std::optional<int64_t> attend_in_cache_cuda(const KvCacheParams& p, const Tensor& query, const Tensor& bias_like) {
    const c10::cuda::CUDAGuard guard(query.device());
    cuda::PrefillLists lists = cuda::plan_prefill_lists(p);
    if (!lists.serves()) return std::nullopt;
    if (p.cu_seqlens_q != nullptr) lists.skipped_rows = cuda::decodable_rows(p);
    const KeyListTensors tensors =
        empty_key_lists(query, lists.capacity, p.batch, p.kv_heads, lists.num_m_blocks, true);
    const Tensor biases = at::empty({lists.capacity}, bias_like.options());
    Tensor bias_copy;
    if (lists.bias_copy_stride > 0) {
        bias_copy = at::empty({p.batch, p.kv_heads, lists.bias_copy_stride}, bias_like.options());
        lists.bias_copy = bias_copy.data_ptr();
    }
    lists.keys = tensors.kv_indices.data_ptr<int32_t>();
    lists.begins = tensors.begins();
    lists.ends = tensors.ends();
    lists.rows = tensors.row_words();
    lists.biases = biases.data_ptr();
    cuda::list_prefill_keys(p, lists, current_stream());
    FwdParams call = cuda::attention_to_lists(p, lists);
    Inputs inputs{};
    inputs.query = query;
    forward_cuda(call, inputs);
    return lists.skipped_rows;
}

std::tuple<Tensor, Tensor> pack_mask(const Tensor& mask, int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                     const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
    AttentionParams p = mask_params(mask, std::nullopt, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k);
    const c10::cuda::CUDAGuard guard(mask.device());
    return pack(p, mask);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_and_list_mask(const Tensor& mask, int64_t seqlen_q,
                                                                      int64_t seqlen_k, bool is_causal,
                                                                      int64_t percent) {
    AttentionParams p = mask_params(mask, std::nullopt, seqlen_q, seqlen_k, is_causal, std::nullopt, std::nullopt);
    TORCH_CHECK_VALUE(mask.numel() > 0 && !p.mask.per_key,
                      "mask must not be empty, and have a row per query row, got shape ", shape_of(mask));
    TORCH_CHECK_VALUE(percent >= 0 && percent <= 100, "percent must be from 0 to 100, got ", percent);
    const c10::cuda::CUDAGuard guard(mask.device());
    const auto [bits, summaries] = pack(p, mask);
    const KeyListsPlan plan = plan_key_lists(p);
    const Tensor memory = workspace(plan.workspace_bytes, mask);
    const int64_t capacity = room_for_short_lists(p, plan);
    const KeyListTensors lists =
        empty_key_lists(mask, capacity, plan.batches, plan.heads, plan.num_m_blocks, plan.has_rows);
    key_list_offsets_cuda(p, plan, percent, address(memory), lists.begins(), lists.ends(), capacity, nullptr,
                          current_stream());
    key_list_fill_cuda(p, plan, address(memory), lists.begins(), capacity, lists.kv_indices.data_ptr<int32_t>(),
                       lists.row_words(), current_stream());
    return {bits, summaries, lists.kv_indices, lists.kv_indptr, lists.kv_row_bits};
}

std::tuple<Tensor, Tensor, Tensor> build_bounded_lists(const AttentionParams& p, const Tensor& source,
                                                       int64_t keys_per_row) {
    const c10::cuda::CUDAGuard guard(source.device());
    const BoundedListsPlan plan = plan_bounded_lists(p, std::min(keys_per_row, p.seqlen_k));
    const KeyListTensors lists =
        empty_key_lists(source, plan.capacity, plan.batches, plan.heads, plan.num_m_blocks, false);
    bounded_lists_cuda(p, plan, lists.kv_indices.data_ptr<int32_t>(), lists.begins(), lists.ends(), current_stream());
    return lists.tensors();
}

std::tuple<Tensor, Tensor, Tensor> build_counted_lists(AttentionParams p, const Tensor& source) {
    const c10::cuda::CUDAGuard guard(source.device());
    const KeyListsPlan plan = plan_key_lists(p);
    if (plan.lists() == 0 || source.numel() == 0) {
        const KeyListTensors none =
            empty_key_lists(source, 0, plan.batches, plan.heads, plan.num_m_blocks, plan.has_rows);
        none.kv_indptr.zero_();
        return none.tensors();
    }
    const cudaStream_t stream = current_stream();
    const auto packed = p.mask.present() ? pack(p, source) : std::tuple<Tensor, Tensor>();
    const Tensor memory = workspace(plan.workspace_bytes, source);
    const Tensor total = at::empty({1}, source.options().dtype(at::kLong));
    const KeyListTensors offsets =
        empty_key_lists(source, 0, plan.batches, plan.heads, plan.num_m_blocks, plan.has_rows);
    key_list_offsets_cuda(p, plan, std::nullopt, address(memory), offsets.begins(), offsets.ends(),
                          std::numeric_limits<int64_t>::max(), total.data_ptr<int64_t>(), stream);
    const int64_t capacity = total.item<int64_t>();
    KeyListTensors lists =
        empty_key_lists(source, capacity, plan.batches, plan.heads, plan.num_m_blocks, plan.has_rows);
    lists.kv_indptr = offsets.kv_indptr;
    key_list_fill_cuda(p, plan, address(memory), lists.begins(), capacity, lists.kv_indices.data_ptr<int32_t>(),
                       lists.row_words(), stream);
    return lists.tensors();
}

void build_index_lists(const IndexListsParams& p, const IndexListsPlan& plan, const Tensor& indices, int32_t* keys,
                       int64_t* begins, int64_t* ends, uint32_t* rows) {
    const c10::cuda::CUDAGuard guard(indices.device());
    index_lists_cuda(p, plan, keys, begins, ends, rows, current_stream());
}

Tensor topk_intervals(const Tensor& bias, int64_t window_size, int64_t seqlen_q, const OptionalTensor& cu_seqlens_q,
                      const OptionalTensor& cu_seqlens_k, std::optional<int64_t> max_keys) {
    const c10::cuda::CUDAGuard guard(bias.device());
    SelectParams p = select_params(bias, window_size, seqlen_q);
    TORCH_CHECK_VALUE(
        cu_seqlens_q.has_value() == cu_seqlens_k.has_value() && cu_seqlens_k.has_value() == (bias.dim() == 2),
        "cu_seqlens_q and cu_seqlens_k come with a bias (total_k, {H|Hkv|1}), got shape ", shape_of(bias));
    const auto ints = bias.options().dtype(at::kInt);
    if (cu_seqlens_k) {
        check_same_sequences(*cu_seqlens_q, *cu_seqlens_k);
        for (const auto& [tensor, name, total] : {std::tuple(&cu_seqlens_q, "cu_seqlens_q", std::optional<int64_t>()),
                                                  std::tuple(&cu_seqlens_k, "cu_seqlens_k", std::optional(p.keys))}) {
            CuSeqlens given{name, **tensor, &bias, "bias"};
            given.total = total;
            given.counted = "the keys of bias";
            check_cu_seqlens(given);
            check_last_contiguous(**tensor, name);
        }
        p.batches = cu_seqlens_k->numel() - 1;
        p.max_keys = std::min(max_keys.value_or(p.keys), p.keys);
        p.cu_seqlens_q = cu_seqlens_q->const_data_ptr<int32_t>();
        p.cu_seqlens_k = cu_seqlens_k->const_data_ptr<int32_t>();
    }
    Tensor intervals = cu_seqlens_k ? at::empty({2, p.keys, p.bias.heads}, ints)
                                    : at::empty({2, p.bias.batches, p.bias.heads, p.keys}, ints);
    if (intervals.numel() == 0) return intervals;
    const IntervalSelectPlan plan = plan_select_intervals(p);
    const Tensor memory = workspace(plan.workspace_bytes, bias);
    select_intervals_cuda(p, plan, address(memory), intervals.data_ptr<int32_t>(), current_stream());
    return intervals;
}

void select_key_lists(const SelectParams& params, const SelectedListsPlan& plan, const Tensor& bias, int32_t* keys,
                      int64_t* begins, int64_t* ends, uint32_t* rows) {
    const c10::cuda::CUDAGuard guard(bias.device());
    select_key_lists_cuda(params, plan, keys, begins, ends, rows, current_stream());
}

}  // namespace flash_dmattn
