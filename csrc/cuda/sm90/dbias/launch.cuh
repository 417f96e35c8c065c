// Launches the recompute kernel of dbias.
#pragma once

#include "cuda/arch/tensor_map.h"
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, int kHeadDim>
void recompute_dbias(const BwdArgs& p, cudaStream_t stream) {
    using Traits = DbiasKernelTraits<T, kHeadDim>;
    using SharedStorage = DbiasSharedStorage<Traits>;
    constexpr int kSlab = Traits::RowsTile::kSlabCols;
    DbiasTensorMaps maps{};
    maps.query = make_tensor_map(query_layout(p, p.query), {kSlab, 1, Traits::kRows, 1});
    maps.dout = make_tensor_map(query_layout(p, p.dout), {kSlab, 1, Traits::kRows, 1});
    maps.key = make_tensor_map(key_layout(p, p.key), {kSlab, 1, Traits::kKeys, 1});
    maps.value = make_tensor_map(key_layout(p, p.value), {kSlab, 1, Traits::kKeys, 1});
    maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {Traits::BiasTile::kSlabCols, Traits::kRows, 1, 1});
    const auto kernel = dbias_kernel<Traits>;
    allow_shared_memory("the backward", p.head_dim, kernel, sizeof(SharedStorage));
    launch(kernel, {grid_of(p.dbias_tiles * p.dbias_splits), Traits::kThreads, sizeof(SharedStorage)}, stream, p, maps,
           BwdScale(p));
    if (p.dbias_splits > 1)
        launch(sum_dbias_splits_kernel<Traits>,
               {grid_of(p.dbias_tiles * kSumCtas<Traits>), Traits::kConsumerWarpgroups * kWarpgroupThreads}, stream, p);
}

}  // namespace flash_dmattn::cuda::sm90
