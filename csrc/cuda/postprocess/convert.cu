#include "convert.h"

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/basics.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/exact_sum.cuh"
#include "cuda/mask/device_dispatch.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // elements that a thread converts

template <typename T>
__device__ __forceinline__ uint4 round_chunk(const float* from, float scale) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    return {pack<T>(a.x * scale, a.y * scale), pack<T>(a.z * scale, a.w * scale), pack<T>(b.x * scale, b.y * scale),
            pack<T>(b.z * scale, b.w * scale)};
}

// blockIdx.y: 0 for dkey, 1 for dvalue.
template <typename T>
__global__ void __launch_bounds__(kThreads) convert_dkv_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, row_chunks = p.head_dim / kChunk;
    const int64_t row = i / row_chunks / p.kv_heads, head = i / row_chunks % p.kv_heads;
    if (row >= p.dkv_rows) return;
    const bool is_value = blockIdx.y == 1;
    const RowsView& view = is_value ? p.dvalue : p.dkey;
    const int64_t rows = p.cu_seqlens_q == nullptr ? p.seqlen_k : p.dkv_rows;  // of one batch element
    T* to = static_cast<T*>(view.data) + row / rows * view.batch_stride + row % rows * view.row_stride +
            head * view.head_stride + i % row_chunks * kChunk;
    const int64_t from_row = (is_value ? p.dkv_rows : 0) + row;
    const float* from = p.dkv_accum + (from_row * p.kv_heads + head) * p.dkv_cols + i % row_chunks * kChunk;
    *reinterpret_cast<uint4*>(to) = round_chunk<T>(from, is_value ? 1.f : static_cast<float>(p.softmax_scale));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) convert_dbias_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kChunk;
    T* to = static_cast<T*>(p.dbias.data) + first;
    const float* from = p.dbias_accum + first;
    if (first + kChunk <= p.dbias_accum_size) {
        *reinterpret_cast<uint4*>(to) = round_chunk<T>(from, 1.f);
    } else {
        for (int64_t i = 0; first + i < p.dbias_accum_size; ++i) to[i] = T(from[i]);
    }
}

__global__ void __launch_bounds__(kThreads) convert_exact_sums_kernel(const __grid_constant__ BwdArgs p, int64_t size) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size) static_cast<float*>(p.drelative_bias)[i] = p.drelative_bias_exact[i].value();
}

template <typename T>
void postprocess(const BwdArgs& p, cudaStream_t stream) {
    const auto blocks = [](int64_t elements) { return grid_of(ceil_div<int64_t>(elements, kThreads * kChunk)); };
    const int64_t elements = p.dkv_rows * p.kv_heads * p.head_dim;
    if (elements > 0) launch(convert_dkv_kernel<T>, {dim3(blocks(elements), 2), kThreads}, stream, p);
    if (p.dbias_accum_size > 0) launch(convert_dbias_kernel<T>, {blocks(p.dbias_accum_size), kThreads}, stream, p);
    if (p.drelative_bias_exact != nullptr) {
        const int64_t size = relative_bias_elements(p);
        launch(convert_exact_sums_kernel, {grid_of(ceil_div<int64_t>(size, kThreads)), kThreads}, stream, p, size);
    }
}

}  // namespace

void convert_sums(const BwdArgs& args, cudaStream_t stream) {
    args.dtype == DataType::kFloat16 ? postprocess<half_t>(args, stream) : postprocess<bfloat16_t>(args, stream);
}

}  // namespace flash_dmattn::cuda
