// Plans the sm80 forward: the kernels, the tile, pack-GQA and split-KV.
#include "plan.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/kernel_table.h"
#include "cuda/sm80/bias_matrix.h"
#include "kernel_traits.h"
#include "kernels.h"  // generated

namespace flash_dmattn::cuda::sm80 {
namespace {

constexpr int64_t kSmallRows = 64;

template <typename T, int kHeadDim>
void launch(const FwdArgs& args, const FwdTileChoice& choice, cudaStream_t stream) {
    if (args.lists.present()) return run_gather_fwd<T, kHeadDim>(args, choice, stream);
    if (choice.tile != FwdTileKind::kPrefill) return run_fwd_small<T, kHeadDim>(args, choice, stream);
    run_fwd<T, kHeadDim>(args, choice, stream);
}

using Launcher = void (*)(const FwdArgs&, const FwdTileChoice&, cudaStream_t);
const KernelTable<Launcher> kKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM80_FWD_KERNELS, launch));

// Query heads that share an m_block: those of a GQA group where they share keys. Packing is faster over key lists, and
// where rows are few: neighbouring rows see similar keys, and a dense n_block saves nothing.
int64_t plan_qheads_per_tile(const FwdParams& p) {
    const int64_t qheads_per_kv = p.heads / p.kv_heads;
    const bool packs = p.lists.present() || p.seqlen_q * qheads_per_kv <= kSmallRows;
    return packs && heads_share_keys(p) ? qheads_per_kv : 1;
}

FwdTileKind plan_tile(const FwdParams& p, int head_dim, int64_t qheads_per_tile) {
    const int64_t rows = p.seqlen_q * qheads_per_tile;
    if (rows <= decode_fwd_tile_sizes(head_dim).rows) return FwdTileKind::kDecode;
    if (rows <= kSmallRows) return FwdTileKind::kSmall;
    // The rows of a CTA belong to one list.
    const int64_t list_rows = p.lists.m_block_rows * qheads_per_tile;
    if (p.lists.present() && list_rows % prefill_fwd_tile_sizes(head_dim).rows != 0) return FwdTileKind::kSmall;
    return FwdTileKind::kPrefill;
}

// The number of splits that finishes first. Time is counted in n_blocks of one CTA; `slots` CTAs run at once.
int64_t plan_splits(const FwdParams& p, const FwdTileSizes& tile, int64_t num_m_blocks) {
    // A split for which a list has no keys left finishes at once.
    const int64_t num_n_blocks = ceil_div<int64_t>(estimated_list_length(p), tile.keys);
    const int64_t slots = current_device().num_sms * tile.ctas_per_sm;
    const auto time = [&](int64_t num_splits) {
        // Zeroing the counters and waiting for all splits take about two n_blocks, reading a split back a sixteenth.
        const double combine = num_splits == 1 ? 0 : 2 + num_splits / 16.;
        const int64_t waves = ceil_div(num_m_blocks * num_splits, slots);
        return static_cast<double>(waves * ceil_div(num_n_blocks, num_splits)) + combine;
    };
    const int64_t max_splits = std::min<int64_t>(num_n_blocks, FwdPlan::kMaxSplits);
    int64_t best = 1;
    for (int64_t num_splits = 2; num_splits <= max_splits; ++num_splits)
        if (time(num_splits) < 0.97 * time(best)) best = num_splits;  // more splits must save 3 %
    return best;
}

}  // namespace

bool plan_fwd(const FwdParams& p, FwdPlan& plan) {
    const auto* const kernel = kKernels.find(p);
    if (kernel == nullptr) return false;
    report_bias_matrix(p);
    FwdTileChoice choice;
    choice.qheads_per_tile = plan_qheads_per_tile(p);
    choice.tile = plan_tile(p, kernel->head_dim, choice.qheads_per_tile);
    plan.launch = [launch = kernel->value, choice](const FwdArgs& args, cudaStream_t stream) {
        launch(args, choice, stream);
    };

    const int64_t rows = p.seqlen_q * choice.qheads_per_tile;
    if (rows > kSmallRows) return true;
    const int64_t heads = p.batch * p.heads / choice.qheads_per_tile;  // with one m_block each
    plan.num_splits = plan_splits(p, fwd_tile_sizes(choice.tile, kernel->head_dim), heads);
    if (plan.num_splits == 1) return true;
    // kDecode has the smallest m_blocks. It also replaces kSmall where shared memory is short.
    const int64_t num_m_blocks = heads * ceil_div<int64_t>(rows, decode_fwd_tile_sizes(kernel->head_dim).rows);
    const int64_t split_rows = plan.num_splits * p.batch * p.heads * p.seqlen_q;
    plan.split_counters = plan.allocate<int32_t>(num_m_blocks);
    plan.split_out = plan.allocate<float>(split_rows * p.head_dim);
    plan.split_lse = plan.allocate<float>(split_rows);
    return true;
}

}  // namespace flash_dmattn::cuda::sm80
