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

// At least 1, also without keys.
int64_t kv_head_bytes(const FwdArgs& p) {
    return std::max<int64_t>(2 * mean_seqlen_k(p) * p.head_dim * kElementBytes, 1);
}

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

// Whether m_blocks differ by causality alone, as far as the host knows.
bool is_even(const FwdParams& p) { return p.cu_seqlens_q == nullptr && !mask_differs_by_row(p); }

// Whether all work tiles take the same time, as far as the host knows.
bool is_uniform(const FwdParams& p, bool gathers) { return gathers || (!p.is_causal && is_even(p)); }

// Whether a counter assigns the work tiles: each SM has several, and their lengths differ. The kernel that summarizes
// intervals zeros the counter of its calls.
bool should_schedule_dynamically(const FwdParams& p) {
    constexpr int64_t kRows = 128, kMinRounds = 4;
    if (is_uniform(p, p.lists.present()) || p.interval_summaries.present()) return false;
    return total_m_blocks(p, kRows) * p.heads >= kMinRounds * current_device().num_sms;
}

// Query rows that the busiest SM processes, in rows that see all keys, with m_blocks of `rows` rows. skipped: the cost of
// the rows of a warpgroup that skips an n_block, relative to those of one that does not; 1 if none skips.
double rows_of_busiest_sm(const FwdArgs& p, int rows, double skipped) {
    const auto cost = [&](double of_m_block, double of_warpgroups) {
        return skipped * of_m_block + (1 - skipped) * of_warpgroups;
    };
    const auto round_up = [&](int unit) { return static_cast<double>(ceil_div<int64_t>(p.seqlen_q, unit) * unit); };
    const bool has_lengths = p.cu_seqlens_q != nullptr && p.total_q < p.batch * p.seqlen_q;
    // The last m_block of a packed sequence is half full on average.
    const double all_rows = has_lengths ? p.total_q + p.batch * cost(rows, kWarpgroupRows) / 2
                                        : p.batch * cost(round_up(rows), round_up(kWarpgroupRows));
    const double rows_of_sm = all_rows * static_cast<double>(p.heads) / current_device().num_sms;
    if (is_uniform(p, false)) {
        const double m_blocks =
            p.batch * round_up(rows) / rows * static_cast<double>(p.heads) / current_device().num_sms;
        return std::ceil(m_blocks) * rows_of_sm / m_blocks;
    }
    const auto mean = [&](bool is_packed, int64_t total, int64_t fixed) {
        return is_packed ? static_cast<double>(total) / p.batch : static_cast<double>(fixed);
    };
    const double queries = mean(p.cu_seqlens_q != nullptr, p.total_q, p.seqlen_q);
    const double keys = mean(p.cu_seqlens_k != nullptr, p.total_k, p.seqlen_k);
    // The part of the keys that m_block 0 sees.
    const double first_keys = keys - queries + cost(rows, (rows + kWarpgroupRows) / 2.);
    const double part_of_first = p.is_causal ? std::clamp(first_keys / keys, 0., 1.) : 1;
    // Longest first: the SMs differ by about half an m_block, and one has an m_block that sees all keys.
    return std::max<double>(rows, rows_of_sm * (part_of_first + 1) / 2 + rows / 2);
}

}  // namespace

bool should_use_tall_tile(const FwdArgs& p, int head_dim, int rows, int tall_rows) {
    if (has_mask(p) && (!tall_fwd_tile_serves_masks(p.bias.kind) || mask_differs_by_row(p))) return false;
    // Static schedules balance packed sequences better with small work tiles. A bound on the keys above their total
    // comes with batch_invariant: other sequences may not decide.
    if (p.cu_seqlens_q != nullptr && (p.tile_count_semaphore == nullptr || p.seqlen_k > p.total_k)) return false;
    // Relative to the other tile, as measured on an H200: 0.88 to 0.91 at head dimension 128, 0.74 to 0.88 below, where
    // short packed sequences gain most.
    const double time_per_row = head_dim == 128 ? 0.885 : 0.8;
    const double skipped = tall_fwd_tile_serves_masks(p.bias.kind) ? 1 : 0.3;
    return rows_of_busiest_sm(p, tall_rows, skipped) * time_per_row < rows_of_busiest_sm(p, rows, 1);
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
    if (should_schedule_dynamically(p)) plan.tile_count_semaphore = plan.allocate<int32_t>(1);
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
    const bool uniform = is_uniform(p, gathers);
    constexpr unsigned kShort = 2048;
    // A persistent CTA loads the next Q during its epilogue. A static schedule fixes its work tiles in advance: it is
    // used only if they are equally long, or short, or if their lengths change evenly from the first to the last.
    const bool is_dynamic = !gathers && p.tile_count_semaphore != nullptr;
    const bool changes_evenly = !uniform && !is_dynamic && (p.seqlen_q <= kShort || (is_even(p) && is_near_cache(p)));
    const bool is_persistent = uniform || is_dynamic || changes_evenly;
    int64_t swizzle = scheduler.batch_first ? p.batch : 1;
    if (scheduler.packs_m_blocks || p.interval_summaries.present() || changes_evenly) {
        swizzle = pairs;
    } else if (p.is_causal && !uniform) {
        swizzle = pairs_in_cache(p, pairs);
    }
    scheduler.swizzle = FastDivmod(swizzle);
    const unsigned num_sms = current_device().num_sms;
    grid.num_ctas = is_persistent ? std::min(scheduler.num_work_tiles, num_sms) : scheduler.num_work_tiles;
    return grid;
}

}  // namespace flash_dmattn::cuda::sm90
