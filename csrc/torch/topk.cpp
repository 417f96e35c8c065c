#include "topk.h"

#include "checks.h"
#include "cpu/topk_lists.h"
#include "cuda_backend.h"
#include "lists.h"

namespace flash_dmattn {
namespace {

void set_lengths(SelectParams& p, const Tensor& bias, const OptionalTensor& seqused_k) {
    if (!seqused_k) return;
    check_dtype(*seqused_k, "seqused_k", at::kInt);
    check_device(*seqused_k, "seqused_k", bias, "bias");
    check_last_contiguous(*seqused_k, "seqused_k");
    TORCH_CHECK_VALUE(seqused_k->dim() == 1 && (p.batches == 1 || seqused_k->numel() == p.batches),
                      "seqused_k must be (B), got shape ", shape_of(*seqused_k));
    p.batches = seqused_k->numel();
    p.seqused_k = seqused_k->const_data_ptr<int32_t>();
}

// Callers that select by another tensor than attn_bias check it before.
void check_order(bool has_order) {
    TORCH_CHECK_VALUE(has_order, "attn_bias must not be NaN where window_size selects by it");
}

}  // namespace

SelectParams select_params(const Tensor& bias, int64_t window_size, int64_t seqlen_q) {
    const bool varlen = bias.dim() == 2;
    TORCH_CHECK_VALUE(varlen || bias.dim() == 3 || (bias.dim() == 4 && bias.size(2) == 1),
                      "bias must be ({B|1}, {H|Hkv|1}, 1, Sk), or without the 1, or (total_k, {H|Hkv|1}), got shape ",
                      shape_of(bias));
    TORCH_CHECK_TYPE(at::isFloatingType(bias.scalar_type()), "bias must be floating, got ", dtype_of(bias));
    TORCH_CHECK_VALUE(window_size >= 0, "window_size must not be negative, got ", window_size);
    check_length("seqlen_q", seqlen_q);
    check_length("the number of keys", bias.size(varlen ? 0 : -1));
    SelectParams p;
    p.bias.data = data_of(bias);
    p.bias.batches = varlen ? 1 : bias.size(0);
    p.bias.heads = bias.size(1);
    p.bias.per_key = true;
    p.bias.batch_stride = varlen ? 0 : broadcast_stride(bias, 0);
    p.bias.head_stride = broadcast_stride(bias, 1);
    p.bias.col_stride = bias.stride(varlen ? 0 : -1);
    p.bias.kind = BiasKind::kKey;
    p.bias.dtype = data_type(bias);
    p.batches = p.bias.batches;
    p.rows = seqlen_q;
    p.keys = p.max_keys = bias.size(varlen ? 0 : -1);
    p.window = std::min(window_size, p.keys);
    return p;
}

std::tuple<Tensor, Tensor, Tensor> topk_lists(const Tensor& bias, int64_t window_size, int64_t seqlen_q,
                                              const OptionalTensor& seqused_k) {
    SelectParams p = select_params(bias, window_size, seqlen_q);
    TORCH_CHECK_VALUE(bias.dim() != 2 && seqlen_q <= kMaxListedRows, "topk_lists is of fixed length and for up to ",
                      kMaxListedRows, " rows, got ", seqlen_q, " and bias of shape ", shape_of(bias));
    set_lengths(p, bias, seqused_k);
    const SelectedListsPlan plan = plan_selected_lists(p);
    const KeyListTensors lists = empty_key_lists(bias, plan.capacity, p.batches, p.bias.heads, 1, plan.has_rows);
    if (plan.lists == 0) {
        lists.kv_indptr.zero_();  // without rows there is still a list for each head
        return lists.tensors();
    }
    int32_t* keys = lists.kv_indices.data_ptr<int32_t>();
    if (!bias.is_cpu()) {
        select_key_lists(p, plan, bias, keys, lists.begins(), lists.ends(), lists.row_words());
    } else {
        check_order(topk_lists_cpu(p, plan, keys, lists.begins(), lists.ends(), lists.row_words()));
    }
    return lists.tensors();
}

Tensor topk_mask(const Tensor& bias, const Tensor& candidates, int64_t window_size) {
    check_dtype(candidates, "candidates", at::kBool);
    TORCH_CHECK_VALUE(bias.dim() == 2, "bias must be (rows, Sk), got shape ", shape_of(bias));
    TORCH_CHECK_VALUE(candidates.sizes() == bias.sizes(), "candidates must have bias's shape ", shape_of(bias),
                      ", got ", shape_of(candidates));
    const SelectParams p = select_params(bias.unsqueeze(0), window_size, 1);
    const Tensor read = candidates.contiguous(), mask = candidates.new_empty(bias.sizes());
    topk_mask_cpu(p, static_cast<const uint8_t*>(read.const_data_ptr()), static_cast<uint8_t*>(mask.data_ptr()));
    return mask;
}

void refuse_nan(const Tensor& bias, const OptionalTensor& seqused_k) {
    if (!bias.is_cpu()) return;
    SelectParams p = select_params(bias, 0, 0);
    set_lengths(p, bias, seqused_k);
    check_order(has_order_cpu(p));
}

}  // namespace flash_dmattn
