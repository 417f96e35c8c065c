// Launches the pair bias forward of one dtype.
#pragma once

#include "cuda/arch/tensor_map.h"
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "fwd_kernel.cuh"
#include "run.h"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
void launch_pair_bias_fwd(const FwdArgs& p, cudaStream_t stream) {
    constexpr int kBiasBlocks = Traits::kKeys / 64;  // of an n_block
    const PairBiasSchedule schedule(p, ceil_div<int64_t>(p.seqlen_q, Traits::kRows),
                                    ceil_div<int64_t>(p.seqlen_k, Traits::kKeys) * kBiasBlocks);

    PairBiasFwdTensorMaps maps{};
    maps.query = make_tensor_map(query_layout(p, p.query), {kPairBiasHeadDim, 1, Traits::kRows, 1});
    maps.key = make_tensor_map(key_layout(p, p.key), {kPairBiasHeadDim, 1, Traits::kKeys, 1});
    maps.value = make_tensor_map(key_layout(p, p.value), {kPairBiasHeadDim, 1, Traits::kKeys, 1});
    maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {kPairBiasCols, 64, 1, 1});

    const auto kernel = pair_bias_fwd_kernel<Traits>;
    const int64_t bytes = PairBiasFwdSharedStorage<Traits>::bytes(schedule.bias_blocks);
    allow_shared_memory("the forward", p.head_dim, kernel,
                        PairBiasFwdSharedStorage<Traits>::bytes(Traits::kSizes.max_keys / 64));
    launch(kernel, {grid_of(schedule.num_ctas(p)), Traits::kThreads, bytes}, stream, p, schedule, maps);
}

template <typename T, int kHeadDim>
void run_pair_bias_fwd(const FwdArgs& args, cudaStream_t stream) {
    static_assert(kHeadDim == kPairBiasHeadDim);
    const FwdArgs p = with_dense_bias(args);
    if (has_float32_bias(p)) return launch_pair_bias_fwd<PairBiasFwdKernelTraits<T, float, 2>>(p, stream);
    using More = PairBiasFwdKernelTraits<T, T, 0>;
    using Fewer = PairBiasFwdKernelTraits<T, T, 1>;
    const bool fewer = p.seqlen_k > More::kSizes.max_keys || fewer_fit_better(p.seqlen_q, Fewer::kRows, More::kRows);
    fewer ? launch_pair_bias_fwd<Fewer>(p, stream) : launch_pair_bias_fwd<More>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm90
