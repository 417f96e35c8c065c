// Shared-memory descriptors: SmemTiles as operands of wgmma.
//
// Slabs of 64 (32) columns have the 128-byte (64-byte) swizzle of wgmma and TMA, if tiles are aligned to 1024 bytes.
// Fields (PTX ISA, "Matrix Descriptor Format"): address, leading byte offset (from slab to slab), stride byte offset
// (from eight rows to the next eight), swizzle mode.
#pragma once

#include "shared_storage.cuh"
#include "smem_tile.cuh"

namespace flash_dmattn::cuda {

template <typename Tile>
class SmemDescriptor {
    static constexpr int kRowBytes = Tile::kSlabCols * 2, kSlabBytes = Tile::kRows * kRowBytes;
    static constexpr uint32_t kAddressMask = (1 << 18) - 1;  // the bits above it hold the CTA's rank in a cluster
    static constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
    static constexpr uint64_t kFields =
        kSwizzle << 62 | static_cast<uint64_t>(8 * kRowBytes / 16) << 32 | static_cast<uint64_t>(kSlabBytes / 16) << 16;
    static_assert(kSlabBytes % kSmemTileAlign == 0 && kSlabBytes / 16 < 1 << 14);

public:
    // The operand begins at first_row (a multiple of 8) and first_col (of 16) of the tile.
    __device__ __forceinline__ explicit SmemDescriptor(const Tile& tile, int first_row = 0, int first_col = 0)
        : descriptor_((kFields | ((smem_address(&tile) + first_row * kRowBytes) & kAddressMask) / 16) +
                      col_offset(first_col)) {}

    // The tile's extent along K.
    template <Major kMajor>
    static constexpr int kExtentK = kMajor == Major::kK ? Tile::kCols : Tile::kRows;
    // For one wgmma: 16 elements along K from `k` on, which are columns of a K-major operand and rows of an MN-major
    // one.
    template <Major kMajor>
    __device__ __forceinline__ uint64_t at_k(int k) const {
        return descriptor_ + (kMajor == Major::kK ? col_offset(k) : k * kRowBytes / 16);
    }

private:
    static __device__ __forceinline__ int col_offset(int col) {
        return (col / Tile::kSlabCols * kSlabBytes + col % Tile::kSlabCols * 2) / 16;
    }

    uint64_t descriptor_;
};

// Rounds an accumulator to the A operand of the next GEMM, in registers: its columns become that GEMM's K.
template <typename T, int kFragments>
__device__ __forceinline__ void to_a_operand(const float (&acc)[1][kFragments][4],
                                             uint32_t (&operand)[kFragments / 2][4]) {
#pragma unroll
    for (int k = 0; k < kFragments / 2; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = acc[0][2 * k + i / 2] + i % 2 * 2;
            operand[k][i] = pack<T>(x[0], x[1]);
        }
}

}  // namespace flash_dmattn::cuda
