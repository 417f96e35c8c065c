// Relative position biases: the entry of the table that a score reads, and the sums of the gradient.
#pragma once

#include <cfloat>
#include <climits>

#include "cuda/arch/fragment.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/common/exact_sum.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"
#include "diagonal_sums.cuh"

namespace flash_dmattn::cuda {

// If all scores of a block read the same entry, sm90 kernels leave it out of them: the forward shares it with the base of
// the softmax, the backward subtracts it from lse. But only up to this absolute value: a larger one would round these.
constexpr float kMaxSharedBias = 128;

// y * (2 w - 1) + x of the token y * w + x of a grid: the entry of two tokens is the difference of theirs, plus that of
// equal tokens.
__device__ __forceinline__ int token_in_table(int token, int grid_width, uint64_t inverse_grid_width) {
    const auto y = static_cast<int>(static_cast<unsigned>(token) * inverse_grid_width >> 40);
    return token + y * (grid_width - 1);
}
__device__ __forceinline__ int token_in_table(int token, const RelativeBiasView& view) {
    return token_in_table(token, static_cast<int>(view.grid_width), view.inverse_grid_width);
}

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
        is_matrix_ = kOrMatrix && static_cast<int>(view.batch_group_size) > 0;  // view.is_matrix() in 32 bits
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
        return grid_width_ > 0 ? origin_ + token_in_table(row, grid_width_, inverse_grid_width_) : origin_ - row;
    }
    __device__ __forceinline__ int key_part(int key) const {
        return grid_width_ > 0 && !(kOrMatrix && is_matrix_) ? -token_in_table(key, grid_width_, inverse_grid_width_)
                                                             : key;
    }
    __device__ __forceinline__ int clamp(int position) const { return min(max(position, low_), high_) - low_; }
    // The end of the table that all positions of a range read, -1 or 1; 0 if they read different entries.
    __device__ __forceinline__ int clamped_end(int first, int last) const {
        return last <= low_ ? -1 : first >= high_ ? 1 : 0;
    }

protected:
    int low_, high_;
    int grid_width_, origin_;
    bool is_matrix_;

private:
    uint64_t inverse_grid_width_;
};

// The batch of the view that a batch element reads.
template <bool kOrMatrix>
__device__ __forceinline__ int64_t relative_bias_batch(const RelativeBiasView& view, int batch) {
    if (view.batches <= 1) return 0;
    return kOrMatrix && view.batch_group_size > 1 ? batch / static_cast<int>(view.batch_group_size) : batch;
}

// The entries of a batch element and query head; null without a relative bias.
template <bool kOrMatrix = false>
__device__ __forceinline__ const float* relative_bias_entries(const AttentionParams& p, int batch, int head) {
    const RelativeBiasView& view = p.relative_bias;
    if (view.data == nullptr) return nullptr;
    return static_cast<const float*>(view.data) + relative_bias_batch<kOrMatrix>(view, batch) * view.batch_stride +
           shared_head(head, p.heads, view.heads) * view.head_stride;
}

// Whether an entry masks a score.
__device__ __forceinline__ bool masks(float entry) { return entry <= -FLT_MAX; }

// The bias of the scores of one sequence and query head.
template <bool kOrMatrix>
class RelativeBiasOf : public RelativePosition<kOrMatrix> {
public:
    RelativeBiasOf() = default;
    __device__ __forceinline__ RelativeBiasOf(const RelativeBiasView& view, const Sequence& s, const float* entries)
        : RelativePosition<kOrMatrix>(view, s), entries_(entries) {}

    __device__ __forceinline__ const float* entry(int position) const { return entries_ + this->clamp(position); }
    __device__ __forceinline__ float load(int position) const { return __ldg(entry(position)); }
    // -inf where the entry masks the score.
    static __device__ __forceinline__ float masked(float entry) { return masks(entry) ? -kInfinity : entry; }
    __device__ __forceinline__ float operator[](int position) const { return masked(load(position)); }

private:
    const float* entries_;
};
using RelativeBias = RelativeBiasOf<false>;

// Entries of a table are visible at some of the distances [first, last], and at none outside. first is INT_MIN and last
// INT_MAX where the table's end is visible, which all farther keys read.
struct DistanceRange {
    int first, last;
};

// The rows and keys that a relative bias leaves visible to each other, of one sequence and query head.
class VisibleDistances {
public:
    struct Range {
        int begin, end;
        __device__ bool empty() const { return begin >= end; }
    };

    // ranges: FwdArgs or BwdArgs::visible_distances
    __device__ __forceinline__ VisibleDistances(const AttentionParams& p, const DistanceRange* ranges,
                                                const Sequence& s, int head)
        : rows_(s.rows), keys_(s.keys) {
        if (ranges == nullptr) return;
        const RelativeBiasView& view = p.relative_bias;
        range_ =
            ranges[relative_bias_batch<false>(view, s.batch) * view.heads + shared_head(head, p.heads, view.heads)];
    }
    // The keys outside which no row of [first_row, last_row] sees any.
    __device__ __forceinline__ Range keys_of(int first_row, int last_row) const {
        const int64_t offset = int64_t{keys_} - rows_;
        return range(first_row + offset + range_.first, last_row + offset + range_.last, keys_);
    }
    // The rows outside which none sees a key of [first_key, last_key].
    __device__ __forceinline__ Range rows_of(int first_key, int last_key) const {
        const int64_t offset = int64_t{keys_} - rows_;
        return range(first_key - offset - range_.last, last_key - offset - range_.first, rows_);
    }

private:
    // [first, last] among `size`.
    static __device__ __forceinline__ Range range(int64_t first, int64_t last, int size) {
        return {static_cast<int>(min(max(first, int64_t{0}), int64_t{size})),
                static_cast<int>(min(max(last + 1, int64_t{0}), int64_t{size}))};
    }

    DistanceRange range_{INT_MIN, INT_MAX};
    int rows_, keys_;
};

// The gradient of the entries of one sequence and query head.
template <bool kOrMatrix>
class RelativeBiasGradientOf : public RelativePosition<kOrMatrix> {
    using RelativePosition<kOrMatrix>::clamp, RelativePosition<kOrMatrix>::low_, RelativePosition<kOrMatrix>::high_;
    using RelativePosition<kOrMatrix>::grid_width_, RelativePosition<kOrMatrix>::origin_;
    using RelativePosition<kOrMatrix>::is_matrix_;

public:
    RelativeBiasGradientOf() = default;
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

    // Adds the sum of dx over the lanes of a warp, of scores that read the same entry.
    __device__ __forceinline__ void add_of_warp(int position, float dx) const {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) dx += __shfl_xor_sync(~0u, dx, step);
        if (lane_id() == 0) add(position, dx);
    }

    // Adds an accumulator of dx, 16 rows x 8 kFragments keys, of a matrix or in one dimension. A warp calls.
    template <int kFragments>
    __device__ __forceinline__ void add_fragments(const float (&dx)[kFragments][4], int first_row,
                                                  int first_key) const {
        if (kOrMatrix && is_matrix_) {
            const int position = this->row_part(first_row + fragment_row()) + first_key + fragment_col();
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (dx[n][i] != 0) add(position + i / 2 * 8 * grid_width_ + n * 8 + i % 2, dx[n][i]);
            return;
        }
        const int position = this->row_part(first_row) + this->key_part(first_key);
        SumsOfRows8Apart<kFragments> rows_8_apart;
        add_rows_8_apart(dx, rows_8_apart);
        if (this->clamped_end(position - 15, position + kFragments * 8 - 1) != 0)
            return add_of_warp(position, sum_lane(rows_8_apart));
        float sums[kDiagonalSums<kFragments>];
        sum_diagonals(rows_8_apart, sums);
#pragma unroll
        for (int i = 0; i < kDiagonalSums<kFragments>; ++i)
            if (sums[i] != 0) add(position + first_diagonal() + 32 * i, sums[i]);
    }

    // Adds sum_diagonals() of an accumulator of dx, keys x rows, in one dimension, without a call: wgmma may be in
    // flight. first: the position of its first key and row. What is clamped is added to `ends`, this lane's share of
    // the table's two ends, for add_ends(). A warp calls.
    template <int kSums>
    __device__ __forceinline__ void add_diagonals(const float (&sums)[kSums], int first, float (&ends)[2]) const {
        const int last_entry = high_ - low_, entry = first - first_diagonal() - low_;
        const auto is_inside = [&](int i) { return entry - 32 * i > 0 && entry - 32 * i < last_entry; };
        float* const to = sums_ + entry;
        if (exact_sums_ == nullptr && __all_sync(~0u, is_inside(0) && is_inside(kSums - 1))) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) reduce_add(to - 32 * i, sums[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            if (!is_inside(i)) {
                add_clamped(sums[i], entry - 32 * i > 0, ends);
            } else if (exact_sums_ != nullptr) {
                exact_sums_[entry - 32 * i].add(sums[i]);
            } else {
                reduce_add(to - 32 * i, sums[i]);
            }
        }
    }
    // The same for a grid, of an accumulator of keys x rows in which runs of 8 kRunFragments rows, and all keys, are in
    // one row of the grid each. first_row, first_key: of the accumulator, in the sequence.
    template <int kRunFragments, int kFragments>
    __device__ __forceinline__ void add_grid_diagonals(const float (&acc)[kFragments][4], int first_row,
                                                       int first_key) const {
        const int key = this->key_part(first_key);
#pragma unroll
        for (int n = 0; n < kFragments; n += kRunFragments) {
            SumsOfRows8Apart<kRunFragments> rows_8_apart;
            add_rows_8_apart(reinterpret_cast<const float (&)[kRunFragments][4]>(acc[n]), rows_8_apart);
            float sums[kDiagonalSums<kRunFragments>];
            sum_diagonals(rows_8_apart, sums);
            const int first = this->row_part(first_row + n * 8) + key + first_diagonal();
#pragma unroll
            for (int i = 0; i < kDiagonalSums<kRunFragments>; ++i) {
                const int entry = first + 32 * i;
                if (entry < 0 || entry > high_) continue;  // beyond the accumulator
                if (exact_sums_ != nullptr) {
                    exact_sums_[entry].add(sums[i]);
                } else {
                    reduce_add(sums_ + entry, sums[i]);
                }
            }
        }
    }
    // The same for a grid of any width, of a tile of dx in shared memory, rows x keys from first_row and first_key on,
    // which holds 0 outside of the sequence. The kThreads threads of a CTA call: each sums diagonals. Tokens that are
    // y * w + x apart, 0 <= x < w, have the offset (y, x), or (y + 1, x - w) where the row's token is in one of the
    // first x columns of the grid.
    template <int kThreads, typename Tile>
    __device__ __forceinline__ void add_grid_tile(const Tile& tile, int first_row, int first_key) const {
        const int width = grid_width_;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows + Tile::kCols - 1; i += kThreads) {
            const int first_diagonal = i - (Tile::kCols - 1);  // row - key, in the tile
            const int distance = first_row - first_key + first_diagonal;
            const int y = distance / width - (distance % width < 0), x = distance - y * width;
            float sum = 0, sum_of_first_columns = 0;
            int column = first_row % width;
#pragma unroll 4
            for (int row = 0; row < Tile::kRows; ++row) {
                const int key = row - first_diagonal;
                const float dx = key >= 0 && key < Tile::kCols ? static_cast<float>(tile.at(row, key)) : 0.f;
                (column < x ? sum_of_first_columns : sum) += dx;
                column = column + 1 < width ? column + 1 : 0;
            }
            const int entry = origin_ + y * (2 * width - 1) + x;
            if (sum != 0) add(entry, sum);
            if (sum_of_first_columns != 0) add(entry + width - 1, sum_of_first_columns);
        }
    }
    // The same for all kinds, of a tile from the sequence's first row and key on.
    template <int kThreads, typename Tile>
    __device__ __forceinline__ void add_tile(const Tile& tile) const {
        if (grid_width_ > 0 && !is_matrix_) return add_grid_tile<kThreads>(tile, 0, 0);
        if (kOrMatrix && is_matrix_) {
            for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += kThreads) {
                const int row = i / Tile::kCols, key = i % Tile::kCols;
                const float dx = tile.at(row, key);
                if (dx != 0) add(this->row_part(row) + this->key_part(key), dx);
            }
            return;
        }
        for (int i = threadIdx.x; i < Tile::kRows + Tile::kCols - 1; i += kThreads) {
            const int first_diagonal = i - (Tile::kCols - 1);  // row - key
            float sum = 0;
            for (int row = max(first_diagonal, 0); row < min(first_diagonal + Tile::kCols, Tile::kRows); ++row)
                sum += tile.at(row, row - first_diagonal);
            if (sum != 0) add(origin_ - first_diagonal, sum);
        }
    }
    static __device__ __forceinline__ void add_clamped(float dx, bool is_high, float (&ends)[2]) {
        ends[is_high] += dx;
    }
    __device__ __forceinline__ void add_ends(float (&ends)[2]) const {
        add_of_warp(low_, ends[0]);
        add_of_warp(high_, ends[1]);
        ends[0] = ends[1] = 0;
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

    float* sums_;
    ExactSum* exact_sums_;
};
using RelativeBiasGradient = RelativeBiasGradientOf<false>;

// acc += relative bias. row_at(i): the row, in the sequence, of the accumulator's row 16 m + 8 h + fragment_row(), i =
// 2 m + h; key_at(n, e): the key of column fragment_col() + e of fragment n.
template <int kMFragments, int kNFragments, typename Bias, typename RowAt, typename KeyAt>
__device__ __forceinline__ void add_relative_bias(float (&acc)[kMFragments][kNFragments][4], const Bias& bias,
                                                  const RowAt& row_at, const KeyAt& key_at) {
    int rows[kMFragments * 2];
#pragma unroll
    for (int i = 0; i < kMFragments * 2; ++i) rows[i] = bias.row_part(row_at(i));
#pragma unroll
    for (int n = 0; n < kNFragments; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int key = bias.key_part(key_at(n, e));
#pragma unroll
            for (int i = 0; i < kMFragments * 2; ++i) acc[i / 2][n][i % 2 * 2 + e] += bias[rows[i] + key];
        }
}

}  // namespace flash_dmattn::cuda
