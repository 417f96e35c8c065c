// TMA descriptors (tensor maps) of Q, K, V, a dense bias and their gradients.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "params.h"

namespace flash_dmattn::cuda {

constexpr int64_t kElementBytes = 2;

// A 4D tensor of 16-bit elements, contiguous along the first dimension. Strides count elements; the stride of a
// dimension of size 1 is ignored.
struct TensorLayout {
    const void* data;
    std::array<int64_t, 4> sizes;
    std::array<int64_t, 3> strides;  // of the dimensions after the first
    DataType dtype;                  // 16-bit; TMA reductions add in it
};

// Whether TMA can access the tensor: 16-byte aligned address and strides, no stride of 0.
bool is_tma_compatible(const TensorLayout& tensor);
// `box` is one TMA transfer. box[0], 64 or 32 elements, selects the swizzle of an SmemTile slab.
CUtensorMap make_tensor_map(const TensorLayout& tensor, const std::array<int, 4>& box);

// [D, heads, S, B]; variable length: [D, heads, total, 1].
TensorLayout query_layout(const AttentionParams& p, const RowsView& rows);
TensorLayout key_layout(const AttentionParams& p, const RowsView& keys);
// A dense bias or its gradient, contiguous along the keys: [Sk, Sq, heads, B].
TensorLayout dense_bias_layout(const AttentionParams& p, const ScoreView& scores);
// The same, where a float32 bias is a matrix of twice as many 16-bit elements.
TensorLayout dense_bias_layout(const AttentionParams& p, const BiasView& bias);

// Whether the sm90 kernels can load K, V and a dense bias: by TMA, or gathered with key lists.
bool can_load_keys(const AttentionParams& p);

}  // namespace flash_dmattn::cuda
