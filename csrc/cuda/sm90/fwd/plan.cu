// Plans the sm90 forward: which kernels support a call, which calls they serve faster than sm80's, and the grid.
#include "plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/arch/tensor_map.h"
#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "cuda/common/kernel_table.h"
#include "cuda/common/packed_blocks.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/sm90/pair_bias/config.h"
#include "cuda/sm90/pair_bias/run.h"
#include "cuda/sm90/relative_bias.h"
#include "cuda/sm90/tile_sizes.h"
#include "kernels.h"  // generated

namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr int64_t kMinRows = 65;   // fewer rows are faster with sm80's small tiles
constexpr int64_t kMinKeys = 128;  // fewer keys are no slower with sm80's

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

int64_t kv_head_bytes(const FwdArgs& p) { return 2 * p.seqlen_k * p.head_dim * kElementBytes; }

// Whether it is no slower if the CTAs in progress read all K and V: these take at most twice the L2 cache. The CTAs of
// a head read the same keys at about the same time.
bool is_near_cache(const FwdArgs& p) {
    return p.batch * p.kv_heads * kv_head_bytes(p) <= 2 * current_device().l2_bytes;
}

// The largest divisor of the number of (head, batch) pairs whose K and V take at most half of the L2 cache.
int64_t pairs_in_cache(const FwdArgs& p, int64_t pairs) {
    const int64_t kv_heads = current_device().l2_bytes / 2 / kv_head_bytes(p);
    int64_t swizzle = std::clamp<int64_t>(kv_heads * (p.heads / p.kv_heads), 1, pairs);
    while (pairs % swizzle != 0) --swizzle;
    return swizzle;
}

// Query rows that the busiest SM processes, in rows that see all keys, with m_blocks of `rows` rows.
double rows_of_busiest_sm(const FwdArgs& p, int rows) {
    const double m_blocks = static_cast<double>(total_m_blocks(p, rows) * p.heads) / current_device().num_sms;
    if (!p.is_causal) return std::ceil(m_blocks) * rows;
    const auto mean = [&](bool is_packed, int64_t total, int64_t fixed) {
        return is_packed ? static_cast<double>(total) / p.batch : static_cast<double>(fixed);
    };
    const double queries = mean(p.cu_seqlens_q != nullptr, p.total_q, p.seqlen_q);
    const double keys = mean(p.cu_seqlens_k != nullptr, p.total_k, p.seqlen_k);
    const double keys_of_first = std::clamp((keys - queries + rows) / keys, 0., 1.);  // the part that m_block 0 sees
    // Longest first: the SMs differ by about half an m_block, and one has an m_block that sees all keys.
    return std::max<double>(rows, m_blocks * rows * (keys_of_first + 1) / 2 + rows / 2);
}

}  // namespace

bool should_use_tall_tile(const FwdArgs& p, int rows, int tall_rows) {
    if (has_mask(p) && (!tall_fwd_tile_serves_masks(p.bias.kind) || mask_differs_by_row(p))) return false;
    if (p.cu_seqlens_q != nullptr) {
        // Work tiles of short sequences differ much: many small ones are better balanced.
        constexpr int64_t kLongSequence = 2048;
        const bool is_long = p.total_q >= kLongSequence * p.batch;
        // A bound on the keys above their total comes with batch_invariant: other sequences may not decide.
        if (!is_long || p.seqlen_k > p.total_k) return false;
    }
    constexpr double kTimePerRow = 0.85;  // of that with the other tile, measured on an H200: 0.79 to 0.96
    return rows_of_busiest_sm(p, tall_rows) * kTimePerRow < rows_of_busiest_sm(p, rows);
}

bool should_use_fwd(const FwdParams& params) {
    const FwdParams p = with_dense_bias(params);
    if (p.lists.present()) return true;
    if (is_pair_bias(p)) return should_use_pair_bias_fwd(p);
    return p.seqlen_k >= kMinKeys;
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

FwdGrid plan_grid(const FwdArgs& p, int rows, int qheads_per_tile, bool gathers) {
    FwdGrid grid;
    FwdTileSchedulerParams& scheduler = grid.scheduler;
    const int64_t heads = p.heads / qheads_per_tile;
    scheduler.packs_m_blocks = packs_m_blocks(p, rows);
    const int64_t num_m_blocks = count_m_blocks(p, rows);
    const int64_t pairs = heads * (scheduler.packs_m_blocks ? 1 : p.batch);
    scheduler.num_work_tiles = grid_of(num_m_blocks * pairs);
    scheduler.num_m_blocks = FastDivmod(num_m_blocks);
    scheduler.tile_count_semaphore = p.tile_count_semaphore;
    scheduler.qheads_per_tile = qheads_per_tile;
    scheduler.batch_first = !scheduler.packs_m_blocks && orders_batch_first(p);
    scheduler.inner = FastDivmod(scheduler.batch_first ? p.batch : heads);
    // A persistent CTA loads the next Q during its epilogue. A static schedule fixes its work tiles in advance: it is
    // used only if these are short, their lengths change evenly, or a CTA has so many that they average out.
    const bool even = p.cu_seqlens_q == nullptr && !mask_differs_by_row(p);
    const bool uniform = gathers || (!p.is_causal && even);
    constexpr unsigned kShort = 2048, kManyRounds = 24;
    const unsigned num_sms = current_device().num_sms;
    const bool averages_out =
        scheduler.packs_m_blocks && !mask_differs_by_row(p) && scheduler.num_work_tiles >= kManyRounds * num_sms;
    const bool is_persistent =
        uniform || p.interval_summaries.present() || p.seqlen_q <= kShort || (even && is_near_cache(p)) || averages_out;
    int64_t swizzle = scheduler.batch_first ? p.batch : 1;
    if (scheduler.packs_m_blocks || (is_persistent && !uniform)) {
        swizzle = pairs;  // lengths change evenly from the first work tile to the last, if m_blocks are not packed
    } else if (p.is_causal && !uniform && p.cu_seqlens_q == nullptr) {
        swizzle = pairs_in_cache(p, pairs);
    }
    scheduler.swizzle = FastDivmod(swizzle);
    grid.num_ctas = is_persistent ? std::min(scheduler.num_work_tiles, num_sms) : scheduler.num_work_tiles;
    return grid;
}

}  // namespace flash_dmattn::cuda::sm90
