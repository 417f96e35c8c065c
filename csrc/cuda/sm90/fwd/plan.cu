// Plans the sm90 forward: which kernels support a call, and which calls they serve faster than sm80's.
#include "plan.h"

#include "cuda/arch/tensor_map.h"
#include "cuda/common/kernel_table.h"
#include "cuda/sm90/pair_bias/config.h"
#include "cuda/sm90/pair_bias/run.h"
#include "cuda/sm90/relative_bias.h"
#include "kernels.h"  // generated

namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr int64_t kMinRows = 65;  // fewer rows are faster with sm80's small tiles

using Launcher = void (*)(const FwdArgs&, cudaStream_t);
const KernelTable<Launcher> kKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM90_FWD_KERNELS, run_fwd));
const KernelTable<Launcher> kPairBiasKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS,
                                                                    run_pair_bias_fwd));

bool can_load(const FwdParams& p) { return is_tma_compatible(query_layout(p, p.query)) && can_load_keys(p); }

// A list for the rows of one consumer warpgroup needs two query heads that share it, one for each warpgroup.
bool supports_lists(const FwdParams& p) {
    return has_list_kernel(p.head_dim) &&
           (p.lists.m_block_rows == KeyListsView::kRows || (p.heads / p.kv_heads % 2 == 0 && heads_share_keys(p)));
}

bool is_pair_bias(const FwdParams& p) { return is_pair_bias_problem(p) && p.seqlen_k <= pair_bias_fwd_max_seqlen_k(p); }

}  // namespace

bool should_use_fwd(const FwdParams& params) {
    const FwdParams p = with_dense_bias(params);
    if (p.lists.present()) return true;
    if (is_pair_bias(p)) return should_use_pair_bias_fwd(p);
    const bool has_own_bias = p.bias.present() && p.bias.batches == p.batch;
    if (p.head_dim <= 32) return p.seqlen_k >= (has_own_bias ? 512 : 4096);
    return p.seqlen_k >= (p.head_dim <= 64 ? 512 : 128);
}

bool plan_fwd(const FwdParams& params, FwdPlan& plan) {
    const FwdParams p = with_dense_bias(params);
    if (p.seqlen_q < kMinRows || p.seqlen_k == 0 || !can_load(p)) return false;
    if (p.relative_bias.present() && !supports_relative_bias(p)) return false;
    if (p.lists.present() && !supports_lists(p)) return false;
    const auto* kernel = is_pair_bias(p) ? kPairBiasKernels.find(p) : nullptr;
    if (kernel == nullptr && !has_float32_bias(p)) kernel = kKernels.find(p);
    if (kernel == nullptr) return false;
    plan.launch = kernel->value;
    return true;
}

}  // namespace flash_dmattn::cuda::sm90
