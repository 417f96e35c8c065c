// Plans the sm80 backward: the kernels, who writes the gradient of a dense bias, and the workspace.
#include "plan.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/kernel_table.h"
#include "cuda/sm80/bias_matrix.h"
#include "cuda/sm80/short_bwd/config.h"
#include "kernel.cuh"
#include "kernels.h"  // generated

namespace flash_dmattn::cuda::sm80 {
namespace {

// Whether every entry of a dense bias belongs to one batch element and one query head: no sum over either is needed.
bool is_unshared_dbias(const BwdParams& p) {
    return p.dbias.heads == p.heads && (p.cu_seqlens_q != nullptr || p.dbias.batches == p.batch);
}

// Whether a cluster of `batch_group_size` CTAs can reduce dx.
template <typename Traits>
bool can_cluster_reduce_among(int64_t batch_group_size) {
    return kCanClusterReduce<Traits> && DsmemReduction<Traits>::can_divide(batch_group_size);
}

struct Kernels {
    using Launcher = void (*)(const BwdArgs&, bool, cudaStream_t);
    Launcher launch, launch_gather;
    bool (*can_cluster_reduce_among)(int64_t batch_group_size);
};
const KernelTable<Kernels> kKernels(FLASH_DMATTN_INSTANCES(FLASH_DMATTN_SM80_BWD_KERNELS), [](auto kernel) {
    using T = typename decltype(kernel)::T;
    constexpr int kHeadDim = decltype(kernel)::kHeadDim;
    return Kernels{run_bwd<T, kHeadDim>, run_gather_bwd<T, kHeadDim>,
                   can_cluster_reduce_among<BwdKernelTraits<kHeadDim, T, false>>};
});
using KernelEntry = KernelTable<Kernels>::Entry;
const KernelTable<Kernels::Launcher> kShortKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM80_SHORT_BWD_KERNELS,
                                                                          run_short_bwd));

// The number of CTAs, at most `max_splits`, among which the batch elements and heads of each dbias tile are split, so
// that the CTAs fill 2 to 4 waves of `slots` as evenly as possible.
int64_t splits_that_fill_waves(int64_t tiles, int64_t slots, int64_t max_splits) {
    int64_t best = 1;
    double best_filled = 0;
    for (int64_t waves = 2; waves <= 4; ++waves) {
        const int64_t splits = std::max<int64_t>(std::min(waves * slots / tiles, max_splits), 1);
        const double filled = static_cast<double>(splits * tiles) / (ceil_div(splits * tiles, slots) * slots);
        if (filled > best_filled + 0.01) {
            best = splits;
            best_filled = filled;
        }
    }
    return best;
}

// kRecompute: a CTA has a run of n_blocks, as long as all SMs have CTAs. Where there are too few tiles for that, the
// batch elements and heads that share a tile are split.
void plan_dbias_kernel(const BwdParams& p, const BwdTileSizes& tile, BwdPlan& plan) {
    constexpr int64_t kWaves = 2, kMaxRun = 16;
    plan.dbias_tiles = count_dbias_tiles(p, tile.rows, tile.keys);
    if (plan.dbias_tiles == 0) return;
    const int64_t slots = current_device().num_sms * tile.ctas_per_sm;
    if (plan.dbias_tiles < kWaves * slots)
        plan.dbias_splits = splits_that_fill_waves(plan.dbias_tiles, slots, count_contributors(p));
    const int64_t num_n_blocks = ceil_div<int64_t>(p.seqlen_k, tile.keys);
    plan.dbias_run = std::clamp<int64_t>(plan.dbias_tiles / (kWaves * slots), 1, std::min(kMaxRun, num_n_blocks));
}

// Atomic additions are cheap while the L2 cache holds the sums. It need not hold those of all batch elements: CTAs
// start in batch order, and where many batch elements share a bias, few biases are in use at once.
bool can_add_in_cache(const BwdParams& p, const BwdTileSizes& tile, int64_t bytes) {
    if (bytes == 0) return true;
    const int64_t l2_bytes = current_device().l2_bytes;
    const int64_t biases = p.cu_seqlens_q == nullptr ? p.dbias.batches : 1;
    const int64_t bias_ctas = p.dbias.batch_group_size * p.kv_heads * ceil_div<int64_t>(p.seqlen_k, tile.keys);
    const int64_t slots = current_device().num_sms * tile.ctas_per_sm;
    const int64_t biases_at_once = std::min(biases, 1 + slots / bias_ctas);
    constexpr int64_t kMaxCaches = 4;  // limits the workspace: the sums of all biases take at most this many L2 caches
    return bytes / biases * biases_at_once <= l2_bytes / 2 && bytes <= kMaxCaches * l2_bytes;
}

// Whether the CTAs of the batch elements that share a bias can form a cluster and reduce dx.
bool can_cluster_reduce(const BwdParams& p, const KernelEntry& kernel, bool small_tiles) {
    // The CTAs of a cluster visit the same blocks: all sequences have one length.
    const bool batches_share = p.dbias.heads == p.heads && p.cu_seqlens_q == nullptr;
    // Code for devices without clusters has the small tiles.
    return batches_share && !small_tiles && kernel.value.can_cluster_reduce_among(p.dbias.batch_group_size);
}

// Selects which kernel writes the gradient of a dense bias. Returns the number of floats in dbias_partials.
int64_t plan_dense_dbias(const BwdParams& p, const KernelEntry& kernel, bool small_tiles, BwdPlan& plan) {
    if (is_unshared_dbias(p)) {
        plan.dense_dbias = DenseDbias::kDirect;
        return 0;
    }
    // The main kernel adds in no fixed order, and with a softcap computes dx in a round of its own.
    if (p.softcap == 0 && !p.deterministic) {
        if (can_cluster_reduce(p, kernel, small_tiles)) {
            plan.dense_dbias = DenseDbias::kClusterReduce;
            return 0;
        }
        const BwdTileSizes tile = bwd_tile_sizes(kernel.head_dim, small_tiles);
        plan.dbias_tiles = count_dbias_tiles(p, tile.rows, tile.keys);
        const int64_t sums = plan.dbias_tiles * tile.rows * tile.keys;
        if (can_add_in_cache(p, tile, sums * static_cast<int64_t>(sizeof(float)))) {
            plan.dense_dbias = DenseDbias::kAtomic;
            return sums;
        }
    }
    const BwdTileSizes tile = dbias_tile_sizes(kernel.head_dim);
    plan.dense_dbias = DenseDbias::kRecompute;
    plan_dbias_kernel(p, tile, plan);
    return plan.dbias_splits > 1 ? plan.dbias_splits * plan.dbias_tiles * tile.rows * tile.keys : 0;
}

void plan_dense(const BwdParams& p, const KernelEntry& kernel, bool small_tiles, BwdPlan& plan) {
    const BwdTileSizes tile = bwd_tile_sizes(kernel.head_dim, small_tiles);
    plan.dquery_m_blocks = count_dquery_m_blocks(p, tile.rows);
    const int64_t num_m_blocks = total_dquery_m_blocks(p, plan);
    plan.dquery_accum = plan.allocate<float>(num_m_blocks * tile.rows * kernel.head_dim);
    if (p.deterministic) {
        plan.dquery_semaphores = plan.allocate<int32_t>(num_m_blocks);
        plan.tile_count_semaphore = plan.allocate<int32_t>(1);
    }
    plan.zeroed_bytes = plan.workspace_bytes;
    if (p.bias.kind != BiasKind::kDense || !p.dbias.present()) return;
    plan.dbias_partials = plan.allocate<float>(plan_dense_dbias(p, kernel, small_tiles, plan));
    if (plan.dense_dbias == DenseDbias::kAtomic) plan.zeroed_bytes = plan.workspace_bytes;
}

// Whether two heads that share a list, which covers half of a CTA's rows, can share the CTA.
bool can_have_two_heads(const BwdParams& p, int m_block_rows) {
    return p.lists.num_m_blocks > 1 && p.lists.m_block_rows * 2 == m_block_rows && p.heads / p.kv_heads % 2 == 0 &&
           p.bias.kind != BiasKind::kDense && heads_share_keys(p);
}

void plan_gather(const BwdParams& p, const KernelEntry& kernel, bool small_tiles, BwdPlan& plan) {
    const int m_block_rows = gather_tile_sizes(kernel.head_dim, small_tiles).rows;
    if (can_have_two_heads(p, m_block_rows)) plan.qheads_per_tile = 2;
    plan.dkv_rows = p.total_k;
    plan.dkv_cols = kernel.head_dim;
    plan.dkv_accum = plan.allocate<float>(2 * plan.dkv_rows * p.kv_heads * plan.dkv_cols);
    if (p.bias.kind == BiasKind::kDense && p.dbias.present() && !is_unshared_dbias(p))
        plan.dbias_accum_size =
            (p.cu_seqlens_q != nullptr ? p.total_q : p.dbias.batches * p.seqlen_q) * p.dbias.heads * p.seqlen_k;
    plan.dbias_accum = plan.allocate<float>(plan.dbias_accum_size);
    const int64_t num_m_blocks = ceil_div<int64_t>(p.seqlen_q, std::min<int64_t>(m_block_rows, p.lists.m_block_rows));
    if (p.deterministic) {
        plan.progress_counters = plan.allocate<int32_t>(p.batch * p.heads * num_m_blocks);
        plan.tile_count_semaphore = plan.allocate<int32_t>(1);
    }
    plan.zeroed_bytes = plan.workspace_bytes;
}

// Each gradient has an owner: nothing is summed in the workspace.
Kernels::Launcher plan_short(const BwdParams& p, BwdPlan& plan) {
    if (!has_short_kernel(p)) return nullptr;
    plan.has_preprocess = false;
    return kShortKernels.find(p)->value;
}

}  // namespace

bool has_short_kernel(const BwdParams& p) { return is_short(p) && kShortKernels.find(p) != nullptr; }

bool plan_bwd(const BwdParams& p, BwdPlan& plan) {
    const bool small_tiles = uses_small_tiles(current_device().cuda_arch);
    Kernels::Launcher launch = plan_short(p, plan);
    if (launch == nullptr) {
        const KernelEntry* const kernel = kKernels.find(p);
        if (kernel == nullptr) return false;
        report_bias_matrix(p);
        p.lists.present() ? plan_gather(p, *kernel, small_tiles, plan) : plan_dense(p, *kernel, small_tiles, plan);
        launch = p.lists.present() ? kernel->value.launch_gather : kernel->value.launch;
    }
    plan.launch = [launch, small_tiles](const BwdArgs& args, cudaStream_t stream) {
        launch(args, small_tiles, stream);
    };
    return true;
}

}  // namespace flash_dmattn::cuda::sm80
