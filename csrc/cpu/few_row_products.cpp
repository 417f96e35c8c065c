// Products of few rows, as in decoding: register-blocked, without a copy of the large operand.
#include <algorithm>

#include "linalg.h"
#include "vec.h"

namespace flash_dmattn {
namespace {

// Rows of a register block in a product of few rows.
constexpr int kBlockRows = Vec<float>::size() == 16 ? 4 : 2;

// `count` elements of a row as a vector, by default as many as it holds.
template <typename acc_t, typename T>
Vec<acc_t> load_vector(const T* from, int64_t count = Vec<acc_t>::size()) {
    constexpr int64_t width = Vec<acc_t>::size();
    if constexpr (std::is_same_v<T, acc_t>) {
        return count == width ? Vec<acc_t>::loadu(from) : Vec<acc_t>::loadu(from, count);
    } else {
        if constexpr (sizeof(T) == 2 && std::is_same_v<acc_t, float>) {
            Vec<float> widened;
            if (count == width) return at::vec::load_to_float(from, widened), widened;
        }
        acc_t some[width] = {};
        std::copy_n(from, count, some);
        return Vec<acc_t>::loadu(some);
    }
}

// Replaces n vectors by their n horizontal sums, packed into the first vectors. All sums have the same order:
// neighbours first.
template <int n, typename acc_t>
__attribute__((always_inline)) inline void sum_each(Vec<acc_t> (&x)[n]) {
    int count = n;
#pragma GCC unroll 8
    for (int64_t pieces = Vec<acc_t>::size(); pieces > 1; pieces /= 2) {
        const bool alone = count == 1;
        count = alone ? 1 : count / 2;
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) {
            const auto [even, odd] = at::vec::deinterleave2<acc_t>(x[alone ? 0 : 2 * i], x[alone ? 0 : 2 * i + 1]);
            x[i] = even + odd;
        }
    }
}

// c_ij = alpha * <a_i, b_j> for kRows rows from i and kCols columns from j.
template <int kRows, int kCols, typename acc_t, typename T>
void dot_block(const Matrix<acc_t>& a, const Matrix<const T>& b, acc_t alpha, const Matrix<acc_t>& c, int64_t i,
               int64_t j) {
    constexpr int64_t width = Vec<acc_t>::size();
    Vec<acc_t> sums[kRows * kCols];
    const acc_t* rows[kRows];
    const T* cols[kCols];
#pragma GCC unroll 16
    for (int x = 0; x < kRows; ++x) rows[x] = a.row(i + x);
#pragma GCC unroll 16
    for (int y = 0; y < kCols; ++y) cols[y] = b.row(j + y);
#pragma GCC unroll 16
    for (int z = 0; z < kRows * kCols; ++z) sums[z] = Vec<acc_t>(0);
    const auto add_pieces = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
        Vec<acc_t> factors[kCols];
#pragma GCC unroll 16
        for (int y = 0; y < kCols; ++y) factors[y] = load_vector<acc_t>(cols[y] + d, count);
#pragma GCC unroll 16
        for (int x = 0; x < kRows; ++x) {
            const auto factor = load_vector<acc_t>(rows[x] + d, count);
#pragma GCC unroll 16
            for (int y = 0; y < kCols; ++y)
                sums[x * kCols + y] = at::vec::fmadd(factor, factors[y], sums[x * kCols + y]);
        }
    };
    const int64_t whole = a.cols / width * width;
    if (whole < a.cols)
        add_pieces(whole, a.cols - whole);  // first, so that the sums are in registers after the last whole vectors
    for (int64_t d = 0; d < whole; d += width) add_pieces(d, width);
    sum_each(sums);
    acc_t products[std::max<int64_t>(kRows * kCols, width)];
#pragma GCC unroll 16
    for (int64_t z = 0; z < kRows * kCols; z += width) (sums[z / width] * Vec<acc_t>(alpha)).store(products + z);
#pragma GCC unroll 16
    for (int x = 0; x < kRows; ++x) std::copy_n(products + x * kCols, kCols, c.row(i + x) + j);
}

template <int kCols, typename acc_t, typename T>
void dot_columns(const Matrix<acc_t>& a, const Matrix<const T>& b, acc_t alpha, const Matrix<acc_t>& c, int64_t j) {
    int64_t i = 0;
    for (; i + kBlockRows <= a.rows; i += kBlockRows) dot_block<kBlockRows, kCols>(a, b, alpha, c, i, j);
    for (; i + 2 <= a.rows; i += 2) dot_block<2, kCols>(a, b, alpha, c, i, j);
    if (i < a.rows) dot_block<1, kCols>(a, b, alpha, c, i, j);
}

// Prefetches rows that are far apart, which the hardware prefetcher does not recognize.
template <typename T>
void prefetch(const Matrix<const T>& rows, int64_t first, int64_t end) {
    for (int64_t i = first; i < std::min(end, rows.rows); ++i) {
        const char* row = reinterpret_cast<const char*>(rows.row(i));
        const int64_t size = rows.cols * static_cast<int64_t>(sizeof(T));
        for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
}

// c += w b for kRows rows from i and kVectors vectors of columns from d. A single vector may have `count` elements
// only.
template <int kRows, int kVectors, typename acc_t, typename T>
void weighted_block(const Matrix<acc_t>& w, const Matrix<const T>& b, const Matrix<acc_t>& c, int64_t i, int64_t d,
                    int64_t count) {
    constexpr int64_t width = Vec<acc_t>::size();
    if (kVectors > 1) count = width;
    Vec<acc_t> sums[kRows * kVectors];
    const acc_t* weights[kRows];
#pragma GCC unroll 16
    for (int x = 0; x < kRows; ++x) {
        weights[x] = w.row(i + x);
#pragma GCC unroll 16
        for (int y = 0; y < kVectors; ++y)
            sums[x * kVectors + y] = load_vector<acc_t>(c.row(i + x) + d + y * width, count);
    }
    const auto add_row = [&](int64_t j, Vec<acc_t>* to) __attribute__((always_inline)) {
        Vec<acc_t> factors[kVectors];
#pragma GCC unroll 16
        for (int y = 0; y < kVectors; ++y) factors[y] = load_vector<acc_t>(b.row(j) + d + y * width, count);
#pragma GCC unroll 16
        for (int x = 0; x < kRows; ++x) {
            const Vec<acc_t> weight(weights[x][j]);
#pragma GCC unroll 16
            for (int y = 0; y < kVectors; ++y)
                to[x * kVectors + y] = at::vec::fmadd(weight, factors[y], to[x * kVectors + y]);
        }
    };
    int64_t j = 0;
    if constexpr (kRows == 1) {  // two sets of sums hide the latency of the additions
        Vec<acc_t> others[kVectors];
#pragma GCC unroll 16
        for (int y = 0; y < kVectors; ++y) others[y] = Vec<acc_t>(0);
        for (; j + 2 <= b.rows; j += 2) {
            add_row(j, sums);
            add_row(j + 1, others);
        }
#pragma GCC unroll 16
        for (int y = 0; y < kVectors; ++y) sums[y] = sums[y] + others[y];
    }
    for (; j < b.rows; ++j) add_row(j, sums);
#pragma GCC unroll 16
    for (int x = 0; x < kRows; ++x) {
#pragma GCC unroll 16
        for (int y = 0; y < kVectors; ++y) {
            acc_t* to = c.row(i + x) + d + y * width;
            count == width ? sums[x * kVectors + y].store(to) : sums[x * kVectors + y].store(to, count);
        }
    }
}

template <int kVectors, typename acc_t, typename T>
void weighted_columns(const Matrix<acc_t>& w, const Matrix<const T>& b, const Matrix<acc_t>& c, int64_t d) {
    const int64_t count = std::min<int64_t>(c.cols - d, Vec<acc_t>::size());
    int64_t i = 0;
    for (; i + kBlockRows <= c.rows; i += kBlockRows) weighted_block<kBlockRows, kVectors>(w, b, c, i, d, count);
    for (; i + 2 <= c.rows; i += 2) weighted_block<2, kVectors>(w, b, c, i, d, count);
    if (i < c.rows) weighted_block<1, kVectors>(w, b, c, i, d, count);
}

}  // namespace

template <typename acc_t>
void row_products(const Matrix<acc_t>& a, const StoredRows& stored, acc_t alpha, const Matrix<acc_t>& c,
                  std::initializer_list<StoredRows> next) {
    with_rows(stored, [&]<typename T>(const Matrix<const T>& b) {
        int64_t j = 0;
        for (; j + 4 <= b.rows; j += 4) {
            for (const StoredRows& rows : next) prefetch(as_matrix<T>(rows), j, j + 4);
            dot_columns<4>(a, b, alpha, c, j);
        }
        for (; j < b.rows; ++j) dot_columns<1>(a, b, alpha, c, j);
    });
}

template <typename acc_t>
void add_weighted_rows(const Matrix<acc_t>& w, const StoredRows& stored, const Matrix<acc_t>& c) {
    constexpr int64_t width = Vec<acc_t>::size();
    with_rows(stored, [&](const auto& b) {
        int64_t d = 0;
        for (; d + 4 * width <= c.cols; d += 4 * width) weighted_columns<4>(w, b, c, d);
        for (; d + 2 * width <= c.cols; d += 2 * width) weighted_columns<2>(w, b, c, d);
        for (; d < c.cols; d += width) weighted_columns<1>(w, b, c, d);
    });
}

#define INSTANTIATE(acc_t)                                                                           \
    template void row_products(const Matrix<acc_t>&, const StoredRows&, acc_t, const Matrix<acc_t>&, \
                               std::initializer_list<StoredRows>);                                   \
    template void add_weighted_rows(const Matrix<acc_t>&, const StoredRows&, const Matrix<acc_t>&);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace flash_dmattn
