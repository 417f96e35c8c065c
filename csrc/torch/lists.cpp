#include "lists.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/index_lists.h"
#include "cpu/key_lists.h"
#include "cuda_backend.h"

namespace flash_dmattn {
namespace {

int64_t num_m_blocks_of(const AttentionParams& p) {
    return p.mask.per_key ? 1 : (p.seqlen_q + KeyListsView::kRows - 1) / KeyListsView::kRows;
}

}  // namespace

KeyListTensors empty_key_lists(const Tensor& like, int64_t capacity, int64_t batches, int64_t heads,
                               int64_t num_m_blocks, bool has_rows, int64_t m_block_rows) {
    const auto ints = like.options().dtype(at::kInt);
    return {at::empty({capacity}, ints), at::empty({2, batches, heads, num_m_blocks}, like.options().dtype(at::kLong)),
            at::empty({has_rows ? capacity : 0, m_block_rows / 32}, ints)};
}

namespace {

// keys_per_row: the bound of an interval mask that has one.
std::tuple<Tensor, Tensor, Tensor> build_key_lists_cpu(const AttentionParams& p, const Tensor& source,
                                                       std::optional<int64_t> keys_per_row,
                                                       std::optional<int64_t> limit) {
    const int64_t num_m_blocks = num_m_blocks_of(p), num_lists = p.batch * p.heads * num_m_blocks;
    const Tensor lengths = at::zeros({num_lists}, source.options().dtype(at::kLong));
    if (source.numel() > 0) key_list_lengths_cpu(p, lengths.data_ptr<int64_t>());
    const Tensor ends = lengths.cumsum(0);
    const int64_t total = num_lists > 0 ? ends[-1].item<int64_t>() : 0;
    int64_t capacity = limit && total > *limit ? 0 : total;
    if (keys_per_row) {
        const int64_t rows = std::min(p.seqlen_q, KeyListsView::kRows);
        capacity =
            rows > 0
                ? num_lists * KeyListsView::padded(std::min(std::min(*keys_per_row, p.seqlen_k) + rows - 1, p.seqlen_k))
                : 0;
        // Each m_block of a packed batch lists every key once at most, and pads for each sequence.
        if (p.cu_seqlens_q != nullptr)
            capacity =
                std::min(capacity, p.heads * num_m_blocks * (source.size(1) + p.batch * (KeyListsView::kAlign - 1)));
        TORCH_CHECK_VALUE(
            total <= capacity,
            "keys_per_row of the mask must bound the keys that n successive rows see, at most keys_per_row "
            "+ n - 1, got one with room for ",
            capacity, " keys in all lists together, which hold ", total);
    }
    const bool has_rows = p.mask.present() && !p.mask.per_key;
    KeyListTensors lists = empty_key_lists(source, capacity, p.batch, p.heads, num_m_blocks, has_rows);
    lists.kv_indptr = at::stack({ends - lengths, ends}).clamp_max_(capacity).view_as(lists.kv_indptr);
    if (capacity > 0)
        key_list_fill_cpu(p, lists.begins(), lists.ends(), lists.kv_indices.data_ptr<int32_t>(), lists.row_words());
    return lists.tensors();
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> build_key_lists(const OptionalTensor& mask, const OptionalTensor& intervals,
                                                   int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                                   const OptionalTensor& cu_seqlens_q,
                                                   const OptionalTensor& cu_seqlens_k,
                                                   std::optional<int64_t> keys_per_row, std::optional<int64_t> limit) {
    for (const auto& [bound, name] : {std::pair(keys_per_row, "keys_per_row"), std::pair(limit, "limit")})
        TORCH_CHECK_VALUE(!bound || *bound >= 0, name, " must not be negative, got ", *bound);
    const AttentionParams p = mask_params(mask, intervals, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k);
    const Tensor& source = mask ? *mask : *intervals;
    const bool bounded = intervals && keys_per_row;
    TORCH_CHECK_VALUE(!limit || source.is_cpu(), "limit is for masks on the CPU, got one for a mask on CUDA");
    if (!source.is_cpu())
        return bounded ? build_bounded_lists(p, source, *keys_per_row) : build_counted_lists(p, source);
    return build_key_lists_cpu(p, source, bounded ? keys_per_row : std::nullopt, limit);
}

namespace {

void check_indices(const Tensor& indices, int64_t tile_rows, int64_t seqlen_q, int64_t seqlen_k,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
    const auto on_cpu = [](const OptionalTensor& x) { return x ? OptionalTensor(x->cpu()) : std::nullopt; };
    const Tensor values = indices.cpu();
    const OptionalTensor cu_q = on_cpu(cu_seqlens_q), cu_k = on_cpu(cu_seqlens_k);
    const auto wrong =
        find_wrong_index_cpu(index_params(values, std::nullopt, tile_rows, seqlen_q, seqlen_k, false, cu_q, cu_k));
    if (!wrong) return;
    TORCH_CHECK_VALUE(false, "indices must be from 0 to ", wrong->keys - 1, ", or -1 for none, got ", wrong->index);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> index_key_lists(const Tensor& indices, const OptionalTensor& intervals,
                                                   int64_t tile_rows, int64_t seqlen_q, int64_t seqlen_k,
                                                   bool is_causal, const OptionalTensor& cu_seqlens_q,
                                                   const OptionalTensor& cu_seqlens_k) {
    const IndexListsParams p =
        index_params(indices, intervals, tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k);
    if (is_host_readable(indices)) check_indices(indices, tile_rows, seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k);
    const IndexListsPlan plan = plan_index_lists(p);
    const KeyListTensors lists = empty_key_lists(indices, plan.capacity, plan.batches, plan.heads, plan.num_m_blocks,
                                                 plan.has_rows, plan.m_block_rows);
    int32_t* keys = lists.kv_indices.data_ptr<int32_t>();
    if (indices.is_cpu()) {
        index_lists_cpu(p, plan, keys, lists.begins(), lists.ends(), lists.row_words());
    } else {
        build_index_lists(p, plan, indices, keys, lists.begins(), lists.ends(), lists.row_words());
    }
    return lists.tensors();
}

}  // namespace flash_dmattn
