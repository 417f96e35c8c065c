#include "mha.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "cpu/mha_cpu.h"
#include "cuda_backend.h"

namespace flash_dmattn {
namespace {

void make_readable(Inputs& in) {
    // The checks refuse tensors with too few dimensions.
    for (Tensor* rows : {&in.query, &in.key, &in.value})
        if (rows->dim() > 0) *rows = readable_rows(*rows);
    if (in.relative_bias && !has_contiguous_entries(*in.relative_bias))
        in.relative_bias = in.relative_bias->contiguous();
    if (is_bias_matrix(in) && !has_contiguous_entries(*in.bias)) in.bias = in.bias->contiguous();
    // Views of what the operators made, as vmap passes them.
    for (OptionalTensor* bits : {&in.mask, &in.mask_summaries, &in.kv_row_bits})
        if (*bits && (*bits)->is_cuda() && !is_aligned(**bits)) *bits = (*bits)->clone(at::MemoryFormat::Contiguous);
}

Tensor empty_lse(const AttentionParams& p, const Inputs& in) {
    const auto options = in.query.options().dtype(accumulation_type(in.query));
    return in.is_varlen() ? at::empty({p.heads, in.query.size(0)}, options)
                          : at::empty({p.batch, p.heads, p.seqlen_q}, options);
}

// Reduces the column sums of a key bias's gradient, (B, {H|Hkv}, 1, Sk) or ({H|Hkv}, total_k), to the bias's shape and
// dtype.
Tensor sum_to_bias(const Tensor& column_sums, const Tensor& bias, bool varlen) {
    if (varlen) {
        const Tensor sums = bias.size(1) == 1 ? column_sums.sum(0, /*keepdim=*/true) : column_sums;
        return sums.t().to(bias.scalar_type()).contiguous();
    }
    // Batch elements that share a bias: (batches, elements of one, heads, 1, Sk).
    const int64_t batches = bias.size(0), all = column_sums.size(0);
    const bool are_shared = batches > 1 && batches != all;  // also with batches == 0
    const Tensor sums = are_shared ? column_sums.unflatten(0, {batches, all / batches}).sum(1) : column_sums;
    return sums.sum_to_size(bias.sizes()).to(bias.scalar_type());
}

// The tensor that the kernels write the gradient of the bias to: for a key bias its column sums.
Tensor empty_dbias(BwdParams& p, const Inputs& in) {
    const Tensor& bias = *in.bias;
    const bool varlen = in.is_varlen();
    if (p.bias.kind == BiasKind::kDense) {
        // No kernel writes the columns beyond a sequence's keys. With lists only the listed scores are written.
        const bool all_written = !varlen && !p.lists.present() && !nothing_to_do(p);
        const Tensor dbias =
            all_written ? at::empty(bias.sizes(), bias.options()) : at::zeros(bias.sizes(), bias.options());
        p.dbias = score_view(dbias);
        p.dbias.batch_group_size = p.bias.batch_group_size;
        return dbias;
    }
    const auto accumulation = in.query.options().dtype(accumulation_type(in.query));
    const int64_t heads = p.bias.heads == p.heads ? p.heads : p.kv_heads;
    const Tensor dbias = varlen ? at::zeros({heads, in.key.size(0)}, accumulation)
                                : at::zeros({p.batch, heads, 1, p.seqlen_k}, accumulation);
    p.dbias.data = data_of(dbias);
    p.dbias.batches = p.batch;
    p.dbias.heads = heads;
    p.dbias.batch_stride = varlen ? 0 : dbias.stride(0);
    p.dbias.head_stride = dbias.stride(varlen ? 0 : 1);
    p.dbias.col_stride = 1;
    p.dbias.per_key = true;
    return dbias;
}

// The results of the forward and their gradients.
void check_results(const BwdParams& p, const Inputs& in, const Tensor& dout, const OptionalTensor& dlse,
                   const Tensor& out, const Tensor& lse) {
    const Tensor& query = in.query;
    for (const auto& [tensor, name] : {std::pair(&dout, "dout"), std::pair(&out, "out")}) {
        check_shape(*tensor, name, query.sizes());
        check_dtype(*tensor, name, query.scalar_type());
        check_device(*tensor, name, query, "query");
    }
    const auto check_stat = [&](const Tensor& tensor, const char* name) {
        in.is_varlen() ? check_shape(tensor, name, {p.heads, query.size(0)})
                       : check_shape(tensor, name, {p.batch, p.heads, p.seqlen_q});
        check_dtype(tensor, name, accumulation_type(query));
        check_device(tensor, name, query, "query");
    };
    check_stat(lse, "lse");
    if (dlse) check_stat(*dlse, "dlse");
    check_last_contiguous(out, "out");
    check_last_contiguous(lse, "lse");
}

}  // namespace

ForwardResult mha_fwd(Inputs in) {
    make_readable(in);
    FwdParams p;
    fill(p, in);
    const bool varlen = in.is_varlen();
    Tensor out = at::empty(in.query.sizes(), in.query.options()), lse = empty_lse(p, in);
    p.out = rows_view(out, varlen);
    p.lse = row_stat_view(lse, varlen);
    if (!in.query.is_cpu()) {
        forward_cuda(p, in);
    } else if (!nothing_to_do(p)) {
        mha_fwd_cpu(p);
    }
    return {out, lse};
}

BackwardResult mha_bwd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& out, const Tensor& lse,
                       bool needs_dbias, bool needs_drelative_bias, Inputs in) {
    make_readable(in);
    BwdParams p;
    fill(p, in);
    const Tensor& query = in.query;
    const bool varlen = in.is_varlen();
    TORCH_CHECK_VALUE(!needs_dbias || in.bias, "needs_dbias is True, but there is no bias");
    TORCH_CHECK_VALUE(!needs_drelative_bias || in.relative_bias,
                      "needs_drelative_bias is True, but there is no relative_bias");
    TORCH_CHECK_VALUE(!in.seqused_k, "cache_seqlens is for inference, and has no gradients");
    check_results(p, in, dout, dlse, out, lse);

    const Tensor dout_rows = readable_rows(dout.stride(-1) == 1 ? dout : dout.contiguous());
    const Tensor out_rows = readable_rows(out);
    const Tensor dlse_rows = dlse ? dlse->contiguous() : query.is_cpu() ? at::zeros_like(lse) : Tensor();
    const Tensor delta = query.is_cpu() ? at::empty_like(lse) : Tensor();
    const auto gradient_of = [&](const Tensor& x) {
        return nothing_to_do(p) ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
    };
    Tensor dquery = gradient_of(query), dkey = gradient_of(in.key), dvalue = gradient_of(in.value);
    p.out = rows_view(out_rows, varlen);
    p.lse = row_stat_view(lse, varlen);
    p.dout = rows_view(dout_rows, varlen);
    if (dlse_rows.defined()) p.dlse = row_stat_view(dlse_rows, varlen);
    if (delta.defined()) p.delta = row_stat_view(delta, varlen);
    p.dquery = rows_view(dquery, varlen);
    p.dkey = rows_view(dkey, varlen);
    p.dvalue = rows_view(dvalue, varlen);
    p.deterministic = in.deterministic;
    const bool is_matrix = is_bias_matrix(in);
    Tensor dbias = !needs_dbias ? at::empty({0}, query.options())
                   : is_matrix  ? at::zeros(in.bias->sizes(), in.bias->options())
                                : empty_dbias(p, in);
    const Tensor drelative_bias = needs_drelative_bias
                                      ? at::zeros(in.relative_bias->sizes(), in.relative_bias->options())
                                      : at::empty({0}, query.options());
    if (needs_drelative_bias) p.drelative_bias = data_of(drelative_bias);
    if (needs_dbias && is_matrix) p.drelative_bias = data_of(dbias);
    if (!query.is_cpu()) {
        backward_cuda(p, in);
    } else if (!nothing_to_do(p)) {
        mha_bwd_cpu(p);
    }
    if (needs_dbias && p.bias.kind == BiasKind::kKey) dbias = sum_to_bias(dbias, *in.bias, varlen);
    return {dquery, dkey, dvalue, dbias, drelative_bias};
}

}  // namespace flash_dmattn
