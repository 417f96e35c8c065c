#include "visible_distances.h"

#include <climits>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/basics.cuh"
#include "cuda/common/launch.h"
#include "cuda/softmax/relative_bias.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256, kLoads = 8;
constexpr int64_t kMinKeys = 1024;  // the search takes longer than the blocks that shorter sequences could skip

// The entries before the first visible one; `size` if all are masked. A CTA calls.
template <typename IsMasked>
__device__ int count_masked(int size, const IsMasked& is_masked) {
    __shared__ int count;
    if (threadIdx.x == 0) count = size;
    __syncthreads();
    bool found = false;
    for (int begin = 0; begin < size && !found; begin += kThreads * kLoads) {
        int first_visible = size;
#pragma unroll
        for (int k = kLoads - 1; k >= 0; --k)
            if (const int i = begin + k * kThreads + threadIdx.x; i < size && !is_masked(i)) first_visible = i;
        if (first_visible < size) atomicMin(&count, first_visible);
        found = __syncthreads_or(first_visible < size);
    }
    const int result = count;
    __syncthreads();
    return result;
}

// grid: batches * heads of the table
__global__ void __launch_bounds__(kThreads)
    visible_distances_kernel(const __grid_constant__ RelativeBiasView view, DistanceRange* ranges) {
    grid_dependency_sync();
    const int heads = static_cast<int>(view.heads), batch = blockIdx.x / heads, head = blockIdx.x % heads;
    const float* entries = static_cast<const float*>(view.data) + batch * view.batch_stride + head * view.head_stride;
    const int radius = static_cast<int>(view.radius), size = 2 * radius + 1;
    const auto is_masked = [&](int i) { return masks(entries[i]); };
    const int low = count_masked(size, is_masked);
    const int high = count_masked(size, [&](int i) { return is_masked(size - 1 - i); });
    if (threadIdx.x > 0) return;
    ranges[blockIdx.x] = {low == 0 ? INT_MIN : low - radius, high == 0 ? INT_MAX : radius - high};
}

}  // namespace

int64_t count_visible_distances(const AttentionParams& p) {
    const RelativeBiasView& view = p.relative_bias;
    return view.present() && !view.has_grid() && p.seqlen_k >= kMinKeys ? view.batches * view.heads : 0;
}

void find_visible_distances(const AttentionParams& params, DistanceRange* ranges, cudaStream_t stream) {
    if (ranges == nullptr) return;
    launch(visible_distances_kernel, {grid_of(count_visible_distances(params)), kThreads}, stream, params.relative_bias,
           ranges);
}

}  // namespace flash_dmattn::cuda
