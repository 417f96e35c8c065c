// Launches the backward's kernels of one dtype and head dimension on a stream.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "cuda/sm80/bias_dispatch.h"
#include "plan.h"
#include "convert.cuh"
#include "cuda/sm80/dbias/kernel.cuh"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

using BwdKernelFn = void (*)(BwdArgs);

template <typename Traits>
void launch_bwd(BwdKernelFn kernel, int64_t num_ctas, int64_t shared_bytes, const BwdArgs& p, cudaStream_t stream,
                int64_t cluster_size = 1) {
    if (num_ctas == 0) return;
    allow_shared_memory("the backward", p.head_dim, kernel, shared_bytes);
    launch(kernel, {grid_of(num_ctas), Traits::kThreads, shared_bytes, cluster_size}, stream, p);
}

template <typename Traits>
void recompute_dbias(const BwdArgs& p, cudaStream_t stream) {
    const int64_t num_n_blocks = ceil_div<int64_t>(p.seqlen_k, Traits::kKeys);
    if (num_n_blocks == 0) return;
    const int64_t runs = p.dbias_tiles / num_n_blocks * ceil_div<int64_t>(num_n_blocks, p.dbias_run);
    launch_bwd<Traits>(bwd_dbias_kernel<Traits>, runs * p.dbias_splits, sizeof(BwdDbiasSharedStorage<Traits>), p,
                       stream);
    if (p.dbias_splits > 1) launch_bwd<Traits>(sum_dbias_partials_kernel<Traits>, p.dbias_tiles, 0, p, stream);
}

template <typename Traits, BiasKind kBias>
void run_bwd_main(const BwdArgs& p, cudaStream_t stream) {
    const int64_t num_ctas = ceil_div<int64_t>(p.seqlen_k, Traits::kKeys) * p.kv_heads * p.batch;
    const BwdKernelFn kernel =
        has_softcap_or_relative_bias(p) ? bwd_kernel<Traits, kBias, true> : bwd_kernel<Traits, kBias, false>;
    // The same size for every launch: the kernel's limit is an attribute that all threads of the process share.
    constexpr size_t kBytes =
        sizeof(BwdSharedStorage<Traits, kBias>) +
        (kBias == BiasKind::kDense && kCanClusterReduce<Traits> ? sizeof(DsmemReductionSharedStorage<Traits>) : 0);
    if (p.dense_dbias == DenseDbias::kClusterReduce)  // a cluster has the batch elements that share a bias
        return launch_bwd<Traits>(kernel, num_ctas, kBytes, p, stream, p.dbias.batch_group_size);
    launch_bwd<Traits>(kernel, num_ctas, kBytes, p, stream);
    if (p.dense_dbias == DenseDbias::kAtomic)
        launch_bwd<Traits>(sum_dbias_partials_kernel<Traits>, p.dbias_tiles, 0, p, stream);
    if (p.dense_dbias == DenseDbias::kRecompute)
        recompute_dbias<BwdKernelTraits<Traits::kHeadDim, typename Traits::T, Traits::kIsSmall, BwdPass::kDbias>>(
            p, stream);
}

template <typename Traits>
void run_bwd_with(const BwdArgs& p, cudaStream_t stream) {
    dispatch_bias(p.bias.kind, [&](auto bias) { run_bwd_main<Traits, decltype(bias)::value>(p, stream); });
    const int64_t num_m_blocks = ceil_div<int64_t>(p.seqlen_q, Traits::kRows);
    launch_bwd<Traits>(convert_dquery_kernel<Traits>, num_m_blocks * p.heads * p.batch,
                       sizeof(typename Traits::RowsTile), p, stream);
}

template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& p, bool small_tiles, cudaStream_t stream) {
    small_tiles ? run_bwd_with<BwdKernelTraits<kHeadDim, T, true>>(p, stream)
                : run_bwd_with<BwdKernelTraits<kHeadDim, T, false>>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm80
