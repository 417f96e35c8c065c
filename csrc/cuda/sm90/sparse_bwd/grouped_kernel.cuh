// The backward over key lists that heads share, for compute capability 9.0.
#pragma once

#include "cuda/arch/memory.cuh"
#include "per_head_kernel.cuh"
#include "grouped_consumer.cuh"
#include "grouped_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    grouped_sparse_bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ SparseBwdMaps maps) {
    if (is_inactive(p)) return;
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<GatherGroupSharedStorage<Traits>*>(raw_smem);
    if (threadIdx.x == 0) {
        // Whoever waits for a slot holds a higher ticket than the blocks that empty it: they have begun.
        const GroupedSparseBwdWorkTile work_tile(p, atomicAdd(p.dquery_semaphore, 1));
        smem.work_tile() = work_tile;
        int tiles = 0;
        if (!work_tile.empty()) {
            const KeyList list(p, work_tile.s, work_tile.head, work_tile.first_row);
            smem.list() = list;
            tiles = count_key_tiles<Traits::kKeys>(p, work_tile.s, work_tile.end_row, list);
        }
        const int parts = static_cast<int>(p.list_splits), slots = static_cast<int>(p.dquery_slots);
        smem.first_tile = tiles * work_tile.part / parts;
        smem.end_tile = tiles * (work_tile.part + 1) / parts;
        smem.init_pipelines();
        while (load_acquire(slot_epoch(p, work_tile.unit % slots)) < work_tile.unit / slots) {}
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        GroupedSparseBwdProducer<Traits, kBias>(p, maps, smem).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        GroupedSparseBwdConsumer<Traits, kBias>(p, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
