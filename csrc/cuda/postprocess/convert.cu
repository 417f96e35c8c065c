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

// kLanes lanes, a power of 2, convert a row of up to kChunk * kLanes elements. blockIdx.y: 0 for dkey, 1 for dvalue.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) convert_dkv_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    // 32 bits: divisions are much faster. 2^32 rows times KV heads would take a terabyte of sums.
    const auto kv_heads = static_cast<uint32_t>(p.kv_heads);
    const uint32_t i = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, row = i / kv_heads,
                   head = i - row * kv_heads;
    const uint32_t col = threadIdx.x % kLanes * kChunk;
    if (row >= p.dkv_rows || col >= p.head_dim) return;
    const bool is_value = blockIdx.y == 1;
    const RowsView& view = is_value ? p.dvalue : p.dkey;
    // Packed sequences are one sequence of dkv_rows rows.
    const uint32_t batch = p.cu_seqlens_q == nullptr ? row / static_cast<uint32_t>(p.seqlen_k) : 0,
                   batch_row = row - batch * static_cast<uint32_t>(p.seqlen_k);
    T* to = static_cast<T*>(view.data) + batch * view.batch_stride + batch_row * view.row_stride +
            head * view.head_stride + col;
    const int64_t from_row = (is_value ? p.dkv_rows : 0) + row;
    const float* from = p.dkv_accum + (from_row * p.kv_heads + head) * p.dkv_cols + col;
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
    with_lanes_per_row(p.head_dim, [&](auto lanes) {
        const int64_t blocks_of_rows = ceil_div<int64_t>(p.dkv_rows * p.kv_heads, kThreads / lanes);
        if (blocks_of_rows > 0)
            launch(convert_dkv_kernel<T, lanes>, {dim3(grid_of(blocks_of_rows), 2), kThreads}, stream, p);
    });
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
