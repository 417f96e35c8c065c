// Vectors, and the C++ types of DataType, for linalg.cpp and few_row_products.cpp.
#pragma once

#include <ATen/ATen.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/functional_bfloat16.h>
#include <ATen/cpu/vec/vec.h>

#include "linalg.h"

namespace flash_dmattn {

// Calls f with a value of the C++ type of `dtype`.
template <typename F>
void with_type(DataType dtype, F&& f) {
    switch (dtype) {
        case DataType::kFloat16: return f(at::Half());
        case DataType::kBFloat16: return f(at::BFloat16());
        case DataType::kFloat32: return f(float());
        case DataType::kFloat64: return f(double());
    }
}

template <typename T>
Matrix<const T> as_matrix(const StoredRows& stored) {
    return {static_cast<const T*>(stored.data) + stored.offset, stored.rows, stored.cols, stored.stride};
}

// Calls f with the rows as a matrix of their type.
template <typename F>
void with_rows(const StoredRows& stored, F&& f) {
    with_type(stored.dtype, [&](auto type) { f(as_matrix<decltype(type)>(stored)); });
}

template <typename acc_t>
using Vec = at::vec::Vectorized<acc_t>;

}  // namespace flash_dmattn
