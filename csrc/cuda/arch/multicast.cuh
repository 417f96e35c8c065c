// TMA multicast: the CTAs of a cluster each load a part of a tile to all of them. Compute capability 9.0 and up.
//
// A stage is free when the consumers of all CTAs have released it, since each CTA writes to the stages of all.
#pragma once

#include <cuda.h>

#include "cluster.cuh"
#include "pipeline.cuh"
#include "tma_load_rows.cuh"

namespace flash_dmattn::cuda {

// This CTA's rank in its cluster.
__device__ __forceinline__ int cta_rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// tma_load_4d to every CTA of the cluster whose bit is set in `ctas`: to the same address, counted by the same barrier.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t to, const void* map, uint32_t barrier, uint16_t ctas,
                                                      int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(ctas)
        : "memory");
}

// tma_load_rows of a tile by a cluster of kCtas CTAs: this CTA's part, to all of them. `map` has boxes of such a part.
template <int kCtas, typename Tile>
__device__ __forceinline__ void tma_load_rows_multicast(Tile& to, const CUtensorMap& map, uint32_t barrier,
                                                        const AttentionParams& p, const Sequence& s, int row,
                                                        int head) {
    if constexpr (kCtas == 1) return tma_load_rows(to, map, barrier, p, s, row, head);
    const int first = cta_rank_in_cluster() * (Tile::kRows / kCtas);
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab)
        tma_load_4d_multicast(smem_address(to.data + (slab * Tile::kRows + first) * Tile::kSlabCols), &map, barrier,
                              (1 << kCtas) - 1, slab * Tile::kSlabCols, head, row + first,
                              p.cu_seqlens_q == nullptr ? s.batch : 0);
}

// Releases the pipeline's current stage in all CTAs of the cluster: one arrival per warp; all its lanes call.
template <int kCtas, int kStages>
__device__ __forceinline__ void consumer_release_multicast(const Pipeline<kStages>& pipeline) {
    if constexpr (kCtas == 1) return pipeline.consumer_release();
    __syncwarp();
    if (lane_id() < kCtas) mbarrier_arrive_cluster(map_to_cta(pipeline.empty(), lane_id()));
}

}  // namespace flash_dmattn::cuda
