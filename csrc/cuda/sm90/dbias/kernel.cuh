// The recompute kernel of dbias, for a dense bias that many batch elements or several heads share, with a softcap, and
// of packed sequences.
//
// A CTA owns a tile of dbias. It loops over the contributors, recomputes P and dP of each, and sums dx in float32
// registers: no atomics, and nothing of the size [B, H, Sq, Sk].
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dbias_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ DbiasTensorMaps maps,
                 const __grid_constant__ BwdScale scale) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    const DbiasWorkTile<Traits> work_tile(p, blockIdx.x);
    if (!work_tile.exists()) return;
    auto& smem = init_shared_storage<DbiasSharedStorage<Traits>>();
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        DbiasProducer<Traits>(p, maps, smem, work_tile).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        DbiasConsumer<Traits>(p, scale, smem, work_tile).run();
    }
}

// Adds up the splits of each tile in their order. A CTA has kSumFragments fragments of a tile: so few that the loads of
// several splits are in flight.
constexpr int kSumFragments = 4;
template <typename Traits>
constexpr int kSumCtas = Traits::kKeys / 8 / kSumFragments;  // of a tile

template <typename Traits>
__global__ void __launch_bounds__(Traits::kConsumerWarpgroups * kWarpgroupThreads)
    sum_dbias_splits_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    const DbiasWorkTile<Traits> work_tile(p, blockIdx.x / kSumCtas<Traits>);
    if (!work_tile.exists()) return;
    DbiasSums<Traits, kSumFragments> sums(p, work_tile, static_cast<int>(threadIdx.x) / kWarpgroupThreads,
                                          blockIdx.x % kSumCtas<Traits> * kSumFragments);
#pragma unroll 4
    for (int split = 0; split < p.dbias_splits; ++split) sums.add_partial(split);
    sums.store();
}

}  // namespace flash_dmattn::cuda::sm90
