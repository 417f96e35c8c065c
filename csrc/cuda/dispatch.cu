// Selects the architecture of a call, and runs what all architectures share: the workspace, preprocess and postprocess.
#include "api.h"

#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cuda/architectures.h"
#include "cuda/arch/tensor_map.h"
#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "cuda/common/exact_sum.cuh"
#include "cuda/postprocess/convert.h"
#include "cuda/preprocess/bwd_preprocess.h"
#include "cuda/preprocess/visible_distances.h"
#include "cuda/sm90/decode/plan.h"
#include "cuda/softmax/relative_bias.cuh"
#include "fallback_log.h"

namespace flash_dmattn::cuda {
namespace {

// The architecture that FLASH_DMATTN_ARCH names, for tests and comparisons; null where it is not set.
const Architecture* named_architecture() {
    const char* name = std::getenv("FLASH_DMATTN_ARCH");
    if (name == nullptr || *name == 0) return nullptr;
    std::string known;
    for (const Architecture& architecture : kArchitectures) {
        if (std::string_view(name) == architecture.name) return &architecture;
        known += (known.empty() ? "" : " or ") + std::string(architecture.name);
    }
    throw std::runtime_error("FLASH_DMATTN_ARCH must be " + known + ", got " + name);
}

// For the log: why kernels that would be faster do not support a call, and what to change.
const char* why_unsupported(const AttentionParams& p) {
    const bool readable = is_tma_compatible(query_layout(p, p.query)) && can_load_keys(p);
    return p.lists.present() || readable
               ? "they do not support it (docs/kernels.md, \"Which kernels serve a call\")"
               : "TMA cannot read the strides: make the head dimension of query, key and value and the keys of a dense "
                 "bias contiguous, and all other strides multiples of 16 bytes that are not 0";
}

// Plans a call with the first architecture that runs on the device, is faster, and supports the call. A named one is
// used even where it is slower, and those above it are not.
template <typename Params, typename Plan>
void select_kernels(const char* what, Direction<Params, Plan> Architecture::* direction, const Params& p, Plan& plan) {
    const int capability = current_device().capability;
    const Architecture* const named = named_architecture();
    const char* skipped = nullptr;  // the first architecture that runs on the device and does not serve the call
    const char* reason = nullptr;
    bool runs = false;  // an architecture runs on the device
    for (auto* arch = named != nullptr ? named : std::begin(kArchitectures); arch != std::end(kArchitectures); ++arch) {
        const Direction<Params, Plan>& kernels = arch->*direction;
        if (!arch->runs_on(capability)) continue;
        runs = true;
        const bool faster = arch == named || kernels.should_use == nullptr || kernels.should_use(p);
        if (faster && kernels.plan(p, plan)) {
            if (skipped != nullptr && logs_fallbacks())
                log_fallback(std::string(what) + " on the " + arch->name + " kernels",
                             std::string("the ") + skipped + " kernels do not run this call: " + reason);
            return;
        }
        if (skipped == nullptr && logs_fallbacks()) {
            skipped = arch->name;
            reason = faster ? why_unsupported(p) : "they are not faster for these sizes";
        }
    }
    if (!runs)
        throw std::runtime_error("the CUDA kernels need compute capability 8.0 or newer, got " +
                                 std::to_string(capability / 10) + "." + std::to_string(capability % 10));
    throw std::runtime_error("no " + std::string(what) + " kernel was built for this dtype and head dimension " +
                             std::to_string(p.head_dim) + ": see FLASH_DMATTN_DTYPES and FLASH_DMATTN_HEAD_DIMS");
}

uint64_t inverse_grid_width(const AttentionParams& p) {
    constexpr uint64_t kOne = uint64_t{1} << 40;
    const auto width = static_cast<uint64_t>(p.relative_bias.grid_width);
    return width > 0 ? (kOne + width - 1) / width : 0;
}

}  // namespace

FwdPlan plan_fwd(const FwdParams& p) {
    FwdPlan plan;
    if (p.batch == 0 || p.heads == 0 || p.seqlen_q == 0) return plan;
    select_kernels("forward", &Architecture::fwd, p, plan);
    plan.visible_distances = plan.allocate<DistanceRange>(count_visible_distances(p));
    return plan;
}

void run_fwd(const FwdParams& p, const FwdPlan& plan, void* workspace, cudaStream_t stream) {
    if (!plan.launch) return;
    FwdArgs args{p};
    args.relative_bias.inverse_grid_width = inverse_grid_width(p);
    args.num_splits = plan.num_splits;
    args.split_counters = plan.split_counters.in<int32_t>(workspace);
    args.split_out = plan.split_out.in<float>(workspace);
    args.split_lse = plan.split_lse.in<float>(workspace);
    args.visible_distances = plan.visible_distances.in<DistanceRange>(workspace);
    find_visible_distances(args, args.visible_distances, stream);
    if (plan.num_splits > 1)
        FLASH_CUDA_CHECK(cudaMemsetAsync(args.split_counters, 0, plan.split_counters.bytes, stream));
    if (plan.tile_count_semaphore.bytes > 0) {
        args.tile_count_semaphore = plan.tile_count_semaphore.in<int32_t>(workspace);
        FLASH_CUDA_CHECK(cudaMemsetAsync(args.tile_count_semaphore, 0, plan.tile_count_semaphore.bytes, stream));
    }
    plan.launch(args, stream);
}

BwdPlan plan_bwd(const BwdParams& p) {
    BwdPlan plan;
    if (p.batch == 0 || p.heads == 0) return plan;
    select_kernels("backward", &Architecture::bwd, p, plan);
    plan.delta_rows = p.cu_seqlens_q == nullptr ? p.seqlen_q : p.total_q;
    plan.delta = plan.allocate<float>((p.cu_seqlens_q == nullptr ? p.batch : 1) * p.heads * plan.delta_rows);
    if (p.drelative_bias != nullptr && p.deterministic && plan.adds_drelative_bias)
        plan.drelative_bias_exact = plan.allocate<ExactSum>(relative_bias_elements(p));
    plan.visible_distances = plan.allocate<DistanceRange>(count_visible_distances(p));
    return plan;
}

void run_bwd(const BwdParams& p, const BwdPlan& plan, void* workspace, cudaStream_t stream) {
    if (!plan.launch) return;
    BwdArgs args{p, plan};
    args.relative_bias.inverse_grid_width = inverse_grid_width(p);
    const int64_t rows = plan.delta_rows;
    args.delta = {plan.delta.in<float>(workspace), p.cu_seqlens_q == nullptr ? p.heads * rows : 0, rows};
    args.dquery_accum = plan.dquery_accum.in<float>(workspace);
    args.dquery_semaphores = plan.dquery_semaphores.in<int32_t>(workspace);
    args.dquery_slot_states = plan.dquery_slot_states.in<DquerySlotState>(workspace);
    args.tile_count_semaphore = plan.tile_count_semaphore.in<int32_t>(workspace);
    args.progress_counters = plan.progress_counters.in<int32_t>(workspace);
    args.dbias_partials = plan.dbias_partials.in<float>(workspace);
    args.dbias_accum = plan.dbias_accum.in<float>(workspace);
    args.dkv_accum = plan.dkv_accum.in<float>(workspace);
    args.relative_bias_entries = p.relative_bias.size();
    args.drelative_bias_exact = plan.drelative_bias_exact.in<ExactSum>(workspace);
    args.visible_distances = plan.visible_distances.in<DistanceRange>(workspace);
    find_visible_distances(args, args.visible_distances, stream);
    if (args.drelative_bias_exact != nullptr)
        FLASH_CUDA_CHECK(cudaMemsetAsync(args.drelative_bias_exact, 0, plan.drelative_bias_exact.bytes, stream));
    if (plan.has_preprocess) preprocess_bwd(args, workspace, plan.zeroed_bytes, stream);
    plan.launch(args, stream);
    convert_sums(args, stream);
}

namespace {

// The first architecture is the only one with a decoding kernel.
bool has_decoding_kernel() {
    const Architecture* const first = std::begin(kArchitectures);
    const Architecture* const named = named_architecture();
    return (named == nullptr || named == first) && first->runs_on(current_device().capability);
}

}  // namespace

bool decode_kvcache(const KvCacheParams& params, bool skips_longer, cudaStream_t stream) {
    return has_decoding_kernel() && sm90::decode_kvcache(params, skips_longer, stream);
}

int64_t decodable_rows(const KvCacheParams& params) { return has_decoding_kernel() ? sm90::decodable_rows(params) : 0; }

}  // namespace flash_dmattn::cuda
