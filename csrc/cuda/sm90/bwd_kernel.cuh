// The backward for compute capability 9.0, and dQ from its sums.
#pragma once

#include "../common/way.cuh"
#include "bwd_consumer.cuh"
#include "bwd_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

// The keys of a block, or of a cluster of `sharers` blocks.
template <typename Tile>
__device__ BwdWork work_of(const BwdArgs& p, int index, int sharers) {
    const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys), kv_heads = static_cast<int>(p.kv_heads);
    BwdWork work;
    int head = index / key_tiles;  // of all batch elements, those of a cluster counted once
    work.key_tile = index % key_tiles;
    if (p.is_causal || p.deterministic) {
        // The lower keys of some heads come before the higher ones. Under causality more rows see them: short works end the
        // call. And where blocks take turns they wait for lower keys: few of one head shall be at work at once.
        constexpr int kHeadsAtOnce = 16;  // their queries stay in the cache
        const int heads = kv_heads * (static_cast<int>(p.batch) / sharers);
        const int first = head / kHeadsAtOnce * kHeadsAtOnce, at_once = min(heads - first, kHeadsAtOnce);
        work.key_tile = (index - first * key_tiles) / at_once;
        head = first + (index - first * key_tiles) % at_once;
    }
    work.kv_head = head % kv_heads;
    work.group = static_cast<int>(p.heads) / kv_heads;
    work.first_head = work.kv_head * work.group;
    work.first_batch = head / kv_heads * sharers;
    return work;
}

template <typename Tile, BiasKind kBias>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ BwdMaps maps,
               const __grid_constant__ BwdScale scale) {
    if (is_in_vain(p)) return;
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<BwdSmem<Tile, kBias>*>(raw_smem);
    // The blocks of a cluster differ in their batch element alone.
    const int sharers = Tile::kExchanges ? static_cast<int>(p.dbias.batch_sharers) : 1;
    if (threadIdx.x == 0) {
        smem.rank = blockIdx.x % sharers;
        // Who waits for the blocks of lower keys holds a higher ticket than they: they have begun.
        if (p.deterministic && smem.rank == 0) smem.ticket = atomicAdd(drawn_tickets(p), 1);
        smem.init_rings();
        if constexpr (Tile::kExchanges) smem.exchange.init(sharers);
    }
    __syncthreads();
    int index = blockIdx.x / sharers;
    if constexpr (Tile::kExchanges) {
        cluster_sync();
        if (p.deterministic) index = load_shared_of_block(in_block(smem_address(&smem.ticket), 0));
    } else if (p.deterministic) {
        index = smem.ticket;
    }
    const BwdWork work = work_of<Tile>(p, index, sharers);
    if (threadIdx.x == 0) {
        smem.sequence = Sequence(p, work.first_batch + smem.rank);
        smem.bias_batch = shared_batch(p.bias, smem.sequence);
    }
    if (threadIdx.x < Tile::kConsumers) smem.turn[threadIdx.x] = nullptr;
    __syncthreads();
    if (work.key_tile * Tile::kKeys >= smem.sequence.keys) return;
    if (threadIdx.x < 128) {
        give_registers<Tile::kProducerRegisters>();
        BwdProducer<Tile, kBias>(p, maps, smem, work).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        BwdConsumer<Tile, kBias>(p, maps, scale, smem, work).run();
    }
    if constexpr (Tile::kExchanges) {
        __syncwarp();
        cluster_sync();  // nobody sends to a block that has ended
    }
}

// dQ from float32, as the main kernel's registers held it, to rows of the query's dtype. One block a tile of rows.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kConsumers * 128) convert_dquery_kernel(const __grid_constant__ BwdArgs p) {
    if (is_in_vain(p)) return;
    using T = typename Tile::T;
    constexpr int kRows = Tile::kRows, kTiles = Tile::kDqCols / 8;
    const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), kRows), heads = static_cast<int>(p.heads);
    const int row_tile = blockIdx.x % row_tiles, head = blockIdx.x / row_tiles % heads, group = threadIdx.x / 128;
    const Sequence s(p, blockIdx.x / row_tiles / heads);
    if (row_tile * kRows >= s.rows) return;
    using Layout = DqueryLayout<Tile>;
    const float* from = p.dquery_accum + dquery_tile<kRows>(p, s, head, row_tile) * Layout::kSize +
                        Layout::offset(warp_id(), 0, lane_id());
    float dquery[1][kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(from + Layout::offset(0, n, 0));
        dquery[0][n][0] = x.x, dquery[0][n][1] = x.y, dquery[0][n][2] = x.z, dquery[0][n][3] = x.w;
    }
    const int group_row = Tile::kSplitsDqRows ? group * 64 : 0, col = Tile::kSplitsDqRows ? 0 : group * Tile::kDqCols;
    T* to = static_cast<T*>(p.dquery.data) + query_offset(p.dquery, s, head) + col;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = row_tile * kRows + group_row + threadIdx.x / 32 % 4 * 16 + h * 8 + fragment_row();
        store_row(dquery, h, static_cast<float>(p.softmax_scale), to + row * p.dquery.row_stride,
                  static_cast<int>(p.head_dim) - col, row < s.rows);
    }
}

}  // namespace flash_dmattn::cuda::sm90
