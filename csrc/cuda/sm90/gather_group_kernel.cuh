// The backward over key lists that heads share, for compute capability 9.0.
#pragma once

#include "gather_bwd_kernel.cuh"
#include "gather_group_consumer.cuh"
#include "gather_group_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gather_group_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ GatherBwdMaps maps) {
    if (is_in_vain(p)) return;
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<GatherGroupSmem<Tile>*>(raw_smem);
    if (threadIdx.x == 0) {
        // Whoever waits for a slot holds a higher ticket than the blocks that empty it: they have begun.
        const GatherGroupWork work(p, atomicAdd(p.dquery_turns, 1));
        smem.work() = work;
        int tiles = 0;
        if (!work.empty()) {
            const KeyList list(p, work.s, work.head, work.first_row);
            smem.list() = list;
            tiles = count_key_tiles<Tile::kKeys>(p, work.s, work.end_row, list);
        }
        const int parts = static_cast<int>(p.list_parts), slots = static_cast<int>(p.dquery_slots);
        smem.first_tile = tiles * work.part / parts;
        smem.end_tile = tiles * (work.part + 1) / parts;
        smem.init_rings();
        while (load_acquire(times_emptied(p, work.unit % slots)) < work.unit / slots) {
        }
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<Tile::kProducerRegisters>();
        GatherGroupProducer<Tile, kBias>(p, maps, smem).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        GatherGroupConsumer<Tile, kBias>(p, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
