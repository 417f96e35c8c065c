// From params to a plan, and to the instantiation of their head dimension and dtype.
#include "plan.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/kernel_selection.h"
#include "kernel_traits.h"
#include "kernels.h"  // generated: FLASH_DMATTN_SM80_FWD_KERNELS(X), X(T, head dimension) for what is built

namespace flash_dmattn::cuda::sm80 {
namespace {

constexpr int64_t kFewRows = 64;

// How many query heads share a tile.
int64_t heads_of_tile(const FwdParams& p) {
    const int64_t group = p.heads / p.kv_heads;
    // The fewer query rows a tile has, the more alike are the keys that they see; of a mask's tiles none is gained.
    return heads_share_keys(p) && (p.lists.present() || p.seqlen_q * group <= kFewRows) ? group : 1;
}

// Into how many parts the keys are cut, so that the blocks end early: in steps of a tile of keys that a block goes over,
// as many as a multiprocessor holds at once.
int64_t plan_splits(const FwdParams& p, const FwdPlan& plan, int64_t tiles) {
    const FwdTileSizes tile = fwd_tile_sizes(plan.tile, plan.head_dim);
    // How long each list is is known on the device alone; blocks for which a list has no tile left see nothing.
    const int64_t keys = p.lists.longest > 0 ? std::min(p.lists.longest, p.seqlen_k) : p.seqlen_k;
    const int64_t num_n_blocks = ceil_div<int64_t>(keys, tile.keys);
    const int64_t slots = current_device().num_sms * tile.blocks;
    const auto steps = [&](int64_t num_splits) {
        // To clear the tickets and to wait for all parts takes about two steps, to read a part back a sixteenth.
        const double to_combine = num_splits == 1 ? 0 : 2 + num_splits / 16.;
        return static_cast<double>(ceil_div(tiles * num_splits, slots) * ceil_div(num_n_blocks, num_splits)) +
               to_combine;
    };
    int64_t best = 1;
    for (int64_t num_splits = 2; num_splits <= std::min<int64_t>(num_n_blocks, FwdPlan::kMaxSplits); ++num_splits)
        if (steps(num_splits) < 0.97 * steps(best)) best = num_splits;  // more parts must be worth it
    return best;
}

}  // namespace

void plan_fwd(const FwdParams& p, FwdPlan& plan) {
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    FLASH_DMATTN_SM80_FWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    require_built("forward", p, plan.head_dim);
    plan.pack = heads_of_tile(p);
    const int64_t rows = p.seqlen_q * plan.pack;
    if (rows <= decode_fwd_tile_sizes(plan.head_dim).rows) {
        plan.tile = FwdTileKind::kDecode;
    } else if (rows <= kFewRows) {
        plan.tile = FwdTileKind::kSmall;
    } else if (p.lists.present() && p.lists.tile_rows * plan.pack % prefill_fwd_tile_sizes(plan.head_dim).rows != 0) {
        plan.tile = FwdTileKind::kSmall;  // a block's rows lie in one tile of lists
    }
    if (rows > kFewRows) return;
    const int64_t heads = p.batch * p.heads / plan.pack;
    plan.num_splits = plan_splits(p, plan, heads);  // of one tile each
    // Where shared memory is short, the smallest tile serves.
    plan.num_split_tiles = heads * ceil_div<int64_t>(rows, decode_fwd_tile_sizes(plan.head_dim).rows);
}

namespace {

template <typename T, int kHeadDim>
void run(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream) {
    if (args.lists.present()) return run_gather_fwd<T, kHeadDim>(args, plan, stream);
    if (plan.tile != FwdTileKind::kPrefill) return run_fwd_small<T, kHeadDim>(args, plan, stream);
    args.is_causal ? run_fwd<T, kHeadDim, true>(args, plan, stream) : run_fwd<T, kHeadDim, false>(args, plan, stream);
}

}  // namespace

void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream) {
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run<T, kHeadDim>(args, plan, stream);
    FLASH_DMATTN_SM80_FWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn::cuda::sm80
