// Sums over the diagonals of an accumulator, in the registers of a warp.
//
// A warp holds 16 rows of 8 kFragments columns in the layout of fragment.cuh. Row r and column c lie on the diagonal
// c - r. Lane (g, q), g = fragment_row() and q = lane % 4, holds the diagonals 8 n + 2 q + e - g of row g in fragment n,
// and those of row g + 8 one fragment earlier. The rows are added in four steps, of rows that lie 8, 1, 2 and 4 apart:
//
//   rows apart   the other row's elements of equal diagonals          values of a lane afterwards
//   8            the same lane, the next fragment                     (kFragments + 1) * 2
//   1            lane (g + 1, q), e = 1;  lane (g - 1, q - 1), e = 1  kFragments + 2
//   2            lane (g ^ 2, q +- 1)                                 half
//   4            lane (g ^ 4, q ^ 2)                                  half
#pragma once

#include "cuda/arch/fragment.cuh"
#include "cuda/arch/mma.cuh"

namespace flash_dmattn::cuda {

// The sums after the first step: element n + 1 is that for fragment n.
template <int kFragments>
using SumsOfRows8Apart = float[kFragments + 1][2];

template <int kFragments>
__device__ __forceinline__ void add_rows_8_apart(const float (&acc)[kFragments][4],
                                                 SumsOfRows8Apart<kFragments>& sums) {
#pragma unroll
    for (int n = -1; n < kFragments; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            sums[n + 1][e] = n < 0 ? acc[0][2 + e] : n + 1 == kFragments ? acc[n][e] : acc[n][e] + acc[n + 1][2 + e];
}

// The same of an accumulator in 16 bits, as the A operands of kOperands GEMMs. A has the first eight rows of fragment n
// and the last eight of fragment n + 1 side by side; B stacks two 8 x 8 identity matrices.
template <typename T, int kOperands>
__device__ __forceinline__ void add_rows_8_apart(const uint32_t (&operand)[kOperands][4],
                                                 SumsOfRows8Apart<2 * kOperands>& sums) {
    constexpr uint32_t kOne = std::is_same_v<T, half_t> ? 0x3c00 : 0x3f80;
    const int lane = reread_lane_id(), row = fragment_row(lane), col = fragment_col(lane);
    const uint32_t identity = row == col ? kOne : row == col + 1 ? kOne << 16 : 0;
    const auto rows_of = [&](int n, int h) { return n < 0 || n >= 2 * kOperands ? 0 : operand[n / 2][n % 2 * 2 + h]; };
#pragma unroll
    for (int n = -1; n < 2 * kOperands; n += 2) {
        const uint32_t a[4] = {rows_of(n, 0), rows_of(n + 1, 0), rows_of(n + 1, 1), rows_of(n + 2, 1)};
        float c[4] = {};
        mma_m16n8k16<T>(c, a, identity, identity);
        sums[n + 1][0] = c[0], sums[n + 1][1] = c[1];
        if (n + 1 < 2 * kOperands) sums[n + 2][0] = c[2], sums[n + 2][1] = c[3];
    }
}

// The sums that a lane has in the end: sums[i] is that of diagonal 32 i + first_diagonal(), so that the warp's sums[i]
// are those of 32 neighbouring diagonals. Beyond the accumulator they are 0.
template <int kFragments>
constexpr int kDiagonalSums = ceil_div(kFragments + 2, 4);

__device__ __forceinline__ int first_diagonal() {
    const int lane = reread_lane_id(), g = fragment_row(lane);
    return (g / 2 - 2) * 8 + ((fragment_col(lane) - g) & 7);
}

// Two lanes with the same diagonals add them: one keeps the even ones of its values, the other the odd ones.
template <int kCount>
__device__ __forceinline__ void add_and_halve(const float (&x)[kCount], float (&halved)[ceil_div(kCount, 2)],
                                              bool keeps_odd, int other_lane) {
#pragma unroll
    for (int i = 0; i < ceil_div(kCount, 2); ++i) {
        const float even = x[2 * i], odd = 2 * i + 1 < kCount ? x[2 * i + 1] : 0.f;
        halved[i] = (keeps_odd ? odd : even) + __shfl_sync(~0u, keeps_odd ? even : odd, other_lane);
    }
}

// The other steps. Registers need constant indices: a lane whose diagonals begin with a negative one moves its values
// up by one fragment at first. Then all lanes hold diagonals of [8 i - 16, 8 i - 8) in element i.
template <int kRowSums>
__device__ __forceinline__ void sum_diagonals(const float (&rows_8_apart)[kRowSums][2],
                                              float (&sums)[kDiagonalSums<kRowSums - 1>]) {
    constexpr int kCount = kRowSums + 1;
    const int lane = reread_lane_id(), g = fragment_row(lane), q = lane % 4;
    const auto lane_of = [](int g, int q) { return g * 4 + (q & 3); };
    float by_1[kCount], by_2[ceil_div(kCount, 2)];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const auto of_fragment = [&](int n, int e) {
            return n < -1 || n + 1 >= kRowSums ? 0.f : rows_8_apart[n + 1][e];
        };
        const auto shifted = [&](int e) { return 2 * q + e < g ? of_fragment(i - 1, e) : of_fragment(i - 2, e); };
        by_1[i] = shifted(0) + __shfl_sync(~0u, shifted(1), g % 2 == 0 ? lane_of(g + 1, q) : lane_of(g - 1, q - 1));
    }
    add_and_halve(by_1, by_2, g & 2, g & 2 ? lane_of(g - 2, q - 1) : lane_of(g + 2, q + 1));
    add_and_halve(by_2, sums, g & 4, lane_of(g ^ 4, q + 2));
}

// The sum of all diagonals, of what this lane has after add_rows_8_apart().
template <int kRowSums>
__device__ __forceinline__ float sum_lane(const float (&rows_8_apart)[kRowSums][2]) {
    float sums[2][2] = {};
#pragma unroll
    for (int n = 0; n < kRowSums; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[n % 2][e] += rows_8_apart[n][e];
    return (sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]);
}

}  // namespace flash_dmattn::cuda
