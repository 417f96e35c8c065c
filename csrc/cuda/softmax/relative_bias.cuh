// Relative position biases: the entry of the table that a score reads, and the sums of the gradient.
#pragma once

#include <cfloat>

#include "cuda/arch/fragment.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/common/exact_sum.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// Where the scores of one sequence and query head lie in the table. Row i and key j have the position row_part(i) +
// key_part(j), in one dimension the distance of the key; clamp() maps it to an entry, also where the row or the key
// lies beyond the sequence. kOrMatrix: the view may be a matrix.
template <bool kOrMatrix>
class RelativePosition {
public:
    RelativePosition() = default;
    __device__ __forceinline__ RelativePosition(const RelativeBiasView& view, const Sequence& s)
        : grid_width_(static_cast<int>(view.grid_width)), inverse_grid_width_(view.inverse_grid_width) {
        const int radius = static_cast<int>(view.radius), width = grid_width_, height = view.grid_height;
        is_matrix_ = kOrMatrix && width > 0 && radius > 0;
        if (is_matrix_) {
            origin_ = low_ = 0;
            high_ = height * width - 1;
            return;
        }
        origin_ = width > 0 ? (height - 1) * (2 * width - 1) + width - 1 : s.rows - s.keys;
        low_ = width > 0 ? 0 : -radius;
        high_ = width > 0 ? (2 * height - 1) * (2 * width - 1) - 1 : radius;
    }
    __device__ __forceinline__ int row_part(int row) const {
        if (kOrMatrix && is_matrix_) return row * grid_width_;
        return grid_width_ > 0 ? origin_ + in_table(row) : origin_ - row;
    }
    __device__ __forceinline__ int key_part(int key) const {
        return grid_width_ > 0 && !(kOrMatrix && is_matrix_) ? -in_table(key) : key;
    }
    __device__ __forceinline__ int clamp(int position) const { return min(max(position, low_), high_) - low_; }
    // Whether all positions of a range read the same entry.
    __device__ __forceinline__ bool is_clamped(int first, int last) const { return last <= low_ || first >= high_; }

private:
    // y * (2 w - 1) + x of the token y * w + x.
    __device__ __forceinline__ int in_table(int token) const {
        const auto y = static_cast<int>(static_cast<unsigned>(token) * inverse_grid_width_ >> 40);
        return token + y * (grid_width_ - 1);
    }

    int grid_width_, origin_, low_, high_;
    uint64_t inverse_grid_width_;
    bool is_matrix_;
};

// The batch of the view that a batch element reads.
template <bool kOrMatrix>
__device__ __forceinline__ int64_t relative_bias_batch(const RelativeBiasView& view, int batch) {
    if (view.batches <= 1) return 0;
    return kOrMatrix && view.grid_height > 0 && view.radius > 1 ? batch / static_cast<int>(view.radius) : batch;
}

// The entries of a batch element and query head; null without a relative bias.
template <bool kOrMatrix = false>
__device__ __forceinline__ const float* relative_bias_entries(const AttentionParams& p, int batch, int head) {
    const RelativeBiasView& view = p.relative_bias;
    if (view.data == nullptr) return nullptr;
    return static_cast<const float*>(view.data) + relative_bias_batch<kOrMatrix>(view, batch) * view.batch_stride +
           shared_head(head, p.heads, view.heads) * view.head_stride;
}

// The bias of the scores of one sequence and query head.
template <bool kOrMatrix>
class RelativeBiasOf : public RelativePosition<kOrMatrix> {
public:
    RelativeBiasOf() = default;
    __device__ __forceinline__ RelativeBiasOf(const RelativeBiasView& view, const Sequence& s, const float* entries)
        : RelativePosition<kOrMatrix>(view, s), entries_(entries) {}

    // -inf where the entry hides the score.
    __device__ __forceinline__ float operator[](int position) const {
        const float entry = __ldg(entries_ + this->clamp(position));
        return entry <= -FLT_MAX ? -kInfinity : entry;
    }

private:
    const float* entries_;
};
using RelativeBias = RelativeBiasOf<false>;

// The gradient of the entries of one sequence and query head.
template <bool kOrMatrix>
class RelativeBiasGradientOf : public RelativePosition<kOrMatrix> {
    using RelativePosition<kOrMatrix>::clamp;

public:
    __device__ __forceinline__ RelativeBiasGradientOf(const BwdArgs& p, const Sequence& s, int head)
        : RelativePosition<kOrMatrix>(p.relative_bias, s) {
        const RelativeBiasView& view = p.relative_bias;
        const int64_t batch = relative_bias_batch<kOrMatrix>(view, s.batch);
        const int64_t first = (batch * view.heads + shared_head(head, p.heads, view.heads)) * p.relative_bias_entries;
        sums_ = static_cast<float*>(p.drelative_bias) + first;
        exact_sums_ = p.drelative_bias_exact == nullptr ? nullptr : p.drelative_bias_exact + first;
    }

    // Adds dx of one score.
    __device__ __forceinline__ void add(int position, float dx) const {
        add_to(sums_, exact_sums_, clamp(position), dx);
    }

    // Adds a tile of dx, rows x keys in 16 bits, summed over equal positions in one dimension. `first`: the position of
    // its first row and key. kWarps warps call, each with kInFlight reads in flight.
    //
    // The tile is divided into blocks of 8 x 8. A warp sums the blocks of four neighbouring diagonals at once, since
    // ldmatrix loads four neighbouring blocks.
    template <int kWarps, int kInFlight, typename Tile>
    __device__ __forceinline__ void add_tile(const Tile& tile, int warp, int first) const {
        using T = typename Tile::Element;
        constexpr int kRowBlocks = Tile::kRows / 8, kKeyBlocks = Tile::kCols / 8, kAtOnce = 4;
        constexpr int kLowest = -ceil_div(kRowBlocks, kAtOnce) * kAtOnce;  // diagonal: key block minus row block
        const bool is_clamped = this->is_clamped(first - Tile::kRows + 1, first + Tile::kCols - 1);
        float total = 0;
#pragma unroll 1
        for (int diagonal = kLowest + warp * kAtOnce; diagonal < kKeyBlocks; diagonal += kWarps * kAtOnce) {
            float sums[kAtOnce][2] = {};  // this lane's row and two keys of each block
            const int begin = max(0, 1 - kAtOnce - diagonal), end = min(kRowBlocks, kKeyBlocks - diagonal);
#pragma unroll 1
            for (int first_row = begin; first_row < end; first_row += kInFlight) {
                const int first_key = first_row + diagonal;
                uint32_t blocks[kInFlight][kAtOnce];
#pragma unroll
                for (int b = 0; b < kInFlight; ++b) {
                    // The block that this lane addresses.
                    const unsigned row = min(first_row + b, kRowBlocks - 1), lane = lane_id();
                    const unsigned key = min(max(first_key + b + static_cast<int>(lane / 8), 0), kKeyBlocks - 1);
                    ldmatrix_x4(blocks[b], smem_address(tile.data + Tile::offset(row * 8 + lane % 8, key)));
                }
                if (first_row + kInFlight > kRowBlocks || first_key < 0 ||
                    first_key + kInFlight + kAtOnce - 1 > kKeyBlocks) {
#pragma unroll
                    for (int b = 0; b < kInFlight; ++b)
#pragma unroll
                        for (int i = 0; i < kAtOnce; ++i)
                            if (first_row + b >= kRowBlocks || first_key + b + i < 0 || first_key + b + i >= kKeyBlocks)
                                blocks[b][i] = 0;
                }
#pragma unroll
                for (int b = 0; b < kInFlight; ++b)
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const float2 x = unpack<T>(blocks[b][i]);
                        sums[i][0] += x.x;
                        sums[i][1] += x.y;
                    }
            }
            if (is_clamped) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) total += sums[i][0] + sums[i][1];
            } else {
                add_blocks(sums, first + diagonal * 8);
            }
        }
        if (!is_clamped) return;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        if (lane_id() == 0) add(first, total);
    }

private:
    // Not inlined: unrolled loops over scores would take long to compile.
    static __device__ __noinline__ void add_to(float* sums, ExactSum* exact_sums, int entry, float dx) {
        if (exact_sums != nullptr) {
            exact_sums[entry].add(dx);
        } else {
            reduce_add(sums + entry, dx);
        }
    }

    // Adds four neighbouring 8 x 8 blocks. A lane holds row r = fragment_row() and keys k = fragment_col() and k + 1 of
    // each. Elements of equal k - r are summed by shuffles: first k + 1 of row r + 1 with k of row r, then rows r + 2,
    // r + 4 and r + 6.
    __device__ __forceinline__ void add_blocks(const float (&blocks)[4][2], int first) const {
        const int r = fragment_row(), k = fragment_col();
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float next = __shfl_down_sync(~0u, blocks[i][1], 4), beside = __shfl_up_sync(~0u, blocks[i][1], 5);
            sums[i] = blocks[i][0] + (r < 7 ? next : 0.f);
            const float by_two = __shfl_down_sync(~0u, sums[i], 9);
            if (r < 6 && k < 6) sums[i] += by_two;
            const float by_four = __shfl_down_sync(~0u, sums[i], 18);
            if (r < 4 && k < 4) sums[i] += by_four;
            // k + 1 of row 0 has no row before it: it belongs to k + 2 of row 1, and the last one to key 0 of row 1 of
            // the next block.
            const float last = i > 0 ? __shfl_up_sync(~0u, blocks[i - 1][1], 1) : 0.f;
            if (r == 1) sums[i] += k > 0 ? beside : last;
        }
        const bool is_leader = r < 2 || k == 0, is_last = r == 0 && k == 6;
        if (exact_sums_ != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (is_leader) exact_sums_[clamp(first + i * 8 + k - r)].add(sums[i]);
            if (is_last) exact_sums_[clamp(first + 31)].add(blocks[3][1]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (is_leader) reduce_add(sums_ + clamp(first + i * 8 + k - r), sums[i]);
        if (is_last) reduce_add(sums_ + clamp(first + 31), blocks[3][1]);
    }

    float* sums_;
    ExactSum* exact_sums_;
};
using RelativeBiasGradient = RelativeBiasGradientOf<false>;

// acc += relative bias. row_at(i): the row, in the sequence, of the accumulator's row 16 m + 8 h + fragment_row(), i = 2
// m + h; key_at(n, e): the key of column fragment_col() + e of fragment n.
template <int kMTiles, int kNTiles, typename Bias, typename RowAt, typename KeyAt>
__device__ __forceinline__ void add_relative_bias(float (&acc)[kMTiles][kNTiles][4], const Bias& bias,
                                                  const RowAt& row_at, const KeyAt& key_at) {
    int rows[kMTiles * 2];
#pragma unroll
    for (int i = 0; i < kMTiles * 2; ++i) rows[i] = bias.row_part(row_at(i));
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int key = bias.key_part(key_at(n, e));
#pragma unroll
            for (int i = 0; i < kMTiles * 2; ++i) acc[i / 2][n][i % 2 * 2 + e] += bias[rows[i] + key];
        }
}

// The entries that a block of scores of kRows rows and kCols columns reads in one dimension, in shared memory: those of
// kSize = kRows + kCols consecutive positions, ascending with the column. They are divided by the softmax scale: the
// accumulator of Q K^T starts from them.
//
// In the accumulator layout of fragment.cuh entry c - r + kRows - 1 belongs to row r and column c. A lane reads its two
// columns at once, from the copy in which they are aligned; row r + 8 reads what row r reads of the fragment before.
template <int kRows, int kCols>
struct alignas(8) RelativeBiasSegment {
    static constexpr int kSize = kRows + kCols;
    static constexpr int kStride = (kSize + 31) / 32 * 32 + 16;  // lanes of even and of odd rows read different banks

    float entries[2][kStride];  // the second one begins with the second entry

    __device__ __forceinline__ void store(int i, float entry) {
        entries[0][i] = entry;
        if (i > 0) entries[1][i - 1] = entry;
    }
    // This lane's offset in `entries`: of row r's first fragment.
    static __device__ __forceinline__ int lane_offset(int r, int first_col) {
        const int entry = first_col + fragment_col() - r - fragment_row() + kRows - 1;
        return entry % 2 == 0 ? entry : kStride + entry - 1;
    }
    // Sets the accumulator of a warp's 16 rows to the entries.
    template <int kFragments>
    __device__ __forceinline__ void load(float (&acc)[1][kFragments][4], int lane_offset) const {
#pragma unroll
        for (int n = -1; n < kFragments; ++n) {
            const float2 entry = *reinterpret_cast<const float2*>(entries[0] + lane_offset + n * 8);
            if (n >= 0) acc[0][n][0] = entry.x, acc[0][n][1] = entry.y;
            if (n + 1 < kFragments) acc[0][n + 1][2] = entry.x, acc[0][n + 1][3] = entry.y;
        }
    }
};

}  // namespace flash_dmattn::cuda
