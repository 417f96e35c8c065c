// Summarizes the intervals of each block of 64 keys.
#include <climits>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/api.h"
#include "cuda/common/launch.h"
#include "cuda/mask/intervals.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// One warp per block, two keys per lane.
__global__ void __launch_bounds__(kThreads)
    summarize_intervals_kernel(const __grid_constant__ AttentionParams p,
                               const __grid_constant__ IntervalSummaries summaries, int32_t* tile_count_semaphore) {
    grid_dependency_sync();
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + warp_id();
    if (index == 0 && lane_id() == 0 && tile_count_semaphore != nullptr) *tile_count_semaphore = 0;
    if (index >= summaries.size) return;
    const int first_key = static_cast<int>(index % summaries.num_n_blocks) * IntervalBlockSummary::kKeys;
    const int head = static_cast<int>(index / summaries.num_n_blocks % p.intervals.heads);
    const Sequence s(p, static_cast<int>(index / summaries.num_n_blocks / p.intervals.heads));
    const int64_t offset = interval_offset(p.intervals, s, head, p.intervals.heads);

    IntervalBlockSummary block{INT_MAX, 0, INT_MAX, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = first_key + half * 32 + lane_id();
        const bool exists = key < s.keys;
        const RowRange rows = exists ? rows_of_key(p, s, offset, key) : RowRange{0, 0};
        const uint64_t visible = __ballot_sync(~0u, !rows.empty());
        block.visible_keys |= visible << half * 32;
        if (!exists) continue;  // padding keys do not make a block mixed
        if (rows.empty()) {
            block.last_begin = INT_MAX;
        } else {
            block.first_begin = min(block.first_begin, rows.begin);
            block.last_begin = max(block.last_begin, rows.begin);
            block.last_end = max(block.last_end, rows.end);
        }
        block.first_end = min(block.first_end, rows.end);
    }
    block.first_begin = __reduce_min_sync(~0u, block.first_begin);
    block.last_begin = __reduce_max_sync(~0u, block.last_begin);
    block.first_end = __reduce_min_sync(~0u, block.first_end);
    block.last_end = __reduce_max_sync(~0u, block.last_end);
    if (lane_id() == 0) summaries.blocks[index] = block;
}

}  // namespace
}  // namespace cuda

IntervalSummaries plan_interval_summaries(const AttentionParams& params) {
    const IntervalView& intervals = params.intervals;
    // Summaries include causality and lengths, which may differ between batch elements.
    const bool own_lengths = params.cu_seqlens_q != nullptr || params.seqused_k != nullptr;
    const int64_t batches = own_lengths ? params.batch : intervals.batches;
    IntervalSummaries summaries;
    summaries.num_n_blocks = cuda::ceil_div(params.seqlen_k, IntervalBlockSummary::kKeys);
    summaries.batch_stride = batches == 1 ? 0 : intervals.heads * summaries.num_n_blocks;
    summaries.size = batches * intervals.heads * summaries.num_n_blocks;
    return summaries;
}

void summarize_intervals_cuda(const AttentionParams& params, const IntervalSummaries& summaries,
                              int32_t* tile_count_semaphore, cudaStream_t stream) {
    using namespace cuda;
    if (summaries.size == 0) return;
    const int64_t num_ctas = ceil_div<int64_t>(summaries.size, kThreads / 32);
    launch(summarize_intervals_kernel, {grid_of(num_ctas), kThreads}, stream, params, summaries, tile_count_semaphore);
}

}  // namespace flash_dmattn
