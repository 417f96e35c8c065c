// The backward for compute capability 9.0, and dQ from its sums.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace flash_dmattn::cuda::sm90 {

// The keys of a block, or of a cluster of `sharers` blocks.
template <typename Traits>
__device__ BwdWorkTile work_tile_of(const BwdArgs& p, int index, int sharers) {
    const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys),
              kv_heads = static_cast<int>(p.kv_heads);
    BwdWorkTile work_tile;
    int head = index / num_n_blocks;  // of all batch elements, those of a cluster counted once
    work_tile.n_block = index % num_n_blocks;
    if (p.is_causal || p.deterministic) {
        // The lower keys of some heads come before the higher ones. Under causality more rows see them: short works end the
        // call. And where blocks take turns they wait for lower keys: few of one head shall be at work at once.
        constexpr int kHeadsAtOnce = 16;  // their queries stay in the cache
        const int heads = kv_heads * (static_cast<int>(p.batch) / sharers);
        const int first = head / kHeadsAtOnce * kHeadsAtOnce, at_once = min(heads - first, kHeadsAtOnce);
        work_tile.n_block = (index - first * num_n_blocks) / at_once;
        head = first + (index - first * num_n_blocks) % at_once;
    }
    work_tile.kv_head = head % kv_heads;
    work_tile.group = static_cast<int>(p.heads) / kv_heads;
    work_tile.first_head = work_tile.kv_head * work_tile.group;
    work_tile.first_batch = head / kv_heads * sharers;
    return work_tile;
}

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ BwdMaps maps,
               const __grid_constant__ BwdScale scale) {
    if (is_inactive(p)) return;
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<BwdSharedStorage<Traits, kBias>*>(raw_smem);
    // The blocks of a cluster differ in their batch element alone.
    const int sharers = Traits::kClusterReduces ? static_cast<int>(p.dbias.batch_group_size) : 1;
    if (threadIdx.x == 0) {
        smem.rank = blockIdx.x % sharers;
        // Who waits for the blocks of lower keys holds a higher ticket than they: they have begun.
        if (p.deterministic && smem.rank == 0) smem.ticket = atomicAdd(drawn_tickets(p), 1);
        smem.init_pipelines();
        if constexpr (Traits::kClusterReduces) smem.reduction.init(sharers);
    }
    __syncthreads();
    int index = blockIdx.x / sharers;
    if constexpr (Traits::kClusterReduces) {
        cluster_sync();
        if (p.deterministic) index = load_dsmem(map_to_cta(smem_address(&smem.ticket), 0));
    } else if (p.deterministic) {
        index = smem.ticket;
    }
    const BwdWorkTile work_tile = work_tile_of<Traits>(p, index, sharers);
    if (threadIdx.x == 0) {
        smem.sequence = Sequence(p, work_tile.first_batch + smem.rank);
        smem.bias_batch = shared_batch(p.bias, smem.sequence);
    }
    if (threadIdx.x < Traits::kConsumerWarpgroups) smem.turn[threadIdx.x] = nullptr;
    __syncthreads();
    if (work_tile.n_block * Traits::kKeys >= smem.sequence.keys) return;
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        BwdProducer<Traits, kBias>(p, maps, smem, work_tile).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        BwdConsumer<Traits, kBias>(p, maps, scale, smem, work_tile).run();
    }
    if constexpr (Traits::kClusterReduces) {
        __syncwarp();
        cluster_sync();  // nobody sends to a block that has ended
    }
}

// dQ from float32, as the main kernel's registers held it, to rows of the query's dtype. One block a tile of rows.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kConsumerWarpgroups * 128)
    convert_dquery_kernel(const __grid_constant__ BwdArgs p) {
    if (is_inactive(p)) return;
    using T = typename Traits::T;
    constexpr int kRows = Traits::kRows, kTiles = Traits::kDqCols / 8;
    const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), kRows), heads = static_cast<int>(p.heads);
    const int m_block = blockIdx.x % num_m_blocks, head = blockIdx.x / num_m_blocks % heads, group = threadIdx.x / 128;
    const Sequence s(p, blockIdx.x / num_m_blocks / heads);
    if (m_block * kRows >= s.rows) return;
    using Layout = DqueryLayout<Traits>;
    const float* from = p.dquery_accum + dquery_tile<kRows>(p, s, head, m_block) * Layout::kSize +
                        Layout::offset(warp_id(), 0, lane_id());
    float dquery[1][kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(from + Layout::offset(0, n, 0));
        dquery[0][n][0] = x.x, dquery[0][n][1] = x.y, dquery[0][n][2] = x.z, dquery[0][n][3] = x.w;
    }
    const int group_row = Traits::kSplitsDqRows ? group * 64 : 0,
              col = Traits::kSplitsDqRows ? 0 : group * Traits::kDqCols;
    T* to = static_cast<T*>(p.dquery.data) + query_offset(p.dquery, s, head) + col;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = m_block * kRows + group_row + threadIdx.x / 32 % 4 * 16 + h * 8 + fragment_row();
        store_row(dquery, h, static_cast<float>(p.softmax_scale), to + row * p.dquery.row_stride,
                  static_cast<int>(p.head_dim) - col, row < s.rows);
    }
}

}  // namespace flash_dmattn::cuda::sm90
