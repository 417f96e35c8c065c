// From params to a plan, and to the instantiation of their head dimension and dtype.
#include "plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/device.h"
#include "cuda/common/kernel_selection.h"
#include "dsmem_reduction.cuh"
#include "workspace.cuh"
#include "cuda/sm90/sparse_bwd/grouped_config.h"
#include "kernels.h"  // generated: FLASH_DMATTN_SM90_{BWD,PAIR,SPARSE_BWD}_KERNELS(X), X(T, head dimension) for what is built
#include "cuda/sm90/pair_bias/run.h"
#include "cuda/sm90/pair_bias/config.h"
#include "cuda/arch/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

// About the keys of a list.
int64_t list_length(const BwdParams& p) {
    return p.lists.longest > 0 ? std::min(p.lists.longest, p.seqlen_k) : p.seqlen_k;
}

bool can_load(const BwdParams& p) {
    return can_map(query_layout(p, p.query)) && can_map(query_layout(p, p.dout)) && can_load_keys(p);
}

// Whether tiles of the gradient of a dense bias are its own: no heads share an entry, and none lies in another sequence.
bool can_store_whole(const BwdParams& p) {
    return p.dbias.heads == p.heads && p.cu_seqlens_q == nullptr && can_map(dense_layout(p, p.dbias));
}

// Who writes the gradient of a dense bias; kNone where these kernels cannot: where heads share an entry, a tile that
// reaches beyond its sequence reaches into another, or ds is not dx.
DenseDbias plan_dense_dbias(const BwdParams& p, int head_dim) {
    const bool can_store = can_store_whole(p) && p.softcap == 0;
    if (can_store && p.dbias.batches == p.batch) return DenseDbias::kDirect;
    if (can_store && can_cluster_reduce_among(p.dbias.batch_group_size) && can_cluster_reduce_at(head_dim))
        return DenseDbias::kClusterReduce;
    return DenseDbias::kNone;
}

// Heads share neither keys nor, where a gradient is asked for, biases.
bool is_pair_bias(const BwdParams& p) {
    return is_pair_bias_problem(p) && p.seqlen_q <= kPairBiasBwdLongest && p.seqlen_k <= kPairBiasBwdLongest &&
           p.kv_heads == p.heads && can_map(query_layout(p, p.out)) && (!p.dbias.present() || can_store_whole(p));
}

// The kernels for a dense bias that batch elements share have an owner for each gradient, and no sums but the bias's.
bool plan_pair_bias(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    if (plan.head_dim == 0) return false;
    plan.pair = true;
    plan.dbias_tiles = pair_bias_dquery_tiles(p);
    plan.dbias_splits = pair_bias_splits(plan.dbias_tiles, pair_bias_batch_group_size(p));
    const int64_t parts = p.dbias.present() ? plan.dbias_splits * plan.dbias_tiles * pair_bias_dquery_key_tiles(p) : 0;
    plan.dbias_parts = layout.take(parts * kPairBiasDbiasTile * static_cast<int64_t>(sizeof(float)));
    return true;
}

// How the kernels for lists of a head dimension can go by these, for one head after the other or for all query heads of a
// group at once (gather_group_block.cuh), which must share the keys; and which they do. Where both can, long lists that heads
// share are faster in groups, as measured on an H200.
bool should_try_per_head(const BwdParams& p, int head_dim) {
    return p.lists.tile_rows == KeyListsView::kRows && can_run_per_head(head_dim);
}
bool groups_gqa_heads(const BwdParams& p, int head_dim) {
    if (!heads_share_keys(p)) return false;
    return !should_try_per_head(p, head_dim) || (p.heads > p.kv_heads && list_length(p) >= 512);
}

// Blocks share a tile of rows, each with a part of its list: so many that they fill the device, and that what is read and
// summed again and again stays in the cache, Q, dO and the sums of dQ of all rows at work.
void plan_grouped(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    constexpr double kShareOfCache = 0.4;
    const Device& device = current_device();
    const int64_t rows = grouped_block_m(p), num_m_blocks = ceil_div(p.seqlen_q, rows) * p.kv_heads * p.batch;
    const int64_t numbers = p.heads / p.kv_heads * rows * plan.head_dim;  // of a tile of rows
    const double bytes = static_cast<double>(device.num_sms * numbers) * (2 * kElementBytes + sizeof(float));
    const auto for_cache =
        static_cast<int64_t>(std::ceil(bytes / (kShareOfCache * static_cast<double>(device.l2_bytes))));
    const int64_t for_device = ceil_div<int64_t>(device.num_sms, num_m_blocks);
    const int64_t num_n_blocks = ceil_div<int64_t>(list_length(p), grouped_block_n(plan.head_dim));
    plan.list_splits = std::min(std::max(for_cache, for_device), num_n_blocks);
    // Twice as many slots as there are tiles at work, for no block to wait until the last of another tile's has emptied one.
    plan.dquery_slots = std::min(2 * ceil_div<int64_t>(device.num_sms, plan.list_splits), num_m_blocks);
    plan.dquery_accum = layout.take(plan.dquery_slots * numbers * static_cast<int64_t>(sizeof(float)));
    plan.dquery_semaphore = layout.take((1 + 2 * plan.dquery_slots) * static_cast<int64_t>(sizeof(int32_t)));
}

// Gathered keys: what a tile of rows adds to dK and dV is summed in global memory.
bool plan_lists(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    int head_dim = 0;
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (head_dim == 0 && serves<T, kHeadDim>(p)) head_dim = kHeadDim;
    FLASH_DMATTN_SM90_SPARSE_BWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    const bool groups = groups_gqa_heads(p, head_dim);
    if (head_dim == 0 || p.deterministic || !(groups || should_try_per_head(p, head_dim))) return false;
    plan.head_dim = head_dim;
    plan.dkv_rows = p.total_k;
    plan.dkv_cols = plan.head_dim;
    const int64_t sums = 2 * plan.dkv_rows * p.kv_heads * plan.dkv_cols;
    plan.dkv_accum = layout.take(sums * static_cast<int64_t>(sizeof(float)));
    if (groups) plan_grouped(p, plan, layout);
    plan.zeroed_bytes = layout.bytes;
    return true;
}

void run_lists(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream) {
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run_sparse_bwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_SPARSE_BWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace

bool should_use_bwd(const BwdParams& p) {
    if (p.lists.present()) return p.head_dim > 128 ? p.seqlen_k >= 1024 : p.head_dim > 32;
    if (is_pair_bias(p)) return should_use_pair_bias_bwd(p);
    const bool cluster_reduces = p.bias.kind == BiasKind::kDense && p.dbias.present() && p.dbias.batches < p.batch;
    if (cluster_reduces && p.head_dim <= 64) return p.seqlen_k >= 1024;
    return p.head_dim > 32 || p.seqlen_k >= 512;
}

bool plan_bwd(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    if (p.seqlen_q == 0 || p.seqlen_k == 0 || !can_load(p)) return false;
    if (p.lists.present()) return plan_lists(p, plan, layout);
    if (is_pair_bias(p) && plan_pair_bias(p, plan, layout)) return true;
    const bool has_dense_dbias = p.bias.kind == BiasKind::kDense && p.dbias.present();
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    FLASH_DMATTN_SM90_BWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    if (plan.head_dim == 0) return false;
    if (has_dense_dbias) plan.dense_dbias = plan_dense_dbias(p, plan.head_dim);
    if (has_dense_dbias && plan.dense_dbias == DenseDbias::kNone) {
        plan = {};
        return false;
    }
    const int64_t rows = bwd_tile_sizes(plan.head_dim, plan.dense_dbias == DenseDbias::kClusterReduce).rows;
    plan.dquery_tiles = count_dquery_tiles(p, rows);
    const int64_t tiles = dquery_tiles_total(p, plan);
    plan.dquery_accum = layout.take(tiles * rows * plan.head_dim * static_cast<int64_t>(sizeof(float)));
    const int64_t turns = p.deterministic ? count_dquery_semaphores(tiles) : 0;
    plan.dquery_semaphore = layout.take(turns * static_cast<int64_t>(sizeof(int32_t)));
    plan.zeroed_bytes = layout.bytes;
    return true;
}

void run_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream) {
    if (args.lists.present()) return run_lists(args, plan, stream);
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.pair && serves<T, kHeadDim>(args)) return run_pair_bias_bwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run_bwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_BWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn::cuda::sm90
