// Launches the sparse backward of one head dimension and dtype.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "cuda/arch/tensor_map.h"
#include "cuda/sm90/bwd/plan.h"
#include "per_head_kernel.cuh"
#include "grouped_kernel.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, typename SharedStorage, typename... Scheduler>
void launch_sparse_bwd(void (*kernel)(BwdArgs, SparseBwdTensorMaps, BwdScale, Scheduler...), int64_t num_ctas,
                       const BwdArgs& p, cudaStream_t stream, const Scheduler&... scheduler) {
    constexpr int kSlab = Traits::RowsTile::kSlabCols;
    SparseBwdTensorMaps maps;
    maps.query = make_tensor_map(query_layout(p, p.query), {kSlab, 1, Traits::kRows, 1});
    maps.dout = make_tensor_map(query_layout(p, p.dout), {kSlab, 1, Traits::kRows, 1});
    allow_shared_memory("the backward", p.head_dim, kernel, sizeof(SharedStorage));
    launch(kernel, {grid_of(num_ctas), Traits::kThreads, sizeof(SharedStorage)}, stream, p, maps, BwdScale(p),
           scheduler...);
}

template <typename Traits, BiasKind kBias>
void launch_per_head_sparse_bwd(const BwdArgs& p, cudaStream_t stream) {
    const int64_t num_ctas = total_m_blocks(p, Traits::kRows) * p.heads;
    launch_sparse_bwd<Traits, PerHeadSparseBwdSharedStorage<Traits>>(per_head_sparse_bwd_kernel<Traits, kBias>,
                                                                     num_ctas, p, stream);
}

template <typename Traits, BiasKind kBias>
void launch_grouped_sparse_bwd(const BwdArgs& p, cudaStream_t stream) {
    const int64_t num_ctas = total_m_blocks(p, grouped_block_m(p)) * p.kv_heads * p.list_splits;
    launch_sparse_bwd<Traits, GroupedSparseBwdSharedStorage<Traits>>(grouped_sparse_bwd_kernel<Traits, kBias>, num_ctas,
                                                                     p, stream, GroupedSparseBwdTileSchedulerParams(p));
}

template <typename T, int kHeadDim, int kRows>
void run_grouped_sparse_bwd(const BwdArgs& p, cudaStream_t stream) {
    using Traits = GroupedSparseBwdKernelTraits<T, kHeadDim, kRows>;
    p.bias.present() ? launch_grouped_sparse_bwd<Traits, BiasKind::kKey>(p, stream)
                     : launch_grouped_sparse_bwd<Traits, BiasKind::kNone>(p, stream);
}

template <typename T, int kHeadDim>
void run_sparse_bwd(const BwdArgs& p, cudaStream_t stream) {
    if (p.list_splits > 0) {
        if constexpr (kHeadDim <= 64)
            if (grouped_block_m(p) == 128) return run_grouped_sparse_bwd<T, kHeadDim, 128>(p, stream);
        return run_grouped_sparse_bwd<T, kHeadDim, 64>(p, stream);
    }
    if constexpr (can_run_per_head(kHeadDim)) {
        using Traits = PerHeadSparseBwdKernelTraits<T, kHeadDim>;
        p.bias.present() ? launch_per_head_sparse_bwd<Traits, BiasKind::kKey>(p, stream)
                         : launch_per_head_sparse_bwd<Traits, BiasKind::kNone>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm90
