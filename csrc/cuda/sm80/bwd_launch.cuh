// Runs the backward's kernels of one dtype and head dimension, one after the other on a stream.
#pragma once

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "bwd.h"
#include "bwd_convert.cuh"
#include "bwd_dbias_kernel.cuh"
#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

using BwdKernel = void (*)(BwdArgs);

template <typename Tile>
void launch(BwdKernel kernel, int64_t blocks, size_t shared_bytes, const BwdArgs& p, cudaStream_t stream) {
    if (blocks == 0) return;
    allow_shared_memory("the backward", p.head_dim, kernel, shared_bytes);
    kernel<<<grid_of(blocks), Tile::kThreads, shared_bytes, stream>>>(p);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

// The same, the blocks of the batch elements that share a bias in a cluster.
template <typename Tile>
void launch_clusters(BwdKernel kernel, int64_t blocks, size_t shared_bytes, const BwdArgs& p, cudaStream_t stream) {
    if (blocks == 0) return;
    allow_shared_memory("the backward", p.head_dim, kernel, shared_bytes);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(p.dbias.batch_sharers), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid_of(blocks);
    config.blockDim = Tile::kThreads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p));
}

template <typename Tile, bool kCausal>
void sum_shared_dbias(const BwdArgs& p, cudaStream_t stream) {
    const int64_t key_tiles = ceil_div<int64_t>(p.seqlen_k, Tile::kKeys);
    if (key_tiles == 0) return;
    const int64_t runs = p.dbias_tiles / key_tiles * ceil_div<int64_t>(key_tiles, p.dbias_run);
    launch<Tile>(bwd_dbias_kernel<Tile, kCausal>, runs * p.dbias_splits, sizeof(BwdDbiasSmem<Tile>), p, stream);
    if (p.dbias_splits > 1) launch<Tile>(sum_dbias_parts_kernel<Tile>, p.dbias_tiles, 0, p, stream);
}

template <typename Tile, bool kCausal, BiasKind kBias>
void run_bwd_main(const BwdArgs& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div<int64_t>(p.seqlen_k, Tile::kKeys) * p.kv_heads * p.batch;
    const BwdKernel kernel = bwd_kernel<Tile, kBias, kCausal>;
    // As much for every launch: what a kernel may have is kept by the device, for all threads of the process.
    constexpr size_t kBytes = sizeof(BwdSmem<Tile, kBias>) +
                              (kBias == BiasKind::kDense && kCanExchangeDx<Tile> ? sizeof(DxExchangeSmem<Tile>) : 0);
    if (p.dense_dbias == DenseDbias::kExchanged) return launch_clusters<Tile>(kernel, blocks, kBytes, p, stream);
    launch<Tile>(kernel, blocks, kBytes, p, stream);
    if (p.dense_dbias == DenseDbias::kAtomic) launch<Tile>(sum_dbias_parts_kernel<Tile>, p.dbias_tiles, 0, p, stream);
    if (p.dense_dbias == DenseDbias::kOwnKernel)
        sum_shared_dbias<BwdTile<Tile::kHeadDim, typename Tile::T, Tile::kIsSmall, BwdPass::kDbias>, kCausal>(p, stream);
}

template <typename Tile, bool kCausal>
void run_bwd_tiles(const BwdArgs& p, cudaStream_t stream) {
    switch (p.bias.kind) {
        case BiasKind::kNone: run_bwd_main<Tile, kCausal, BiasKind::kNone>(p, stream); break;
        case BiasKind::kKey: run_bwd_main<Tile, kCausal, BiasKind::kKey>(p, stream); break;
        case BiasKind::kDense: run_bwd_main<Tile, kCausal, BiasKind::kDense>(p, stream); break;
    }
    const int64_t row_tiles = ceil_div<int64_t>(p.seqlen_q, Tile::kRows);
    launch<Tile>(convert_dquery_kernel<Tile>, row_tiles * p.heads * p.batch, sizeof(typename Tile::RowsTile), p,
                 stream);
}

template <typename Tile>
void run_bwd_with(const BwdArgs& p, cudaStream_t stream) {
    p.is_causal ? run_bwd_tiles<Tile, true>(p, stream) : run_bwd_tiles<Tile, false>(p, stream);
}

template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& p, const BwdPlan& plan, cudaStream_t stream) {
    plan.small_tiles ? run_bwd_with<BwdTile<kHeadDim, T, true>>(p, stream)
                     : run_bwd_with<BwdTile<kHeadDim, T, false>>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm80
