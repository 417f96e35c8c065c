// Tiles in shared memory as operands of wgmma: the descriptors by which it reads them.
//
// SmemTile's slabs of 64 (32) columns are what wgmma and the copy engine call a swizzle of 128 (64) bytes, if tiles lie on
// 1024 bytes. Fields, PTX ISA "Matrix Descriptor Format": address, the stride between slabs where they lie beside each
// other (leading), the stride between eight rows and the next, the swizzle.
#pragma once

#include "fragment.cuh"
#include "smem_tile.cuh"
#include "wgmma.cuh"

namespace flash_dmattn::cuda {

constexpr int kSmemTileAlign = 1024;  // bytes

template <typename Tile>
class SmemDescriptor {
    static constexpr int kRowBytes = Tile::kSlabCols * 2, kSlabBytes = Tile::kRows * kRowBytes;
    static constexpr uint32_t kAddressMask = (1 << 18) - 1;  // in a cluster the rank stands above it
    static constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
    static constexpr uint64_t kFields =
        kSwizzle << 62 | static_cast<uint64_t>(8 * kRowBytes / 16) << 32 | static_cast<uint64_t>(kSlabBytes / 16) << 16;
    static_assert(kSlabBytes % kSmemTileAlign == 0 && kSlabBytes / 16 < 1 << 14);

public:
    __device__ __forceinline__ explicit SmemDescriptor(const Tile& tile, int first_row = 0)
        : descriptor_(kFields | ((smem_address(&tile) + first_row * kRowBytes) & kAddressMask) / 16) {}

    // Of 16 columns from `col` on, along which a product sums; the rows are the product's.
    __device__ __forceinline__ uint64_t across(int col) const {
        return descriptor_ + (col / Tile::kSlabCols * kSlabBytes + col % Tile::kSlabCols * 2) / 16;
    }
    // Of 16 rows from `row` on, along which a product sums; the columns, from `col` on, are the product's: kTransposed.
    __device__ __forceinline__ uint64_t down(int row, int col = 0) const { return across(col) + row * kRowBytes / 16; }

private:
    uint64_t descriptor_;
};

// An accumulator, rounded, to the left operand of a product, in registers; its columns are what the product sums over.
template <typename T, int kTiles>
__device__ __forceinline__ void to_a_operand(const float (&pairs)[1][kTiles][4], uint32_t (&operand)[kTiles / 2][4]) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = pairs[0][2 * k + i / 2] + i % 2 * 2;
            operand[k][i] = pack<T>(pair[0], pair[1]);
        }
}

}  // namespace flash_dmattn::cuda
