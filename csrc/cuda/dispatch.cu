// Which generation's kernels serve a call, and what all of them have in common: the workspace and the small passes.
#include "api.h"

#include <cstdlib>
#include <string_view>

#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "cuda/preprocess/clear.h"
#include "cuda/postprocess/convert.h"
#include "cuda/preprocess/delta.h"
#include "cuda/sm80/bwd/plan.h"
#include "cuda/sm80/fwd/plan.h"
#include "cuda/sm90/bwd/plan.h"
#include "cuda/sm90/fwd/plan.h"

namespace flash_dmattn::cuda {
namespace {

// Whether the kernels for 9.0 shall serve a call where they can. FLASH_DMATTN_ARCH, for tests and comparisons, names a
// generation: sm80, or sm90 even where it does not pay.
bool prefers_sm90(bool pays) {
    if (current_device().capability != 90) return false;
    const char* named = std::getenv("FLASH_DMATTN_ARCH");
    const std::string_view arch = named == nullptr ? "" : named;
    return arch == "sm90" || (pays && arch != "sm80");
}

bool nothing_to_do(const AttentionParams& p) { return p.batch == 0 || p.heads == 0; }

}  // namespace

FwdPlan plan_fwd(const FwdParams& p) {
    FwdPlan plan;
    if (nothing_to_do(p) || p.seqlen_q == 0) return plan;
    if (prefers_sm90(sm90::should_use_fwd(p)) && sm90::plan_fwd(p, plan)) {
        plan.arch = Arch::kSm90;
        return plan;
    }
    sm80::plan_fwd(p, plan);
    if (plan.num_splits == 1) return plan;
    WorkspaceLayout layout;
    const int64_t numbers = plan.num_splits * p.batch * p.heads * p.seqlen_q;
    plan.split_counters = layout.take(plan.num_split_tiles * sizeof(int32_t));
    plan.split_out = layout.take(numbers * p.head_dim * sizeof(float));
    plan.split_lse = layout.take(numbers * sizeof(float));
    plan.workspace_bytes = layout.bytes;
    return plan;
}

void run_fwd(const FwdParams& p, const FwdPlan& plan, void* workspace, cudaStream_t stream) {
    if (plan.head_dim == 0) return;
    FwdArgs args{p};
    args.num_splits = plan.num_splits;
    args.split_counters = plan.split_counters.in<int32_t>(workspace);
    args.split_out = plan.split_out.in<float>(workspace);
    args.split_lse = plan.split_lse.in<float>(workspace);
    if (plan.num_splits > 1)
        FLASH_CUDA_CHECK(cudaMemsetAsync(args.split_counters, 0, plan.split_counters.bytes, stream));
    switch (plan.arch) {
        case Arch::kSm80: sm80::run_fwd(args, plan, stream); break;
        case Arch::kSm90: sm90::run_fwd(args, plan, stream); break;
    }
}

BwdPlan plan_bwd(const BwdParams& p) {
    BwdPlan plan;
    if (nothing_to_do(p)) return plan;
    WorkspaceLayout layout;
    if (prefers_sm90(sm90::should_use_bwd(p)) && sm90::plan_bwd(p, plan, layout)) {
        plan.arch = Arch::kSm90;
    } else {
        sm80::plan_bwd(p, plan, layout);
    }
    plan.delta_rows = p.cu_seqlens_q == nullptr ? p.seqlen_q : p.total_q;
    plan.delta = layout.take((p.cu_seqlens_q == nullptr ? p.batch : 1) * p.heads * plan.delta_rows * sizeof(float));
    plan.workspace_bytes = layout.bytes;
    return plan;
}

void run_bwd(const BwdParams& p, const BwdPlan& plan, void* workspace, cudaStream_t stream) {
    if (plan.head_dim == 0) return;
    BwdArgs args{p, plan};
    const int64_t rows = plan.delta_rows;
    args.delta = {plan.delta.in<float>(workspace), p.cu_seqlens_q == nullptr ? p.heads * rows : 0, rows};
    args.dquery_accum = plan.dquery_accum.in<float>(workspace);
    args.dquery_semaphore = plan.dquery_semaphore.in<int32_t>(workspace);
    args.dbias_parts = plan.dbias_parts.in<float>(workspace);
    args.dkv_accum = plan.dkv_accum.in<float>(workspace);
    args.dbias_accum = plan.dbias_accum.in<float>(workspace);
    args.progress_counters = plan.progress_counters.in<int32_t>(workspace);
    clear(args, workspace, plan.zeroed_bytes, stream);
    if (!plan.pair) compute_delta(args, stream);  // those kernels find it themselves
    switch (plan.arch) {
        case Arch::kSm80: sm80::run_bwd(args, plan, stream); break;
        case Arch::kSm90: sm90::run_bwd(args, plan, stream); break;
    }
    convert_sums(args, stream);
}

}  // namespace flash_dmattn::cuda
