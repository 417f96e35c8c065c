// The backward's workspace: semaphores, and dQ in float32.
#pragma once

#include "cuda/common/dquery_tiles.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// Whether the main kernel stores the gradient of a dense bias.
constexpr __host__ __device__ bool stores_dbias(const BwdArgs& p) {
    return p.dense_dbias == DenseDbias::kDirect || p.dense_dbias == DenseDbias::kSerialReduce;
}

// The number of batch elements, of consecutive work tiles, that reduce the gradient of a dense bias serially, else 1.
constexpr __host__ __device__ int64_t serial_group_size(const BwdArgs& p) {
    return p.dense_dbias == DenseDbias::kSerialReduce ? p.dbias.batch_group_size : 1;
}

// The semaphores of a tile of dquery_accum, one for each MMA warpgroup.
__device__ __forceinline__ int32_t* dquery_semaphores(const BwdArgs& p, int64_t tile) {
    return p.dquery_semaphores + tile * kBwdConsumerWarpgroups;
}

// Serial reduction of dbias: the progress of a work tile (dense_dbias.cuh).
__device__ __forceinline__ int32_t* dbias_progress(const BwdArgs& p, int work_index) {
    return p.progress_counters + work_index;
}

// The units that launches divide, contiguous in dquery_accum: a KV head of one batch element, or with variable length a
// KV head of all sequences.
constexpr int64_t count_launch_units(const BwdParams& p) {
    return p.kv_heads * (p.cu_seqlens_q == nullptr ? p.batch : 1);
}

// The head and the batch element of an index over both, in the order of dquery_accum: batch element before head, or
// with variable length head before sequence.
struct HeadAndBatch {
    int head, batch;

    __device__ HeadAndBatch(const BwdArgs& p, int index, int heads) {
        const bool is_varlen = p.cu_seqlens_q != nullptr;
        const int batches = static_cast<int>(p.batch);
        head = is_varlen ? index / batches : index % heads;
        batch = is_varlen ? index % batches : index / heads;
    }
};

// One CTA for each n_block of each KV head and batch element.
constexpr int64_t count_bwd_work_tiles(const BwdParams& p, int keys) {
    return ceil_div<int64_t>(p.seqlen_k, keys) * p.kv_heads * p.batch;
}

// A tile of dquery_accum in accumulator order: [warp][fragment][lane][4], so that each warp adds contiguous memory.
template <typename Traits>
struct DqueryLayout {
    static constexpr int kFragments = Traits::kDqN / 8, kWarp = kFragments * 32 * 4,
                         kSize = Traits::kConsumerWarpgroups * 4 * kWarp;
    static_assert(kSize == Traits::kRows * Traits::kHeadDim);

    static __device__ __forceinline__ int offset(int warp, int n, int lane) {
        return warp * kWarp + (n * 32 + lane) * 4;
    }
};

}  // namespace flash_dmattn::cuda::sm90
