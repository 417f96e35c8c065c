// What the copy engine is told of a tensor.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "params.h"

namespace flash_dmattn::cuda {

constexpr int64_t kElementBytes = 2;

// Of 16-bit elements, contiguous along the first dimension; strides count elements, that of a dimension of one element may
// be anything. Boxes are copied, swizzled as SmemTile is: slabs of box[0] elements, 64 or 32.
struct TensorLayout {
    const void* data;
    std::array<int64_t, 4> sizes;
    std::array<int64_t, 3> strides;  // of the dimensions after the first
};

// Whether the copy engine can read it: 16 bytes at a time, and no stride of 0.
bool can_map(const TensorLayout& tensor);
CUtensorMap make_map(const TensorLayout& tensor, const std::array<int, 4>& box);

// [D, heads, S, B]; of variable length [D, heads, total, 1].
TensorLayout query_layout(const AttentionParams& p, const RowsView& rows);
TensorLayout key_layout(const AttentionParams& p, const RowsView& keys);
// Of a dense bias or its gradient, contiguous along the keys: [Sk, Sq, heads, B].
TensorLayout dense_layout(const AttentionParams& p, const ScoreView& pairs);

// Whether the kernels can load keys, values and a dense bias: by the copy engine, or where there are lists gathered.
bool can_load_keys(const AttentionParams& p);

}  // namespace flash_dmattn::cuda
