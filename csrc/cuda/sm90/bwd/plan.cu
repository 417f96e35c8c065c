// Plans the sm90 backward: which kernels support a call, which calls they serve faster than sm80's, and the workspace.
#include "plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/arch/tensor_map.h"
#include "cuda/common/device.h"
#include "cuda/common/kernel_table.h"
#include "cuda/common/packed_blocks.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/sm80/bwd/plan.h"
#include "cuda/sm90/dbias/kernel_traits.h"
#include "cuda/sm90/pair_bias/config.h"
#include "cuda/sm90/pair_bias/run.h"
#include "cuda/sm90/relative_bias.h"
#include "cuda/sm90/splits.h"
#include "cuda/sm90/tile_sizes.h"
#include "kernels.h"  // generated
#include "tile_scheduler.cuh"
#include "workspace.cuh"

namespace flash_dmattn::cuda::sm90 {
namespace {

using Launcher = void (*)(const BwdArgs&, cudaStream_t);
using DenseLauncher = void (*)(const BwdArgs&, int rows, cudaStream_t);  // rows: of an m_block
const KernelTable<DenseLauncher> kKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM90_BWD_KERNELS, run_bwd));
const KernelTable<Launcher> kSparseKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM90_SPARSE_BWD_KERNELS,
                                                                  run_sparse_bwd));
const KernelTable<Launcher> kPairBiasKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS,
                                                                    run_pair_bias_bwd));

bool can_load(const BwdParams& p) {
    return is_tma_compatible(query_layout(p, p.query)) && is_tma_compatible(query_layout(p, p.dout)) &&
           can_load_keys(p);
}

// Whether TMA can store tiles of the gradient of a dense bias: heads share no entry, and a tile that reaches beyond its
// sequence does not reach into another. All batch elements then have the same n_blocks: none waits for a CTA without
// work.
bool can_store_dense_dbias(const BwdParams& p) {
    return p.dbias.heads == p.heads && p.cu_seqlens_q == nullptr && is_tma_compatible(dense_bias_layout(p, p.dbias));
}

// Which kernel writes the gradient of a dense bias; kNone where none can.
DenseDbias plan_dense_dbias(const BwdParams& p) {
    if (can_store_dense_dbias(p) && p.softcap == 0) {  // with a softcap, the main kernel's ds differs from dx
        if (p.dbias.batches == p.batch) return DenseDbias::kDirect;
        // Each addition rounds to the bias's dtype: the error grows with the number of addends.
        constexpr int64_t kMaxAddends = 8;
        if (p.dbias.batch_group_size <= kMaxAddends) return DenseDbias::kSerialReduce;
    }
    // The recompute kernel stores 16 bytes at once. The stride of a single row does not count for TMA.
    const bool is_aligned = is_tma_compatible(dense_bias_layout(p, p.dbias)) && p.dbias.row_stride % 8 == 0;
    const bool fits_grid = count_dbias_tiles(p, kDbiasRows, kMinDbiasKeys) <= INT32_MAX;
    // With one contributor sm80's main kernel stores dx, and no second kernel runs: faster up to head dimension 64, and
    // where most packed sequences are short, since this kernel's grid has the tiles of the longest one for each.
    const bool is_faster = count_contributors(p) > 1 || (p.head_dim > 64 && !packs_m_blocks(p, kDbiasRows));
    return is_faster && is_aligned && fits_grid ? DenseDbias::kRecompute : DenseDbias::kNone;
}

// head_dim: the kernel's.
void plan_recompute_dbias(const BwdParams& p, int head_dim, BwdPlan& plan) {
    constexpr int64_t kMaxWaves = 16;
    const int keys = dbias_keys(head_dim);
    plan.dbias_tiles = count_dbias_tiles(p, kDbiasRows, keys);
    plan.dbias_splits = choose_splits(plan.dbias_tiles, count_contributors(p), kMaxWaves);
    const int64_t partial_tiles = plan.dbias_splits > 1 ? plan.dbias_splits * plan.dbias_tiles : 0;
    plan.dbias_partials = plan.allocate<float>(partial_tiles * kDbiasRows * keys);
}

// Whether the pair bias kernels can store dbias, by ordinary stores: a float32 one is contiguous.
bool can_store_pair_dbias(const BwdParams& p) {
    if (!p.dbias.present()) return true;
    return has_float32_bias(p) ? p.dbias.heads == p.heads : can_store_dense_dbias(p);
}

// Heads must share neither keys nor, where dbias is needed, biases.
bool is_pair_bias(const BwdParams& p) {
    return is_pair_bias_problem(p) && p.seqlen_q <= kPairBiasBwdMaxSeqlen && p.seqlen_k <= kPairBiasBwdMaxSeqlen &&
           p.kv_heads == p.heads && is_tma_compatible(query_layout(p, p.out)) && can_store_pair_dbias(p);
}

// Each gradient has an owner; only dbias is summed over splits in the workspace.
bool plan_pair_bias(const BwdParams& p, BwdPlan& plan) {
    const auto* const kernel = kPairBiasKernels.find(p);
    if (kernel == nullptr) return false;
    plan.launch = kernel->value;
    plan.has_preprocess = false;
    plan.adds_drelative_bias = false;
    plan.dbias_tiles = pair_bias_dq_m_blocks(p);
    plan.dbias_splits = choose_splits(plan.dbias_tiles, p.bias.batch_group_size);
    const int64_t blocks = p.dbias.present() ? plan.dbias_splits * plan.dbias_tiles * pair_bias_dq_n_blocks(p) : 0;
    plan.dbias_partials = plan.allocate<float>(blocks * kPairBiasDbiasBlockSize);
    return true;
}

// The two kernels over key lists: per head, and grouped, where a CTA has all query heads of a GQA group, which must
// share keys. Where both support a call, long lists that heads share are faster grouped, as measured on an H200.
bool supports_per_head(const BwdParams& p, int head_dim) {
    return p.lists.m_block_rows == KeyListsView::kRows && can_run_per_head(head_dim);
}
bool should_group_heads(const BwdParams& p, int head_dim) {
    if (!heads_share_keys(p)) return false;
    return !supports_per_head(p, head_dim) || (p.heads > p.kv_heads && estimated_list_length(p) >= 512);
}

// Splits each list among CTAs, so many that they fill the device, and that Q, dO and the sums of dQ, which all m_blocks
// in progress read and write for every n_block, stay in the L2 cache.
void plan_grouped(const BwdParams& p, int head_dim, BwdPlan& plan) {
    constexpr double kShareOfCache = 0.4;
    const Device& device = current_device();
    const int64_t rows = grouped_block_m(p), num_m_blocks = total_m_blocks(p, rows) * p.kv_heads;
    const int64_t block_size = p.heads / p.kv_heads * rows * head_dim;  // elements of Q of an m_block
    const double bytes = static_cast<double>(device.num_sms * block_size) * (2 * kElementBytes + sizeof(float));
    const auto for_cache =
        static_cast<int64_t>(std::ceil(bytes / (kShareOfCache * static_cast<double>(device.l2_bytes))));
    const int64_t for_device = ceil_div<int64_t>(device.num_sms, num_m_blocks);
    const int64_t num_n_blocks = ceil_div<int64_t>(estimated_list_length(p), grouped_block_n(head_dim));
    plan.list_splits = std::min(std::max(for_cache, for_device), num_n_blocks);
    // Twice as many slots as m_blocks in progress, so that no CTA waits for the last split of another m_block.
    plan.dquery_slots = std::min(2 * ceil_div<int64_t>(device.num_sms, plan.list_splits), num_m_blocks);
    plan.dquery_accum = plan.allocate<float>(plan.dquery_slots * block_size);
    plan.dquery_slot_states = plan.allocate<DquerySlotState>(plan.dquery_slots);
    plan.tile_count_semaphore = plan.allocate<int32_t>(1);
}

// Over key lists dK and dV are summed in the workspace.
bool plan_sparse(const BwdParams& p, BwdPlan& plan) {
    const auto* const kernel = kSparseKernels.find(p);
    if (kernel == nullptr || p.deterministic) return false;
    const bool grouped = should_group_heads(p, kernel->head_dim);
    if (!grouped && !supports_per_head(p, kernel->head_dim)) return false;
    plan.launch = kernel->value;
    plan.dkv_rows = p.total_k;
    plan.dkv_cols = kernel->head_dim;
    plan.dkv_accum = plan.allocate<float>(2 * plan.dkv_rows * p.kv_heads * plan.dkv_cols);
    if (grouped) plan_grouped(p, kernel->head_dim, plan);
    plan.zeroed_bytes = plan.workspace_bytes;
    return true;
}

// The sums of dQ take accum_size floats for all heads. With long sequences the KV heads are divided among launches that
// reuse one accumulator, while each launch still has about kMinWaves work tiles per SM.
int64_t plan_launches(const BwdParams& p, int64_t accum_size, int keys, DenseDbias dense_dbias) {
    constexpr int64_t kMaxBytesOfOneLaunch = 64 << 20, kBytesOfSeveral = 48 << 20, kMinWaves = 8;
    const int64_t bytes = accum_size * static_cast<int64_t>(sizeof(float));
    if (bytes <= kMaxBytesOfOneLaunch || dense_dbias == DenseDbias::kSerialReduce) return 1;
    const int64_t work_tiles =
        p.cu_seqlens_q == nullptr ? count_bwd_work_tiles(p, keys) : p.total_k / keys * p.kv_heads;
    const int64_t max_launches = work_tiles / (kMinWaves * current_device().num_sms);
    return std::max<int64_t>(std::min({ceil_div(bytes, kBytesOfSeveral), max_launches, count_launch_units(p)}), 1);
}

// Whether the tall tile is faster: less time for a row, but more rows beyond the sequence and above the diagonal.
bool should_use_tall_tile(const BwdParams& p, int head_dim) {
    if (!has_tall_bwd_tile(head_dim) || has_mask(p) || p.softcap != 0) return false;
    if (p.bias.kind == BiasKind::kDense || p.relative_bias.present()) return false;
    constexpr double kTimeOfRow = 0.95;  // of that with the other tile, as measured on an H200
    const auto [default_rows, keys] = bwd_tile_sizes(head_dim);
    const int64_t length = mean_seqlen_q(p);
    const auto rows_of_n_block = [&, keys = keys](int rows) {  // on average
        const int64_t all = ceil_div<int64_t>(length, rows) * rows;
        return static_cast<double>(p.is_causal ? all - length / 2 + (rows - std::gcd(rows, keys)) / 2 : all);
    };
    return rows_of_n_block(kTallBwdRows) * kTimeOfRow < rows_of_n_block(default_rows);
}

bool plan_dense(const BwdParams& p, BwdPlan& plan) {
    const auto* const kernel = kKernels.find(p);
    if (kernel == nullptr) return false;
    if (p.bias.kind == BiasKind::kDense && p.dbias.present()) {
        plan.dense_dbias = plan_dense_dbias(p);
        if (plan.dense_dbias == DenseDbias::kNone) return false;
    }
    auto [rows, keys] = bwd_tile_sizes(kernel->head_dim);
    if (should_use_tall_tile(p, kernel->head_dim)) rows = kTallBwdRows;
    plan.launch = [run = kernel->value, rows = rows](const BwdArgs& args, cudaStream_t stream) {
        run(args, rows, stream);
    };
    plan.dquery_m_blocks = count_dquery_m_blocks(p, rows);
    const int64_t num_m_blocks = total_dquery_m_blocks(p, plan);
    plan.num_launches = plan_launches(p, num_m_blocks * rows * kernel->head_dim, keys, plan.dense_dbias);
    const int64_t units = count_launch_units(p);
    const int64_t launch_m_blocks = num_m_blocks * ceil_div(units, plan.num_launches) / units;
    plan.dquery_accum = plan.allocate<float>(launch_m_blocks * rows * kernel->head_dim);
    const bool is_serial = plan.dense_dbias == DenseDbias::kSerialReduce;
    if (p.deterministic) plan.dquery_semaphores = plan.allocate<int32_t>(num_m_blocks * kBwdConsumerWarpgroups);
    if (is_serial) plan.progress_counters = plan.allocate<int32_t>(count_bwd_work_tiles(p, keys));
    // CTAs that take work tiles from a counter may wait for those of lower index: these have started.
    if (p.deterministic || is_serial) plan.tile_count_semaphore = plan.allocate<int32_t>(1);
    plan.zeroed_bytes = plan.workspace_bytes;
    if (plan.dense_dbias == DenseDbias::kRecompute) plan_recompute_dbias(p, kernel->head_dim, plan);
    return true;
}

}  // namespace

bool should_use_bwd(const BwdParams& params) {
    if (sm80::has_short_kernel(params)) return false;
    const BwdParams p = with_dense_bias(params);
    if (p.lists.present()) return p.head_dim > 128 ? p.seqlen_k >= 1024 : p.head_dim > 32;
    if (is_pair_bias(p)) return should_use_pair_bias_bwd(p);
    if (p.bias.kind == BiasKind::kDense && p.dbias.present()) {
        if (plan_dense_dbias(p) == DenseDbias::kRecompute) return p.seqlen_k >= (p.head_dim > 32 ? 192 : 128);
        if (p.dbias.batches < p.batch && p.head_dim <= 64) return p.seqlen_k >= 256;
    }
    return p.head_dim > 32 || p.seqlen_k >= (p.relative_bias.present() ? 128 : 256);
}

bool plan_bwd(const BwdParams& params, BwdPlan& plan) {
    const BwdParams p = with_dense_bias(params);
    if (p.seqlen_q == 0 || p.seqlen_k == 0 || !can_load(p)) return false;
    if (p.relative_bias.present() && !supports_relative_bias(p)) return false;
    if (p.lists.present()) return plan_sparse(p, plan);
    return (is_pair_bias(p) && plan_pair_bias(p, plan)) || (!has_float32_bias(p) && plan_dense(p, plan));
}

}  // namespace flash_dmattn::cuda::sm90
