// Matrices and rows in the accumulation type (float or double): products, conversions, and vectorized row operations.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <new>
#include <vector>

#include "params.h"

namespace flash_dmattn {

// Rows of a product's operands start at multiples of this many bytes. A BLAS may sum in another order for an operand of
// other alignment (MKL does), and results must not depend on where the inputs are.
constexpr int64_t kAlignment = 64;

struct AlignedDelete {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(kAlignment)); }
};

template <typename T>
struct AlignedAllocator {
    using value_type = T;

    AlignedAllocator() = default;
    template <typename U>
    AlignedAllocator(const AlignedAllocator<U>&) {}

    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(kAlignment))); }
    void deallocate(T* p, std::size_t) { AlignedDelete()(p); }
    friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
    friend bool operator!=(const AlignedAllocator&, const AlignedAllocator&) { return false; }
};

// Scratch memory.
template <typename T>
using Buffer = std::vector<T, AlignedAllocator<T>>;

// Row-major; stride counts elements.
template <typename acc_t>
struct Matrix {
    acc_t* data;
    int64_t rows;
    int64_t cols;
    int64_t stride;

    acc_t* row(int64_t i) const { return data + i * stride; }
    Matrix first_rows(int64_t n) const { return {data, n, cols, stride}; }
    Matrix first_cols(int64_t n) const { return {data, rows, n, stride}; }
};

// The DataType of the accumulation type.
template <typename acc_t>
constexpr DataType kDataType = sizeof(acc_t) == 8 ? DataType::kFloat64 : DataType::kFloat32;

// Rows of a tensor before conversion: element (i, j) is data[offset + i * stride + j].
struct StoredRows {
    const void* data;
    DataType dtype;
    int64_t offset, rows, cols, stride;
};
template <typename acc_t>
StoredRows stored(const Matrix<acc_t>& m) {
    return {m.data, kDataType<acc_t>, 0, m.rows, m.cols, m.stride};
}

// m^T in `scratch`. A BLAS is tens of percent slower with transposed operands, and most operands are used by several
// products.
template <typename acc_t>
Matrix<acc_t> transpose(const Matrix<acc_t>& m, acc_t* scratch, int64_t stride);
template <typename acc_t>
Matrix<acc_t> transpose(const Matrix<acc_t>& m, acc_t* scratch) {
    return transpose(m, scratch, m.rows);
}

// A row stride for `n` elements that avoids powers of two, which would map rows to the same cache sets.
constexpr int64_t padded(int64_t n) { return n + 16; }

// c = alpha * a b
template <typename acc_t>
void product(const Matrix<acc_t>& a, const Matrix<acc_t>& b, acc_t alpha, const Matrix<acc_t>& c);
// Products of few rows: c = alpha * a b^T, and c += w b. b, which is large, is read in place and converted in
// registers. The order of a sum does not depend on the number of rows. next: rows of b's type to prefetch.
template <typename acc_t>
void row_products(const Matrix<acc_t>& a, const StoredRows& b, acc_t alpha, const Matrix<acc_t>& c,
                  std::initializer_list<StoredRows> next = {});
template <typename acc_t>
void add_weighted_rows(const Matrix<acc_t>& w, const StoredRows& b, const Matrix<acc_t>& c);
// c = a b, with long sums split into shorter ones to limit rounding errors. For <do, v>, from which D of similar size
// is subtracted.
template <typename acc_t>
void precise_product(const Matrix<acc_t>& a, const Matrix<acc_t>& b, const Matrix<acc_t>& c);

// c += alpha * w b, and c += alpha * a w. exact: an element of w that is 0 adds nothing, even if the other factor is
// NaN or infinite. That is slow, for the rare tile whose fast product is not finite.
template <typename acc_t>
void add_product_left(const Matrix<acc_t>& w, const Matrix<acc_t>& b, acc_t alpha, bool exact, const Matrix<acc_t>& c);
template <typename acc_t>
void add_product_right(const Matrix<acc_t>& a, const Matrix<acc_t>& w, acc_t alpha, bool exact, const Matrix<acc_t>& c);

// [rows, cols] elements of `dtype` as a matrix of acc_t: in place if they have that type, else converted into
// `scratch`.
template <typename acc_t>
Matrix<acc_t> load(const void* data, DataType dtype, int64_t offset, int64_t stride, int64_t rows, int64_t cols,
                   acc_t* scratch);
// The same for an operand of a product: in place only if all rows are aligned, as they are in `scratch`.
template <typename acc_t>
Matrix<acc_t> load_operand(const void* data, DataType dtype, int64_t offset, int64_t stride, int64_t rows, int64_t cols,
                           acc_t* scratch);
template <typename acc_t>
void store(const Matrix<acc_t>& matrix, void* data, DataType dtype, int64_t offset, int64_t stride);

// The lowest finite number of a type.
template <typename acc_t>
acc_t lowest(DataType dtype);

// Rows index[0], .. index[n - 1] of a matrix of `dtype`, converted and contiguous in `to`, [n, cols].
template <typename acc_t>
Matrix<acc_t> gather(const void* data, DataType dtype, int64_t offset, int64_t stride, const int32_t* index, int64_t n,
                     int64_t cols, acc_t* to);

template <typename acc_t>
bool all_finite(const Matrix<acc_t>& matrix);

template <typename acc_t>
acc_t row_max(const acc_t* x, int64_t n);
// x = exp(x - shift), at most 1: shift is, up to rounding, at least the maximum of x. Returns the sum.
template <typename acc_t>
acc_t row_exp(acc_t* x, acc_t shift, int64_t n);
template <typename acc_t>
void row_scale(acc_t* x, acc_t factor, int64_t n);
template <typename acc_t>
void row_add(acc_t* x, const acc_t* y, int64_t n);
// In float64, because D_i = <do_i, o_i> is subtracted from numbers of similar size.
template <typename acc_t>
double row_dot(const acc_t* x, const acc_t* y, int64_t n);
// Sum of p x over a row of probabilities. Adds nothing where p is 0, because x may be NaN there.
template <typename acc_t>
acc_t row_mean(const acc_t* p, const acc_t* x, int64_t n);
// dp = p (dp - delta), but 0 where p is 0, because <do, v> of a masked score may be NaN.
template <typename acc_t>
void row_dx(acc_t* dp, const acc_t* p, acc_t delta, int64_t n);
// x = softcap * tanh(x / softcap). slope, if not null, receives the derivative, 1 - tanh^2.
template <typename acc_t>
void row_softcap(acc_t* x, acc_t* slope, acc_t softcap, int64_t n);

}  // namespace flash_dmattn
