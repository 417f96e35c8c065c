#include "linalg.h"

#include <ATen/ATen.h>
#include <ATen/ops/addmm_cpu_dispatch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "vec.h"

// Null unless PyTorch's BLAS is MKL.
extern "C" {
int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
            const float*, const int*, const float*, float*, const int*) __attribute__((weak));
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
            const double*, const int*, const double*, double*, const int*) __attribute__((weak));
}

namespace flash_dmattn {
namespace {

// A tensor for ATen's matrix product that shares the matrix's memory.
template <typename acc_t>
at::Tensor as_tensor(const Matrix<acc_t>& m) {
    return at::from_blob(m.data, {m.rows, m.cols}, {m.stride, 1}, c10::CppTypeToScalarType<acc_t>::value);
}

auto* blas_gemm(float) { return sgemm_; }
auto* blas_gemm(double) { return dgemm_; }

// Whether BLAS accepts the matrix without a copy.
template <typename acc_t>
bool is_plain(const Matrix<acc_t>& m) {
    return 0 < m.cols && m.cols <= m.stride && m.stride <= std::numeric_limits<int>::max();
}

// c = alpha * a b + beta * c. Calls MKL directly, whose integers have 32 bits in PyTorch: ATen's overhead exceeds the
// time of a small product. Other BLAS libraries are called by ATen's entry point, without the dispatcher.
template <typename acc_t>
void gemm(const Matrix<acc_t>& a, const Matrix<acc_t>& b, acc_t alpha, acc_t beta, const Matrix<acc_t>& c) {
    const bool has_mkl = MKL_Set_Num_Threads_Local != nullptr && blas_gemm(acc_t()) != nullptr;
    if (has_mkl && is_plain(a) && is_plain(b) && is_plain(c)) {
        // BLAS has columns first: c^T = b^T a^T.
        const int m = c.cols, n = c.rows, k = a.cols, lda = b.stride, ldb = a.stride, ldc = c.stride;
        return blas_gemm(acc_t())("N", "N", &m, &n, &k, &alpha, b.data, &lda, a.data, &ldb, &beta, c.data, &ldc);
    }
    at::Tensor out = as_tensor(c);
    at::cpu::addmm_out(out, out, as_tensor(a), as_tensor(b), beta, alpha);
}

inline Vec<double> exponential(const Vec<double>& x) { return x.exp(); }

// e^x = 2^n e^r with n = round(x / ln 2) and a minimax polynomial of degree 6 for e^r, |r| <= ln(2) / 2, with a
// relative error of 4e-9. It is inlined, while at::vec's exp is a function call per vector. x must be at most 0: above
// 88 the result is undefined. Results below the normal numbers are 0; NaN stays NaN.
inline Vec<float> exponential(const Vec<float>& x) {
    using at::vec::fmadd;
    const Vec<float> n = (x * Vec<float>(1.44269504f)).round();
    // ln 2 in two parts; n times the first is exact.
    const Vec<float> r = fmadd(n, Vec<float>(2.12194440e-4f), fmadd(n, Vec<float>(-0.693359375f), x));
    Vec<float> series(0.0013814584f);
    for (const float coefficient : {0.008368724f, 0.04166839f, 0.16666521f, 0.49999994f, 1.f, 1.f})
        series = fmadd(series, r, Vec<float>(coefficient));
    const auto exponent = (at::vec::convert_to_int_of_same_size(n) + Vec<int32_t>(127)) << Vec<int32_t>(23);
    return Vec<float>::blendv(series * at::vec::cast<float>(exponent), Vec<float>(0), x < Vec<float>(-87.3f));
}

}  // namespace

template <typename acc_t>
Matrix<acc_t> transpose(const Matrix<acc_t>& m, acc_t* scratch, int64_t stride) {
    constexpr int64_t kBlock = std::max<int64_t>(Vec<acc_t>::size(), 8);
    const Matrix<acc_t> t{scratch, m.cols, m.rows, stride};
    for (int64_t i = 0; i < m.rows; i += kBlock) {
        for (int64_t j = 0; j < m.cols; j += kBlock) {
            const int64_t rows = std::min(kBlock, m.rows - i), cols = std::min(kBlock, m.cols - j);
            if (rows == kBlock && cols == kBlock) {
                at::vec::transpose_mxn<acc_t, kBlock, kBlock>(m.row(i) + j, m.stride, t.row(j) + i, t.stride);
                continue;
            }
            for (int64_t r = i; r < i + rows; ++r) {
                for (int64_t c = j; c < j + cols; ++c) t.row(c)[r] = m.row(r)[c];
            }
        }
    }
    return t;
}

template <typename acc_t>
void product(const Matrix<acc_t>& a, const Matrix<acc_t>& b, acc_t alpha, const Matrix<acc_t>& c) {
    gemm<acc_t>(a, b, alpha, 0, c);
}

template <typename acc_t>
void precise_product(const Matrix<acc_t>& a, const Matrix<acc_t>& b, const Matrix<acc_t>& c) {
    constexpr int64_t kWhole = 128, kPiece = 64;  // splitting sums up to kWhole gains little
    const int64_t piece = a.cols <= kWhole ? a.cols : kPiece;
    for (int64_t k = 0; k < a.cols; k += piece) {
        const int64_t n = std::min(piece, a.cols - k);
        gemm<acc_t>({a.data + k, a.rows, n, a.stride}, {b.row(k), n, b.cols, b.stride}, 1, k == 0 ? 0 : 1, c);
    }
}

// Calls f(i, j, alpha * w_ij) where that is not 0.
template <typename acc_t, typename F>
void for_each_weight(const Matrix<acc_t>& w, acc_t alpha, F&& f) {
    for (int64_t i = 0; i < w.rows; ++i) {
        for (int64_t j = 0; j < w.cols; ++j) {
            if (const acc_t weight = alpha * w.row(i)[j]; weight != 0) f(i, j, weight);
        }
    }
}

template <typename acc_t>
void add_product_left(const Matrix<acc_t>& w, const Matrix<acc_t>& b, acc_t alpha, bool exact, const Matrix<acc_t>& c) {
    if (!exact) return gemm<acc_t>(w, b, alpha, 1, c);
    for_each_weight(w, alpha, [&](int64_t i, int64_t j, acc_t weight) {
        for (int64_t d = 0; d < b.cols; ++d) c.row(i)[d] += weight * b.row(j)[d];
    });
}

template <typename acc_t>
void add_product_right(const Matrix<acc_t>& a, const Matrix<acc_t>& w, acc_t alpha, bool exact,
                       const Matrix<acc_t>& c) {
    if (!exact) return gemm<acc_t>(a, w, alpha, 1, c);
    for_each_weight(w, alpha, [&](int64_t i, int64_t j, acc_t weight) {
        for (int64_t d = 0; d < a.rows; ++d) c.row(d)[j] += weight * a.row(d)[i];
    });
}

// Converts n elements. at::vec::convert is not vectorized for half types to float.
template <typename T, typename acc_t>
void convert_row(const T* from, acc_t* to, int64_t n) {
    if constexpr (sizeof(T) == 2 && std::is_same_v<acc_t, float>) {
        constexpr int64_t width = Vec<float>::size();
        for (; n >= width; n -= width, from += width, to += width) {
            Vec<float> widened;
            at::vec::load_to_float(from, widened);
            widened.store(to);
        }
    }
    at::vec::convert<T, acc_t>(from, to, n);
}

// Elements of type acc_t as a matrix, without a copy.
template <typename acc_t>
Matrix<acc_t> in_place(const void* data, int64_t offset, int64_t stride, int64_t rows, int64_t cols) {
    return {const_cast<acc_t*>(static_cast<const acc_t*>(data)) + offset, rows, cols, stride};
}

template <typename acc_t>
Matrix<acc_t> widen(const void* data, DataType dtype, int64_t offset, int64_t stride, int64_t rows, int64_t cols,
                    acc_t* scratch) {
    const Matrix<acc_t> widened{scratch, rows, cols, cols};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T* from = static_cast<const T*>(data) + offset;
        for (int64_t i = 0; i < rows; ++i) convert_row<T, acc_t>(from + i * stride, widened.row(i), cols);
    });
    return widened;
}

template <typename acc_t>
Matrix<acc_t> load(const void* data, DataType dtype, int64_t offset, int64_t stride, int64_t rows, int64_t cols,
                   acc_t* scratch) {
    if (dtype == kDataType<acc_t>) return in_place<acc_t>(data, offset, stride, rows, cols);
    return widen<acc_t>(data, dtype, offset, stride, rows, cols, scratch);
}

template <typename acc_t>
Matrix<acc_t> load_operand(const void* data, DataType dtype, int64_t offset, int64_t stride, int64_t rows, int64_t cols,
                           acc_t* scratch) {
    if (dtype == kDataType<acc_t>) {
        const Matrix<acc_t> there = in_place<acc_t>(data, offset, stride, rows, cols);
        const auto aligned = [](int64_t bytes) { return bytes % kAlignment == 0; };
        constexpr int64_t size = sizeof(acc_t);
        if (aligned(reinterpret_cast<intptr_t>(there.data)) && aligned(stride * size) && aligned(cols * size))
            return there;
    }
    return widen<acc_t>(data, dtype, offset, stride, rows, cols, scratch);
}

template <typename acc_t>
void store(const Matrix<acc_t>& matrix, void* data, DataType dtype, int64_t offset, int64_t stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        T* to = static_cast<T*>(data) + offset;
        for (int64_t i = 0; i < matrix.rows; ++i)
            at::vec::convert<acc_t, T>(matrix.row(i), to + i * stride, matrix.cols);
    });
}

template <typename acc_t>
acc_t lowest(DataType dtype) {
    acc_t value = 0;
    with_type(dtype, [&](auto type) { value = static_cast<acc_t>(std::numeric_limits<decltype(type)>::lowest()); });
    return value;
}

template <typename acc_t>
Matrix<acc_t> gather(const void* data, DataType dtype, int64_t offset, int64_t stride, const int32_t* index, int64_t n,
                     int64_t cols, acc_t* to) {
    const Matrix<acc_t> gathered{to, n, cols, cols};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T* from = static_cast<const T*>(data) + offset;
        if (cols == 1) {
            for (int64_t i = 0; i < n; ++i) to[i] = static_cast<acc_t>(from[index[i] * stride]);
        } else {
            for (int64_t i = 0; i < n; ++i) convert_row<T, acc_t>(from + index[i] * stride, gathered.row(i), cols);
        }
    });
    return gathered;
}

template <typename acc_t>
bool all_finite(const Matrix<acc_t>& matrix) {
    // x - x is 0 for a finite x, else NaN, and a NaN stays in the sum.
    acc_t sum = 0;
    for (int64_t i = 0; i < matrix.rows; ++i) {
        sum += at::vec::map_reduce_all<acc_t>([](Vec<acc_t> x) { return x - x; },
                                              [](Vec<acc_t> x, Vec<acc_t> y) { return x + y; }, matrix.row(i),
                                              matrix.cols);
    }
    return sum == 0;
}

template <typename acc_t>
acc_t row_max(const acc_t* x, int64_t n) {
    constexpr int64_t width = Vec<acc_t>::size();
    const auto larger = [](Vec<acc_t> a, Vec<acc_t> b) { return at::vec::maximum(a, b); };
    if (n < width) return at::vec::reduce_all<acc_t>(larger, x, n);
    Vec<acc_t> largest = Vec<acc_t>::loadu(x);
    for (int64_t j = width; j + width <= n; j += width) largest = larger(largest, Vec<acc_t>::loadu(x + j));
    if (n % width != 0) largest = larger(largest, Vec<acc_t>::loadu(x + n - width));  // overlaps the previous vector
    return at::vec::vec_reduce_all<acc_t>(larger, largest);
}

template <typename acc_t>
acc_t row_exp(acc_t* x, acc_t shift, int64_t n) {
    constexpr int64_t width = Vec<acc_t>::size();
    using at::vec::minimum;  // keeps NaN
    const Vec<acc_t> shifts(shift), zero(0);
    Vec<acc_t> sums(0);
    int64_t j = 0;
    for (; j + width <= n; j += width) {
        const Vec<acc_t> e = exponential(minimum(Vec<acc_t>::loadu(x + j) - shifts, zero));
        e.store(x + j);
        sums = sums + e;
    }
    acc_t sum = at::vec::vec_reduce_all<acc_t>([](Vec<acc_t> a, Vec<acc_t> b) { return a + b; }, sums);
    if (j < n) {
        const Vec<acc_t> e = exponential(minimum(Vec<acc_t>::loadu(x + j, n - j) - shifts, zero));
        e.store(x + j, n - j);
        for (; j < n; ++j) sum += x[j];
    }
    return sum;
}

template <typename acc_t>
void row_scale(acc_t* x, acc_t factor, int64_t n) {
    at::vec::map<acc_t>([factor](Vec<acc_t> v) { return v * Vec<acc_t>(factor); }, x, x, n);
}

template <typename acc_t>
void row_add(acc_t* x, const acc_t* y, int64_t n) {
    at::vec::map2<acc_t>([](Vec<acc_t> a, Vec<acc_t> b) { return a + b; }, x, x, y, n);
}

template <typename acc_t>
double row_dot(const acc_t* x, const acc_t* y, int64_t n) {
    constexpr int kSums = 8;  // independent sums, for vectorization
    double sums[kSums] = {};
    int64_t j = 0;
    for (; j + kSums <= n; j += kSums) {
        for (int k = 0; k < kSums; ++k) sums[k] += static_cast<double>(x[j + k]) * y[j + k];
    }
    for (; j < n; ++j) sums[0] += static_cast<double>(x[j]) * y[j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <typename acc_t>
acc_t row_mean(const acc_t* p, const acc_t* x, int64_t n) {
    const Vec<acc_t> zero(0);
    return at::vec::map2_reduce_all<acc_t>(
        [=](Vec<acc_t> prob, Vec<acc_t> value) { return Vec<acc_t>::blendv(prob * value, zero, prob == zero); },
        [](Vec<acc_t> a, Vec<acc_t> b) { return a + b; }, p, x, n);
}

template <typename acc_t>
void row_dx(acc_t* dp, const acc_t* p, acc_t delta, int64_t n) {
    const Vec<acc_t> zero(0), deltas(delta);
    at::vec::map2<acc_t>(
        [=](Vec<acc_t> gradient, Vec<acc_t> prob) {
            return Vec<acc_t>::blendv(prob * (gradient - deltas), zero, prob == zero);
        },
        dp, dp, p, n);
}

template <typename acc_t>
void row_softcap(acc_t* x, acc_t* slope, acc_t softcap, int64_t n) {
    const acc_t inverse = 1 / softcap;
    at::vec::map<acc_t>([inverse](Vec<acc_t> v) { return (v * Vec<acc_t>(inverse)).tanh(); }, x, x, n);
    if (slope != nullptr) {
        at::vec::map<acc_t>([](Vec<acc_t> t) { return Vec<acc_t>(1) - t * t; }, slope, x, n);
    }
    row_scale<acc_t>(x, softcap, n);
}

#define INSTANTIATE(acc_t)                                                                                            \
    template Matrix<acc_t> transpose(const Matrix<acc_t>&, acc_t*, int64_t);                                          \
    template void product(const Matrix<acc_t>&, const Matrix<acc_t>&, acc_t, const Matrix<acc_t>&);                   \
    template void precise_product(const Matrix<acc_t>&, const Matrix<acc_t>&, const Matrix<acc_t>&);                  \
    template void add_product_left(const Matrix<acc_t>&, const Matrix<acc_t>&, acc_t, bool, const Matrix<acc_t>&);    \
    template void add_product_right(const Matrix<acc_t>&, const Matrix<acc_t>&, acc_t, bool, const Matrix<acc_t>&);   \
    template Matrix<acc_t> load(const void*, DataType, int64_t, int64_t, int64_t, int64_t, acc_t*);                   \
    template Matrix<acc_t> load_operand(const void*, DataType, int64_t, int64_t, int64_t, int64_t, acc_t*);           \
    template void store(const Matrix<acc_t>&, void*, DataType, int64_t, int64_t);                                     \
    template Matrix<acc_t> gather(const void*, DataType, int64_t, int64_t, const int32_t*, int64_t, int64_t, acc_t*); \
    template acc_t lowest(DataType);                                                                                  \
    template bool all_finite(const Matrix<acc_t>&);                                                                   \
    template acc_t row_max(const acc_t*, int64_t);                                                                    \
    template acc_t row_exp(acc_t*, acc_t, int64_t);                                                                   \
    template void row_scale(acc_t*, acc_t, int64_t);                                                                  \
    template void row_add(acc_t*, const acc_t*, int64_t);                                                             \
    template double row_dot(const acc_t*, const acc_t*, int64_t);                                                     \
    template acc_t row_mean(const acc_t*, const acc_t*, int64_t);                                                     \
    template void row_dx(acc_t*, const acc_t*, acc_t, int64_t);                                                       \
    template void row_softcap(acc_t*, acc_t*, acc_t, int64_t);

INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace flash_dmattn
