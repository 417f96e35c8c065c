// The backward over key lists for compute capability 9.0.
#pragma once

#include "../common/way.cuh"
#include "gather_bwd_consumer.cuh"
#include "gather_bwd_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

// The tiles of keys that the rows before end_row have of their list. A list that all rows share is cut where causality ends.
template <int kKeys>
__device__ int count_key_tiles(const BwdArgs& p, const Sequence& s, int end_row, const KeyList& list) {
    int tiles = ceil_div(list.size, kKeys);
    if (!p.is_causal || p.lists.row_tiles > 1) return tiles;
    const int end = s.causal_end(end_row - 1);
    int low = 0;
    while (low < tiles) {
        const int middle = (low + tiles) / 2;
        if (is_key(list.keys[middle * kKeys], end)) {
            low = middle + 1;
        } else {
            tiles = middle;
        }
    }
    return tiles;
}

template <typename Tile, BiasKind kBias>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gather_bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ GatherBwdMaps maps) {
    if (is_in_vain(p)) return;
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<GatherBwdSmem<Tile>*>(raw_smem);
    if (threadIdx.x == 0) {
        const GatherBwdWork work(p, blockIdx.x, Tile::kRows);
        smem.work() = work;
        if (!work.empty()) {
            const KeyList list(p, work.s, work.head, work.first_row);
            smem.list() = list;
            smem.tiles = count_key_tiles<Tile::kKeys>(p, work.s, min(work.first_row + Tile::kRows, work.s.rows), list);
        }
        smem.init_rings();
    }
    __syncthreads();
    if (smem.work().empty()) return;
    if (threadIdx.x < 128) {
        give_registers<Tile::kProducerRegisters>();
        GatherBwdProducer<Tile, kBias>(p, maps, smem).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        GatherBwdConsumer<Tile, kBias>(p, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
