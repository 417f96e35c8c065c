// Launches the forward with a dense bias that batch elements share, of one dtype.
#pragma once

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "pair.h"
#include "pair_fwd_kernel.cuh"
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile>
void launch_pair_fwd(const FwdArgs& p, cudaStream_t stream) {
    constexpr int kBiasTilesOfKeys = Tile::kKeys / kPairBiasCols;
    const PairSchedule schedule(p, ceil_div<int64_t>(p.seqlen_q, Tile::kRows),
                                ceil_div<int64_t>(p.seqlen_k, Tile::kKeys) * kBiasTilesOfKeys);

    PairFwdMaps maps{};
    maps.query = make_map(query_layout(p, p.query), {kPairHeadDim, 1, Tile::kRows, 1});
    maps.key = make_map(key_layout(p, p.key), {kPairHeadDim, 1, Tile::kKeys, 1});
    maps.value = make_map(key_layout(p, p.value), {kPairHeadDim, 1, Tile::kKeys, 1});
    maps.bias = make_map(dense_layout(p, p.bias), {kPairBiasCols, 64, 1, 1});

    const auto kernel = pair_fwd_kernel<Tile>;
    const size_t bytes = PairFwdSmem<Tile>::bytes(schedule.bias_tiles);
    allow_shared_memory("the forward", p.head_dim, kernel,
                        PairFwdSmem<Tile>::bytes(Tile::kSizes.longest / kPairBiasCols));
    kernel<<<grid_of(schedule.blocks(p)), Tile::kThreads, bytes, stream>>>(p, schedule, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, int kHeadDim>
void run_pair_fwd(const FwdArgs& p, cudaStream_t stream) {
    static_assert(kHeadDim == kPairHeadDim);
    using More = PairFwdTile<T, 0>;
    using Fewer = PairFwdTile<T, 1>;
    const bool fewer = p.seqlen_k > More::kSizes.longest || fewer_fit_better(p.seqlen_q, Fewer::kRows, More::kRows);
    fewer ? launch_pair_fwd<Fewer>(p, stream) : launch_pair_fwd<More>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm90
