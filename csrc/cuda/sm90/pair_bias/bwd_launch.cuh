// Launches the pair bias backward of one dtype: dQ and dbias, then dK and dV.
#pragma once

#include "cuda/arch/tensor_map.h"
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "dkdv_kernel.cuh"
#include "dq_dbias_kernel.cuh"
#include "run.h"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
void launch_pair_bias_dq_dbias(const BwdArgs& p, cudaStream_t stream) {
    const PairBiasSchedule schedule(p, ceil_div<int64_t>(p.seqlen_q, kPairBiasRows), Traits::kAllNBlocks,
                                    p.dbias_splits);

    PairBiasBwdTensorMaps maps{};
    maps.query = make_tensor_map(query_layout(p, p.query), {kPairBiasHeadDim, 1, kPairBiasRows, 1});
    maps.out = make_tensor_map(query_layout(p, p.out), {kPairBiasHeadDim, 1, kPairBiasRows, 1});
    maps.dout = make_tensor_map(query_layout(p, p.dout), {kPairBiasHeadDim, 1, kPairBiasRows, 1});
    maps.key = make_tensor_map(key_layout(p, p.key), {kPairBiasHeadDim, 1, 64, 1});
    maps.value = make_tensor_map(key_layout(p, p.value), {kPairBiasHeadDim, 1, 64, 1});
    maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {kPairBiasCols, kPairBiasRows, 1, 1});

    using SharedStorage = PairBiasDqDbiasSharedStorage<Traits>;
    const auto kernel = pair_bias_dq_dbias_kernel<Traits>;
    allow_shared_memory("the backward", p.head_dim, kernel, sizeof(SharedStorage));
    launch(kernel, {grid_of(schedule.num_ctas(p)), Traits::kThreads, sizeof(SharedStorage)}, stream, p, schedule, maps);
    if (p.dbias_partials == nullptr) return;
    constexpr int kColTiles = Traits::kAllNBlocks * 64 / kPairBiasDbiasCols;
    launch(pair_bias_dbias_kernel<Traits>, {grid_of(p.dbias_tiles * kColTiles), 128}, stream, p);
}

template <typename Traits>
void launch_pair_bias_dkdv(const BwdArgs& p, cudaStream_t stream) {
    const PairBiasSchedule schedule(p, ceil_div<int64_t>(p.seqlen_k, Traits::kKeys),
                                    ceil_div<int64_t>(p.seqlen_q, kPairBiasRows));

    PairBiasBwdTensorMaps maps{};
    maps.query = make_tensor_map(query_layout(p, p.query), {kPairBiasHeadDim, 1, kPairBiasRows, 1});
    maps.dout = make_tensor_map(query_layout(p, p.dout), {kPairBiasHeadDim, 1, kPairBiasRows, 1});
    maps.key = make_tensor_map(key_layout(p, p.key), {kPairBiasHeadDim, 1, Traits::kKeys, 1});
    maps.value = make_tensor_map(key_layout(p, p.value), {kPairBiasHeadDim, 1, Traits::kKeys, 1});
    maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {kPairBiasCols, kPairBiasRows, 1, 1});

    using SharedStorage = PairBiasDkdvSharedStorage<Traits>;
    const auto kernel = pair_bias_dkdv_kernel<Traits>;
    allow_shared_memory("the backward", p.head_dim, kernel, SharedStorage::bytes(Traits::kMaxSeqlenQ / kPairBiasRows));
    launch(kernel, {grid_of(schedule.num_ctas(p)), Traits::kThreads, SharedStorage::bytes(schedule.bias_blocks)},
           stream, p, schedule, maps);
}

template <typename T, typename Bias>
void launch_pair_bias_dq_dbias(const BwdArgs& p, cudaStream_t stream) {
    switch (ceil_div<int64_t>(p.seqlen_k, 128)) {
        case 1: launch_pair_bias_dq_dbias<PairBiasDqDbiasKernelTraits<T, Bias, 1>>(p, stream); break;
        case 2: launch_pair_bias_dq_dbias<PairBiasDqDbiasKernelTraits<T, Bias, 2>>(p, stream); break;
        case 3: launch_pair_bias_dq_dbias<PairBiasDqDbiasKernelTraits<T, Bias, 3>>(p, stream); break;
    }
}

template <typename T, int kHeadDim>
void run_pair_bias_bwd(const BwdArgs& args, cudaStream_t stream) {
    static_assert(kHeadDim == kPairBiasHeadDim);
    const BwdArgs p = with_dense_bias(args);
    if (has_float32_bias(p)) {
        using Shorter = PairBiasDkdvKernelTraits<T, float, 2, 256, 3, 2>;
        using Longer = PairBiasDkdvKernelTraits<T, float, 2, kPairBiasBwdMaxSeqlen, 2, 1>;
        launch_pair_bias_dq_dbias<T, float>(p, stream);
        p.seqlen_q <= Shorter::kMaxSeqlenQ ? launch_pair_bias_dkdv<Shorter>(p, stream)
                                           : launch_pair_bias_dkdv<Longer>(p, stream);
    } else {
        using More = PairBiasDkdvKernelTraits<T, T, 3, kPairBiasBwdMaxSeqlen, 3, 2>;
        using Fewer = PairBiasDkdvKernelTraits<T, T, 2, kPairBiasBwdMaxSeqlen, 3, 2>;
        launch_pair_bias_dq_dbias<T, T>(p, stream);
        fewer_fit_better(p.seqlen_k, Fewer::kKeys, More::kKeys) ? launch_pair_bias_dkdv<Fewer>(p, stream)
                                                                : launch_pair_bias_dkdv<More>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm90
