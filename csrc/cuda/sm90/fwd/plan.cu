// From params to a plan, and to the instantiation of their head dimension and dtype.
#include "plan.h"

#include "cuda/common/kernel_selection.h"
#include "kernels.h"  // generated: FLASH_DMATTN_SM90_FWD_KERNELS(X), X(T, head dimension) for what is built, .._PAIR_BIAS_..
#include "cuda/sm90/pair_bias/run.h"
#include "cuda/sm90/pair_bias/config.h"
#include "cuda/arch/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr int64_t kFewRows = 64;  // of which the tiles of a warp serve better

bool can_load(const FwdParams& p) { return can_map(query_layout(p, p.query)) && can_load_keys(p); }

// Where a list is for the rows of one warp group, the groups of a block have one head each.
bool can_share_lists(const FwdParams& p) {
    return p.lists.tile_rows == KeyListsView::kRows || (p.heads / p.kv_heads % 2 == 0 && heads_share_keys(p));
}

bool is_pair_bias(const FwdParams& p) { return is_pair_bias_problem(p) && p.seqlen_k <= kPairBiasFwdLongest; }

}  // namespace

bool should_use_fwd(const FwdParams& p) {
    if (p.lists.present()) return p.head_dim > 32;
    if (is_pair_bias(p)) return should_use_pair_bias_fwd(p);
    const bool has_own_bias = p.bias.present() && p.bias.batches == p.batch;
    if (p.head_dim <= 32) return p.seqlen_k >= (has_own_bias ? 512 : 4096);
    return p.seqlen_k >= (p.head_dim <= 64 ? 512 : 128);
}

bool plan_fwd(const FwdParams& p, FwdPlan& plan) {
    if (p.seqlen_q <= kFewRows || p.seqlen_k == 0 || !can_load(p)) return false;
    if (p.lists.present() && !can_share_lists(p)) return false;
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (plan.head_dim == 0 && serves<T, kHeadDim>(p)) plan.head_dim = kHeadDim;
    if (is_pair_bias(p)) {
        FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS(FLASH_DMATTN_MATCH)
        plan.pair = plan.head_dim != 0;
    }
    FLASH_DMATTN_SM90_FWD_KERNELS(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    return plan.head_dim != 0;
}

void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream) {
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.pair && serves<T, kHeadDim>(args)) return run_pair_bias_fwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (plan.head_dim == kHeadDim && serves<T, kHeadDim>(args)) return run_fwd<T, kHeadDim>(args, stream);
    FLASH_DMATTN_SM90_FWD_KERNELS(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn::cuda::sm90
