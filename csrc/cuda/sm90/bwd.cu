// From params to a plan, and to the instantiation of their head dimension and dtype.
#include "bwd.h"

#include "../common/serves.h"
#include "bwd_exchange.cuh"
#include "kernels.h"  // generated: FLASH_DMATTN_SM90_BWD_KERNELS(X), X(T, head dimension) for what is built
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

bool can_load(const BwdParams& p) {
    const bool is_dense = p.bias.present() && p.bias.kind == BiasKind::kDense;
    return can_map(query_layout(p, p.query)) && can_map(query_layout(p, p.dout)) && can_map(key_layout(p, p.key)) &&
           can_map(key_layout(p, p.value)) && (!is_dense || (p.bias.col_stride == 1 && can_map(dense_layout(p, p.bias))));
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

}  // namespace

bool bwd_pays(const BwdParams& p) {
    const bool exchanges = p.bias.kind == BiasKind::kDense && p.dbias.present() && p.dbias.batches < p.batch;
    if (exchanges && p.head_dim <= 64) return p.seqlen_k >= 1024;
    return p.head_dim > 32 || p.seqlen_k >= 512;
}

bool plan_bwd(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    if (p.lists.present() || p.deterministic || p.seqlen_q == 0 || p.seqlen_k == 0 || !can_load(p)) return false;
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
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run_bwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_BWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn::cuda::sm90
