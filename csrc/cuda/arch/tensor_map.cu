#include "tensor_map.h"

#include <algorithm>
#include <climits>
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/common/check.h"

namespace flash_dmattn::cuda {
namespace {

constexpr int64_t kAlign = 16;
constexpr int64_t kStrideLimit = int64_t{1} << 40;

// A driver function, found through the runtime: avoids linking libcuda.
template <typename Function>
Function driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    constexpr unsigned kSinceCuda = 12000;
    FLASH_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, kSinceCuda, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the CUDA driver is older than 12.0: update it");
    return reinterpret_cast<Function>(function);
}

void check(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS)
        throw std::runtime_error(std::string(what) + " failed with error " + std::to_string(result));
}

// Makes the device's primary context current. The runtime does so only with a thread's first call that needs it, which
// an autograd or server thread may not have made. The context is retained until the process ends.
void set_primary_context() {
    static const auto retain = driver_function<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
    static const auto set_current = driver_function<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
    int device;
    FLASH_CUDA_CHECK(cudaGetDevice(&device));
    CUcontext context;
    check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
}

TensorLayout rows_layout(const AttentionParams& p, const RowsView& rows, int64_t heads, int64_t seqlen, int64_t total) {
    const bool varlen = p.cu_seqlens_q != nullptr;
    return {rows.data,
            {p.head_dim, heads, varlen ? total : seqlen, varlen ? 1 : p.batch},
            {rows.head_stride, rows.row_stride, rows.batch_stride},
            p.dtype};
}

}  // namespace

bool is_tma_compatible(const TensorLayout& tensor) {
    bool can = reinterpret_cast<uintptr_t>(tensor.data) % kAlign == 0;
    for (int64_t size : tensor.sizes) can &= size > 0 && size <= INT_MAX;
    for (size_t i = 0; i < tensor.strides.size(); ++i) {
        const int64_t bytes = tensor.strides[i] * kElementBytes;
        can &= tensor.sizes[i + 1] == 1 || (bytes > 0 && bytes % kAlign == 0 && bytes < kStrideLimit);
    }
    return can;
}

CUtensorMap make_tensor_map(const TensorLayout& tensor, const std::array<int, 4>& box) {
    static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    cuuint64_t sizes[4], strides[3];
    cuuint32_t box_sizes[4], steps[4];
    for (int i = 0; i < 4; ++i) {
        sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
        box_sizes[i] = static_cast<cuuint32_t>(box[i]);
        steps[i] = 1;
    }
    for (int i = 0; i < 3; ++i)
        strides[i] = static_cast<cuuint64_t>(sizes[i + 1] == 1 ? kAlign : tensor.strides[i] * kElementBytes);
    const auto dtype =
        tensor.dtype == DataType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    CUtensorMap map;
    const auto make = [&] {
        return encode(&map, dtype, 4, const_cast<void*>(tensor.data), sizes, strides, box_sizes, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE,
                      box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = make();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
        set_primary_context();
        result = make();
    }
    check(result, "cuTensorMapEncodeTiled");
    return map;
}

TensorLayout query_layout(const AttentionParams& p, const RowsView& rows) {
    return rows_layout(p, rows, p.heads, p.seqlen_q, p.total_q);
}
TensorLayout key_layout(const AttentionParams& p, const RowsView& keys) {
    return rows_layout(p, keys, p.kv_heads, p.seqlen_k, p.total_k);
}

TensorLayout dense_bias_layout(const AttentionParams& p, const ScoreView& scores) {
    return {scores.data,
            {p.seqlen_k, p.cu_seqlens_q == nullptr ? p.seqlen_q : p.total_q, scores.heads, scores.batches},
            {scores.row_stride, scores.head_stride, scores.batch_stride},
            p.dtype};
}

TensorLayout dense_bias_layout(const AttentionParams& p, const BiasView& bias) {
    TensorLayout layout = dense_bias_layout(p, static_cast<const ScoreView&>(bias));
    if (bias.dtype != DataType::kFloat32) return layout;
    layout.sizes[0] *= 2;
    for (int64_t& stride : layout.strides) stride *= 2;
    return layout;
}

bool can_load_keys(const AttentionParams& p) {
    const bool is_dense = p.bias.present() && p.bias.kind == BiasKind::kDense;
    if (p.lists.present()) {  // gather_rows multiplies by a 32-bit stride
        const int64_t max_stride = std::max(p.key.row_stride, p.value.row_stride);
        return !is_dense && max_stride * kElementBytes <= std::numeric_limits<uint32_t>::max();
    }
    return is_tma_compatible(key_layout(p, p.key)) && is_tma_compatible(key_layout(p, p.value)) &&
           (!is_dense || (p.bias.col_stride == 1 && is_tma_compatible(dense_bias_layout(p, p.bias))));
}

}  // namespace flash_dmattn::cuda
