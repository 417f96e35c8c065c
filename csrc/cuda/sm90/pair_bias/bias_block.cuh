// Biases of the pair bias kernels in shared memory, and how an MMA warp reads them.
#pragma once

#include "cuda/arch/fragment.cuh"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairBiasCols = 64;  // 16-bit elements of a row of a tile

// 64 x 64 biases, as TMA writes them: in T one tile; in float32 two tiles of 32 keys, because TMA loads a float32 bias
// as a matrix of twice as many 16-bit elements.
template <typename T, typename Bias>
struct PairBiasSmemBlock {
    using Tile = SmemTile<T, 64, kPairBiasCols>;
    static constexpr int kTiles = sizeof(Bias) / sizeof(T);
    Tile tiles[kTiles];

    // Element `index` of an array of blocks that are read tile by tile.
    static __device__ __forceinline__ Tile& tile(PairBiasSmemBlock* blocks, int index) {
        return blocks[index / kTiles].tiles[index % kTiles];
    }
};

// This lane's biases of 16 rows, for scores [rows, keys]. `block` counts the blocks along the keys.
template <typename T, typename Bias>
class PairBiasRowReader {
public:
    using Block = PairBiasSmemBlock<T, Bias>;

    // row: the first of 16 in the blocks, a multiple of 8.
    __device__ PairBiasRowReader(const Block& first, int row)
        : lane_(opaque(first.tiles[0].ldmatrix_lane_a() + row * Block::Tile::kSlabCols * sizeof(T))) {}

    // Biases of accumulator fragments n and n + 1, n even: b[i] belongs to fragment n + i / 2 and row half i % 2.
    __device__ __forceinline__ void load(float2 (&b)[4], int block, int n) const {
        uint32_t packed[4];
        Block::Tile::load_a(packed, lane_ + block * sizeof(Block), 0, n * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = unpack<T>(packed[i]);
    }

private:
    const uint32_t lane_;  // address for ldmatrix in the first block
};

template <typename T>
class PairBiasRowReader<T, float> {
public:
    using Block = PairBiasSmemBlock<T, float>;

    __device__ PairBiasRowReader(const Block& first, int row)
        : row_(reinterpret_cast<const float*>(&first) + (row + fragment_row()) * kTileKeys + fragment_col() % 4),
          chunk_(fragment_col() / 4 ^ fragment_row()) {}

    __device__ __forceinline__ void load(float2 (&b)[4], int block, int n) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int col = n % 4 * 8 + i / 2 * 8;  // n is even: both fragments are in the same tile
            const int tile = block * Block::kTiles + n / 4;
            b[i] =
                *reinterpret_cast<const float2*>(row_ + (tile * 64 + i % 2 * 8) * kTileKeys + (col / 4 ^ chunk_) * 4);
        }
    }

private:
    static constexpr int kTileKeys = 32;
    const float* const row_;
    const int chunk_;  // of 16 bytes, permuted by the row
};

// This lane's biases of 16 keys, for transposed scores [keys, rows]. `block` counts the blocks along the rows.
template <typename T, typename Bias>
class PairBiasKeyReader {
public:
    using Block = PairBiasSmemBlock<T, Bias>;

    // key: the first of 16 in the blocks, a multiple of 16.
    __device__ PairBiasKeyReader(const Block& first, int key)
        : lane_(opaque(first.tiles[0].address(lane_id() % 8 + lane_id() / 16 * 8, key / 8 + lane_id() / 8 % 2))) {}

    // Biases of accumulator fragments n and n + 1, n even: b[i] belongs to fragment n + i / 2 and key half i % 2.
    __device__ __forceinline__ void load(float2 (&b)[4], int block, int n) const {
        uint32_t packed[4];
        ldmatrix_x4_trans(packed, lane_ + block * sizeof(Block) + n * 8 * kPairBiasCols * sizeof(T));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = unpack<T>(packed[i]);
    }

private:
    const uint32_t lane_;  // address for ldmatrix in the first block
};

template <typename T>
class PairBiasKeyReader<T, float> {
public:
    using Block = PairBiasSmemBlock<T, float>;

    __device__ PairBiasKeyReader(const Block& first, int key)
        : col_(reinterpret_cast<const float*>(&first) + (key / kTileKeys * 64 + fragment_col()) * kTileKeys +
               fragment_row() % 4),
          chunk_((key % kTileKeys + fragment_row()) / 4 ^ fragment_col()) {}

    __device__ __forceinline__ void load(float2 (&b)[4], int block, int n) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const rows = col_ + (block * Block::kTiles * 64 + (n + i / 2) * 8) * kTileKeys;
            const int chunk = chunk_ ^ i % 2 * 2;  // eight keys are two chunks
            b[i] = {rows[chunk * 4], rows[kTileKeys + (chunk ^ 1) * 4]};
        }
    }

private:
    static constexpr int kTileKeys = 32;
    const float* const col_;
    const int chunk_;  // of 16 bytes, permuted by the first row
};

}  // namespace flash_dmattn::cuda::sm90
