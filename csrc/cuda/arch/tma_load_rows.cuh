// TMA loads of Q, K, V or dO tiles.
#pragma once

#include <cuda.h>

#include "tma.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// Loads rows of one head, from `row` of the tensor on, to the tile's rows from `to_row` on: one box of the map for each
// slab. The barrier must already expect their bytes. With variable length all sequences are one batch element.
template <typename Tile>
__device__ __forceinline__ void tma_load_rows(Tile& to, const CUtensorMap& map, uint32_t barrier,
                                              const AttentionParams& p, const Sequence& s, int row, int head,
                                              int to_row = 0) {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab)
        tma_load_4d(smem_address(to.data + (slab * Tile::kRows + to_row) * Tile::kSlabCols), &map, barrier,
                    slab * Tile::kSlabCols, head, row, p.cu_seqlens_q == nullptr ? s.batch : 0);
}

}  // namespace flash_dmattn::cuda
