// The forward for compute capability 9.0.
#pragma once

#include "../common/way.cuh"
#include "fwd_consumer.cuh"
#include "fwd_list_producer.cuh"
#include "fwd_tile_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ FwdSchedule schedule,
               const __grid_constant__ FwdMaps maps) {
    if (is_in_vain(p)) return;
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<FwdSmem<T, kBias, Tile>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_rings();
    __syncthreads();
    if (threadIdx.x < kGroupThreads) {
        give_registers<Tile::kProducerRegisters>();
        using Producer = std::conditional_t<Tile::kGathers, FwdListProducer<T, kBias, Tile>, FwdTileProducer<T, kBias, Tile>>;
        Producer(p, schedule, maps, smem).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        FwdConsumer<T, kBias, Tile>(p, schedule, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
