// The per-head sparse backward kernel.
#pragma once

#include "cuda/mask/device_dispatch.cuh"
#include "per_head_consumer.cuh"
#include "per_head_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

// The n_blocks of a list for the rows before end_row. A list that all rows share is cut at their causal end.
template <int kKeys>
__device__ int count_n_blocks(const BwdArgs& p, const Sequence& s, int end_row, const KeyList& list) {
    int num_n_blocks = ceil_div(list.size, kKeys);
    if (!p.is_causal || p.lists.num_m_blocks > 1) return num_n_blocks;
    const int end = s.causal_end(end_row - 1);
    int low = 0;
    while (low < num_n_blocks) {
        const int middle = (low + num_n_blocks) / 2;
        if (is_key(list.keys[middle * kKeys], end)) {
            low = middle + 1;
        } else {
            num_n_blocks = middle;
        }
    }
    return num_n_blocks;
}

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    per_head_sparse_bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ SparseBwdMaps maps) {
    if (is_inactive(p)) return;
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PerHeadSparseBwdSharedStorage<Traits>*>(raw_smem);
    if (threadIdx.x == 0) {
        const PerHeadSparseBwdWorkTile work_tile(p, blockIdx.x, Traits::kRows);
        smem.work_tile() = work_tile;
        if (!work_tile.empty()) {
            const KeyList list(p, work_tile.s, work_tile.head, work_tile.first_row);
            smem.list() = list;
            smem.num_n_blocks = count_n_blocks<Traits::kKeys>(
                p, work_tile.s, min(work_tile.first_row + Traits::kRows, work_tile.s.rows), list);
        }
        smem.init_pipelines();
    }
    __syncthreads();
    if (smem.work_tile().empty()) return;
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PerHeadSparseBwdProducer<Traits, kBias>(p, maps, smem).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PerHeadSparseBwdConsumer<Traits, kBias>(p, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
