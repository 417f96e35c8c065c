// From params to a plan, and to the instantiation of their head dimension and dtype.
#include "bwd.h"

#include <algorithm>
#include <limits>

#include "../common/serves.h"
#include "bwd_exchange.cuh"
#include "kernels.h"  // generated: FLASH_DMATTN_SM90_{BWD,GATHER_BWD}_KERNELS(X), X(T, head dimension) for what is built
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr int64_t kBytes = 2;  // of an element

bool can_load(const BwdParams& p) {
    const bool is_dense = p.bias.present() && p.bias.kind == BiasKind::kDense;
    if (!can_map(query_layout(p, p.query)) || !can_map(query_layout(p, p.dout))) return false;
    if (p.lists.present()) {  // threads gather the keys, by strides of 32 bits
        const int64_t longest = std::max(p.key.row_stride, p.value.row_stride);
        return !is_dense && longest * kBytes <= std::numeric_limits<uint32_t>::max();
    }
    return can_map(key_layout(p, p.key)) && can_map(key_layout(p, p.value)) &&
           (!is_dense || (p.bias.col_stride == 1 && can_map(dense_layout(p, p.bias))));
}

// Who writes the gradient of a dense bias; kNone where these kernels cannot: where heads share an entry, a tile that
// reaches beyond its sequence reaches into another, or ds is not dx.
DenseDbias plan_dense_dbias(const BwdParams& p) {
    const bool can_store = p.dbias.heads == p.heads && p.cu_seqlens_q == nullptr && p.softcap == 0 &&
                           can_map(dense_layout(p, p.dbias));
    if (can_store && p.dbias.batches == p.batch) return DenseDbias::kByEntry;
    if (can_store && can_exchange_among(p.dbias.batch_sharers)) return DenseDbias::kExchanged;
    return DenseDbias::kNone;
}

bool plan_lists(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    FLASH_DMATTN_SM90_GATHER_BWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    if (plan.head_dim == 0) return false;
    plan.dkv_rows = p.total_k;
    plan.dkv_cols = plan.head_dim;
    const int64_t sums = 2 * plan.dkv_rows * p.kv_heads * plan.dkv_cols;
    plan.dkv_accum = layout.take(sums * static_cast<int64_t>(sizeof(float)));
    plan.zeroed_bytes = layout.bytes;
    return true;
}

void run_lists(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream) {
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run_gather_bwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_GATHER_BWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace

bool bwd_pays(const BwdParams& p) {
    if (p.lists.present()) return p.head_dim > 32;
    const bool exchanges = p.bias.kind == BiasKind::kDense && p.dbias.present() && p.dbias.batches < p.batch;
    if (exchanges && p.head_dim <= 64) return p.seqlen_k >= 1024;
    return p.head_dim > 32 || p.seqlen_k >= 512;
}

bool plan_bwd(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    if (p.deterministic || p.seqlen_q == 0 || p.seqlen_k == 0 || !can_load(p)) return false;
    if (p.lists.present()) return plan_lists(p, plan, layout);
    const bool has_dense_dbias = p.bias.kind == BiasKind::kDense && p.dbias.present();
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    FLASH_DMATTN_SM90_BWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    if (plan.head_dim == 0) return false;
    if (has_dense_dbias) plan.dense_dbias = plan_dense_dbias(p);
    if (has_dense_dbias && plan.dense_dbias == DenseDbias::kNone) {
        plan = {};
        return false;
    }
    const int64_t rows = bwd_tile_sizes(plan.head_dim, plan.dense_dbias == DenseDbias::kExchanged).rows;
    const bool varlen = p.cu_seqlens_q != nullptr;
    plan.dquery_tiles = varlen ? p.total_q / rows + p.batch : ceil_div<int64_t>(p.seqlen_q, rows);
    const int64_t tiles = (varlen ? 1 : p.batch) * p.heads * plan.dquery_tiles;
    plan.dquery_accum = layout.take(tiles * rows * plan.head_dim * static_cast<int64_t>(sizeof(float)));
    plan.zeroed_bytes = layout.bytes;
    return true;
}

void run_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream) {
    if (args.lists.present()) return run_lists(args, plan, stream);
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run_bwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_BWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn::cuda::sm90
