// The blocks of new rows of all sequences, of which packed sequences have different numbers.
#pragma once

#include "args.h"
#include "cuda/common/packed_blocks.cuh"

namespace flash_dmattn::cuda {

// Block number `index`, numbered as in common/packed_blocks.cuh.
template <int kRows>
struct RowBlock {
    int batch, first_row;  // in the sequence; beyond its rows where the number is unused

    static int64_t count(const KvCacheParams& p) { return count_packed_blocks(p.total_q, p.batch, kRows); }
    // All threads of a CTA call.
    __device__ RowBlock(const KvCacheArgs& p, int index) {
        int begun = 0;  // sequences whose first block has at most this number
        for (int first = 0; first < p.batch; first += blockDim.x) {
            const int b = first + static_cast<int>(threadIdx.x);
            begun += __syncthreads_count(b < p.batch && first_block(p, b) <= index);
        }
        batch = uniform(max(begun - 1, 0));
        const int block = uniform(index - first_block(p, batch));
        first_row = block >= 0 ? block * kRows : static_cast<int>(p.total_q);
    }

private:
    __device__ static int first_block(const KvCacheArgs& p, int batch) {
        const int total = static_cast<int>(p.total_q), fixed = batch * static_cast<int>(p.seqlen_q);
        const int rows_before = p.cu_seqlens_q != nullptr ? min(max(p.cu_seqlens_q[batch], 0), total) : fixed;
        return first_packed_block(rows_before, batch, kRows);
    }
    // Tells the compiler that all lanes have the same value, which then needs no register of each lane.
    __device__ static int uniform(int x) { return __reduce_max_sync(~0u, x); }
};

}  // namespace flash_dmattn::cuda
