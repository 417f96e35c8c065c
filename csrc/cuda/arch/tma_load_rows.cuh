// Tiles of rows by the copy engine.
#pragma once

#include <cuda.h>

#include "tma.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// The rows of one head from `row` of the tensor on; the barrier is told of their bytes. Of variable length the rows of all
// sequences follow each other, as those of one batch element. `to_row`: of the tile.
template <typename Tile>
__device__ __forceinline__ void copy_rows(Tile& to, const CUtensorMap& map, uint32_t barrier, const AttentionParams& p,
                                          const Sequence& s, int row, int head, int to_row = 0) {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab)
        tma_load_4d(smem_address(to.data + (slab * Tile::kRows + to_row) * Tile::kSlabCols), &map, barrier,
                    slab * Tile::kSlabCols, head, row, p.cu_seqlens_q == nullptr ? s.batch : 0);
}

}  // namespace flash_dmattn::cuda
