// Launches the backward with a dense bias that batch elements share, of one dtype: dQ and the bias's gradient, and dK and dV.
#pragma once

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "pair.h"
#include "pair_dkey_kernel.cuh"
#include "pair_dquery_kernel.cuh"
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile>
void launch_pair_dquery(const BwdArgs& p, cudaStream_t stream) {
    const PairSchedule schedule(p, ceil_div<int64_t>(p.seqlen_q, kPairRows), Tile::kAllKeyTiles, p.dbias_splits);

    PairBwdMaps maps{};
    maps.query = make_map(query_layout(p, p.query), {kPairHeadDim, 1, kPairRows, 1});
    maps.out = make_map(query_layout(p, p.out), {kPairHeadDim, 1, kPairRows, 1});
    maps.dout = make_map(query_layout(p, p.dout), {kPairHeadDim, 1, kPairRows, 1});
    maps.key = make_map(key_layout(p, p.key), {kPairHeadDim, 1, 64, 1});
    maps.value = make_map(key_layout(p, p.value), {kPairHeadDim, 1, 64, 1});
    maps.bias = make_map(dense_layout(p, p.bias), {kPairBiasCols, kPairRows, 1, 1});

    using Smem = PairDquerySmem<Tile>;
    const auto kernel = pair_dquery_kernel<Tile>;
    allow_shared_memory("the backward", p.head_dim, kernel, sizeof(Smem));
    kernel<<<grid_of(schedule.blocks(p)), Tile::kThreads, sizeof(Smem), stream>>>(p, schedule, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
    if (p.dbias_parts == nullptr) return;
    constexpr int kColTiles = Tile::kAllKeyTiles * 64 / kPairDbiasCols;
    pair_dbias_kernel<Tile><<<grid_of(p.dbias_tiles * kColTiles), 128, 0, stream>>>(p);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename Tile>
void launch_pair_dkey(const BwdArgs& p, cudaStream_t stream) {
    const PairSchedule schedule(p, ceil_div<int64_t>(p.seqlen_k, Tile::kKeys), ceil_div<int64_t>(p.seqlen_q, kPairRows));

    PairBwdMaps maps{};
    maps.query = make_map(query_layout(p, p.query), {kPairHeadDim, 1, kPairRows, 1});
    maps.dout = make_map(query_layout(p, p.dout), {kPairHeadDim, 1, kPairRows, 1});
    maps.key = make_map(key_layout(p, p.key), {kPairHeadDim, 1, Tile::kKeys, 1});
    maps.value = make_map(key_layout(p, p.value), {kPairHeadDim, 1, Tile::kKeys, 1});
    maps.bias = make_map(dense_layout(p, p.bias), {kPairBiasCols, kPairRows, 1, 1});

    using Smem = PairDkeySmem<Tile>;
    const auto kernel = pair_dkey_kernel<Tile>;
    allow_shared_memory("the backward", p.head_dim, kernel, Smem::bytes(kPairBwdLongest / kPairRows));
    kernel<<<grid_of(schedule.blocks(p)), Tile::kThreads, Smem::bytes(schedule.bias_tiles), stream>>>(p, schedule, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, int kHeadDim>
void run_pair_bwd(const BwdArgs& p, cudaStream_t stream) {
    static_assert(kHeadDim == kPairHeadDim);
    switch (ceil_div<int64_t>(p.seqlen_k, 128)) {
        case 1: launch_pair_dquery<PairDqueryTile<T, 1>>(p, stream); break;
        case 2: launch_pair_dquery<PairDqueryTile<T, 2>>(p, stream); break;
        case 3: launch_pair_dquery<PairDqueryTile<T, 3>>(p, stream); break;
    }
    using More = PairDkeyTile<T, 3>;
    using Fewer = PairDkeyTile<T, 2>;
    const bool fewer = fewer_fit_better(p.seqlen_k, Fewer::kKeys, More::kKeys);
    fewer ? launch_pair_dkey<Fewer>(p, stream) : launch_pair_dkey<More>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm90
