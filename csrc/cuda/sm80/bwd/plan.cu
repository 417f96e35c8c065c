// From params to a plan, and to the instantiation of their head dimension and dtype.
#include "plan.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/kernel_selection.h"
#include "kernel.cuh"
#include "kernels.h"  // generated: FLASH_DMATTN_SM80_BWD_KERNELS(X), X(T, head dimension) for what is built

namespace flash_dmattn::cuda::sm80 {
namespace {

// Into how many parts, of up to `most`, each of the dbias tiles is split, so that the blocks fill a few waves of
// `slots` as well as they can.
int64_t splits_that_fill_waves(int64_t tiles, int64_t slots, int64_t most) {
    int64_t best = 1;
    double best_filled = 0;
    for (int64_t waves = 2; waves <= 4; ++waves) {
        const int64_t splits = std::max<int64_t>(std::min(waves * slots / tiles, most), 1);
        const double filled = static_cast<double>(splits * tiles) / (ceil_div(splits * tiles, slots) * slots);
        if (filled > best_filled + 0.01) {
            best = splits;
            best_filled = filled;
        }
    }
    return best;
}

int64_t count_dbias_tiles(const BwdParams& p, const BwdTileSizes& tile) {
    const int64_t tiles = ceil_div<int64_t>(p.seqlen_q, tile.rows) * ceil_div<int64_t>(p.seqlen_k, tile.keys);
    return tiles * p.dbias.heads * (p.cu_seqlens_q == nullptr ? p.dbias.batches : p.batch);
}

// How the gradient of a shared bias is cut: long runs of tiles, but enough of them for every multiprocessor; where there
// are too few tiles for that, their sharers are split.
void plan_dbias_kernel(const BwdParams& p, const BwdTileSizes& tile, BwdPlan& plan) {
    constexpr int64_t kWaves = 2, kLongestRun = 16;
    plan.dbias_tiles = count_dbias_tiles(p, tile);
    if (plan.dbias_tiles == 0) return;
    const int64_t sharers = p.dbias.batch_group_size * (p.heads / p.dbias.heads);
    const int64_t slots = current_device().num_sms * tile.blocks_per_sm;
    if (plan.dbias_tiles < kWaves * slots) plan.dbias_splits = splits_that_fill_waves(plan.dbias_tiles, slots, sharers);
    const int64_t num_n_blocks = ceil_div<int64_t>(p.seqlen_k, tile.keys);
    plan.dbias_run = std::clamp<int64_t>(plan.dbias_tiles / (kWaves * slots), 1, std::min(kLongestRun, num_n_blocks));
}

// Atomic additions cost little as long as the cache holds the sums. It need not hold those of all batch elements: blocks
// begin in their order, and where many share a bias, few biases are in the works at once.
bool can_add_in_cache(const BwdParams& p, const BwdTileSizes& tile, int64_t bytes) {
    const int64_t cache = current_device().l2_bytes;
    if (bytes == 0) return true;
    const int64_t biases = p.cu_seqlens_q == nullptr ? p.dbias.batches : 1;
    const int64_t sharing_blocks = p.dbias.batch_group_size * p.kv_heads * ceil_div<int64_t>(p.seqlen_k, tile.keys);
    const int64_t slots = current_device().num_sms * tile.blocks_per_sm;
    const int64_t at_once = std::min(biases, 1 + slots / sharing_blocks);
    constexpr int64_t kMax = 4;  // caches: what else it would take is time, this is memory
    return bytes / biases * at_once <= cache / 2 && bytes <= kMax * cache;
}

template <typename Traits>
bool can_cluster_reduce_among(int64_t sharers) {
    return kCanClusterReduce<Traits> && DsmemReduction<Traits>::can_divide(sharers);
}
// Whether the blocks of the main kernel can exchange dx, one for each of the batch elements that share a bias.
bool can_cluster_reduce(const BwdParams& p, const BwdPlan& plan) {
    const bool batches_share = p.dbias.heads == p.heads && p.cu_seqlens_q == nullptr;
    if (!batches_share || plan.small_tiles) return false;  // code with the large tiles has clusters, too
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == kHeadDim)      \
        return can_cluster_reduce_among<BwdKernelTraits<kHeadDim, T, false>>(p.dbias.batch_group_size);
    FLASH_DMATTN_SM80_BWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    return false;
}

// Who writes the gradient of a dense bias; gives how many floats of the workspace that takes.
int64_t plan_dense_dbias(const BwdParams& p, const BwdTileSizes& main_tile, BwdPlan& plan) {
    if (dbias_is_of_one(p)) {
        plan.dense_dbias = DenseDbias::kDirect;
        return 0;
    }
    // The main kernel can hand on dx where it is ds, too, and where the order of its additions is free.
    if (p.softcap == 0 && !p.deterministic) {
        if (can_cluster_reduce(p, plan)) {
            plan.dense_dbias = DenseDbias::kClusterReduce;
            return 0;
        }
        plan.dbias_tiles = count_dbias_tiles(p, main_tile);
        const int64_t sums = plan.dbias_tiles * main_tile.rows * main_tile.keys;
        if (can_add_in_cache(p, main_tile, sums * static_cast<int64_t>(sizeof(float)))) {
            plan.dense_dbias = DenseDbias::kAtomic;
            return sums;
        }
    }
    const BwdTileSizes tile = dbias_tile_sizes(plan.head_dim);
    plan.dense_dbias = DenseDbias::kRecompute;
    plan_dbias_kernel(p, tile, plan);
    return plan.dbias_splits > 1 ? plan.dbias_splits * plan.dbias_tiles * tile.rows * tile.keys : 0;
}

WorkspacePart take_floats(WorkspaceLayout& layout, int64_t count) { return layout.take(count * sizeof(float)); }
WorkspacePart take_ints(WorkspaceLayout& layout, int64_t count) { return layout.take(count * sizeof(int32_t)); }

void plan_tiles(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    const BwdTileSizes sizes = bwd_tile_sizes(plan.head_dim, plan.small_tiles);
    plan.dquery_tiles = count_dquery_tiles(p, sizes.rows);
    const int64_t tiles = dquery_tiles_total(p, plan);
    plan.dquery_accum = take_floats(layout, tiles * sizes.rows * plan.head_dim);
    if (p.deterministic) plan.dquery_semaphore = take_ints(layout, tiles + 1);
    plan.zeroed_bytes = layout.bytes;
    if (p.bias.kind != BiasKind::kDense || !p.dbias.present()) return;
    plan.dbias_parts = take_floats(layout, plan_dense_dbias(p, sizes, plan));
    if (plan.dense_dbias == DenseDbias::kAtomic) plan.zeroed_bytes = layout.bytes;
}

// Where a list is for half of the rows that a block could have, two heads that go by it fill the block.
bool can_have_two_heads(const BwdParams& p, int block_rows) {
    return p.lists.num_m_blocks > 1 && p.lists.tile_rows * 2 == block_rows && p.heads / p.kv_heads % 2 == 0 &&
           p.bias.kind != BiasKind::kDense && heads_share_keys(p);
}

void plan_lists(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
    const int block_rows = gather_tile_sizes(plan.head_dim, plan.small_tiles).rows;
    if (can_have_two_heads(p, block_rows)) plan.tile_heads = 2;
    plan.dkv_rows = p.total_k;
    plan.dkv_cols = plan.head_dim;
    plan.dkv_accum = take_floats(layout, 2 * plan.dkv_rows * p.kv_heads * plan.dkv_cols);
    if (p.bias.kind == BiasKind::kDense && p.dbias.present() && !dbias_is_of_one(p))
        plan.dbias_accum_size =
            (p.cu_seqlens_q != nullptr ? p.total_q : p.dbias.batches * p.seqlen_q) * p.dbias.heads * p.seqlen_k;
    plan.dbias_accum = take_floats(layout, plan.dbias_accum_size);
    const int64_t num_m_blocks = ceil_div<int64_t>(p.seqlen_q, std::min<int64_t>(block_rows, p.lists.tile_rows));
    if (p.deterministic) plan.progress_counters = take_ints(layout, p.batch * p.heads * num_m_blocks + 1);
    plan.zeroed_bytes = layout.bytes;
}

}  // namespace

void plan_bwd(const BwdParams& p, BwdPlan& plan, WorkspaceLayout& layout) {
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    FLASH_DMATTN_SM80_BWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    require_built("backward", p, plan.head_dim);
    plan.small_tiles = has_little_shared_memory(current_device().code);
    p.lists.present() ? plan_lists(p, plan, layout) : plan_tiles(p, plan, layout);
}

void run_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream) {
#define FLASH_DMATTN_RUN(T, kHeadDim)                                                 \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args))                       \
        return args.lists.present() ? run_gather_bwd<T, kHeadDim>(args, plan, stream) \
                                    : run_bwd<T, kHeadDim>(args, plan, stream);
    FLASH_DMATTN_SM80_BWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn::cuda::sm80
