// Summarizes the intervals of each block of 64 keys.
#include <climits>

#include "cuda/api.h"
#include "cuda/common/check.h"
#include "cuda/mask/intervals.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// One warp per block, two keys per lane.
__global__ void __launch_bounds__(kThreads)
    summarize_intervals_kernel(const __grid_constant__ AttentionParams p,
                               const __grid_constant__ IntervalSummaries tiles) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + warp_id();
    if (index == 0 && lane_id() == 0) *tiles.tile_count_semaphore = 0;
    if (index >= tiles.size) return;
    const int first_key = static_cast<int>(index % tiles.num_n_blocks) * IntervalBlockSummary::kKeys;
    const int head = static_cast<int>(index / tiles.num_n_blocks % p.intervals.heads);
    const Sequence s(p, static_cast<int>(index / tiles.num_n_blocks / p.intervals.heads));
    const int64_t offset = interval_offset(p.intervals, s, head, p.intervals.heads);

    IntervalBlockSummary tile{INT_MAX, 0, INT_MAX, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = first_key + half * 32 + lane_id();
        const bool exists = key < s.keys;
        const RowRange rows = exists ? rows_of_key(p, s, offset, key) : RowRange{0, 0};
        const uint64_t seen = __ballot_sync(~0u, !rows.empty());
        tile.seen |= seen << half * 32;
        if (!exists) continue;  // padding keys do not make a block mixed
        if (rows.empty()) {
            tile.last_begin = INT_MAX;
        } else {
            tile.first_begin = min(tile.first_begin, rows.begin);
            tile.last_begin = max(tile.last_begin, rows.begin);
            tile.last_end = max(tile.last_end, rows.end);
        }
        tile.first_end = min(tile.first_end, rows.end);
    }
    tile.first_begin = __reduce_min_sync(~0u, tile.first_begin);
    tile.last_begin = __reduce_max_sync(~0u, tile.last_begin);
    tile.first_end = __reduce_min_sync(~0u, tile.first_end);
    tile.last_end = __reduce_max_sync(~0u, tile.last_end);
    if (lane_id() == 0) tiles.tiles[index] = tile;
}

}  // namespace
}  // namespace cuda

IntervalSummaries plan_interval_summaries(const AttentionParams& params) {
    const IntervalView& intervals = params.intervals;
    // Summaries include causality and lengths, which may differ between batch elements.
    const bool own_lengths = params.cu_seqlens_q != nullptr || params.seqused_k != nullptr;
    const int64_t batches = own_lengths ? params.batch : intervals.batches;
    IntervalSummaries tiles;
    tiles.num_n_blocks = cuda::ceil_div(params.seqlen_k, IntervalBlockSummary::kKeys);
    tiles.batch_stride = batches == 1 ? 0 : intervals.heads * tiles.num_n_blocks;
    tiles.size = batches * intervals.heads * tiles.num_n_blocks;
    return tiles;
}

void summarize_intervals_cuda(const AttentionParams& params, const IntervalSummaries& tiles, cudaStream_t stream) {
    using namespace cuda;
    if (tiles.size == 0) return;
    const int64_t blocks = ceil_div<int64_t>(tiles.size, kThreads / 32);
    summarize_intervals_kernel<<<grid_of(blocks), kThreads, 0, stream>>>(params, tiles);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_dmattn
