// Launches the backward over key lists of one head dimension and dtype.
#pragma once

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "bwd.h"
#include "gather_bwd_kernel.cuh"
#include "gather_group_kernel.cuh"
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile>
void launch_gathered(void (*kernel)(BwdArgs, GatherBwdMaps), int64_t blocks, size_t shared_bytes, const BwdArgs& p,
                     cudaStream_t stream) {
    constexpr int kPanel = Tile::RowsTile::kPanelCols;
    GatherBwdMaps maps;
    maps.query = make_map(query_layout(p, p.query), {kPanel, 1, Tile::kRows, 1});
    maps.dout = make_map(query_layout(p, p.dout), {kPanel, 1, Tile::kRows, 1});
    allow_shared_memory("the backward", p.head_dim, kernel, shared_bytes);
    kernel<<<grid_of(blocks), Tile::kThreads, shared_bytes, stream>>>(p, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename Tile, BiasKind kBias>
void launch_gather_bwd(const BwdArgs& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div<int64_t>(p.seqlen_q, Tile::kRows) * p.heads * p.batch;
    launch_gathered<Tile>(gather_bwd_kernel<Tile, kBias>, blocks, sizeof(GatherBwdSmem<Tile>), p, stream);
}

template <typename Tile, BiasKind kBias>
void launch_gather_group(const BwdArgs& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.seqlen_q, gather_group_rows(p)) * p.kv_heads * p.batch * p.list_parts;
    launch_gathered<Tile>(gather_group_kernel<Tile, kBias>, blocks, sizeof(GatherGroupSmem<Tile>), p, stream);
}

template <typename T, int kHeadDim, int kVisitRows>
void run_gather_group(const BwdArgs& p, cudaStream_t stream) {
    using Tile = GatherGroupTile<T, kHeadDim, kVisitRows>;
    p.bias.present() ? launch_gather_group<Tile, BiasKind::kKey>(p, stream)
                     : launch_gather_group<Tile, BiasKind::kNone>(p, stream);
}

template <typename T, int kHeadDim>
void run_gather_bwd(const BwdArgs& p, cudaStream_t stream) {
    if (p.list_parts > 0) {
        if constexpr (kHeadDim <= 64)
            if (gather_group_rows(p) == 128) return run_gather_group<T, kHeadDim, 128>(p, stream);
        return run_gather_group<T, kHeadDim, 64>(p, stream);
    }
    if constexpr (can_gather_by_head(kHeadDim)) {
        using Tile = GatherBwdTile<T, kHeadDim>;
        p.bias.present() ? launch_gather_bwd<Tile, BiasKind::kKey>(p, stream)
                         : launch_gather_bwd<Tile, BiasKind::kNone>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm90
