// Launches the radix select of key lists for few query rows (radix_selector.cuh).
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "radix_selector.cuh"
#include "topk.h"

namespace flash_dmattn {
namespace cuda {
namespace {

template <DataType kType>
__global__ void __launch_bounds__(kThreads, kType == DataType::kFloat32 ? 1 : 2)
    select_lists_kernel(const __grid_constant__ RadixSelectParams selection) {
    grid_dependency_sync();
    __shared__ RadixSelectSharedStorage smem;
    RadixSelector<kType>(selection, smem).run();
}

using Kernel = void (*)(RadixSelectParams);
Kernel kernel_of(DataType dtype) {
    switch (dtype) {
        case DataType::kFloat16: return select_lists_kernel<DataType::kFloat16>;
        case DataType::kBFloat16: return select_lists_kernel<DataType::kBFloat16>;
        case DataType::kFloat32: return select_lists_kernel<DataType::kFloat32>;
        default: throw std::runtime_error("key lists are selected by a float16, bfloat16 or float32 bias");
    }
}

// The CTAs that share a list: enough for most SMs, each with more than two steps of keys, because a cluster barrier
// costs time.
int cluster_of(const SelectParams& params, int64_t lists) {
    const int64_t ctas = current_device().num_sms * 7 / 8;
    int cluster = 1;
    if (current_device().cuda_arch < 900) return cluster;
    while (cluster < kMaxCluster && lists * cluster < ctas && params.keys > 2 * kStep * cluster) cluster *= 2;
    return cluster;
}

}  // namespace
}  // namespace cuda

void select_key_lists_cuda(const SelectParams& params, const SelectedListsPlan& plan, int32_t* keys, int64_t* begins,
                           int64_t* ends, uint32_t* rows, cudaStream_t stream) {
    using namespace cuda;
    if (plan.lists == 0) return;
    if (params.rows > kMaxListedRows)
        throw std::runtime_error("key lists are selected for up to " + std::to_string(kMaxListedRows) + " rows");
    const BiasView& bias = params.bias;
    RadixSelectParams selection{};
    selection.bias = bias.data;
    selection.batch_stride = bias.batches > 1 ? bias.batch_stride : 0;
    selection.head_stride = bias.head_stride;
    selection.col_stride = bias.col_stride;
    selection.heads = static_cast<int>(bias.heads);
    selection.keys = static_cast<int>(params.keys);
    selection.rows = static_cast<int>(params.rows);
    selection.window = static_cast<int>(std::min<int64_t>(params.window, params.keys));
    selection.cluster = cluster_of(params, plan.lists);
    const int64_t bytes = bias.dtype == DataType::kFloat32 ? 4 : 2;
    selection.aligned = bias.col_stride == 1 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 &&
                        selection.batch_stride * bytes % 16 == 0 && selection.head_stride * bytes % 16 == 0;
    selection.list_stride = plan.stride;
    selection.seqused_k = params.seqused_k;
    selection.listed = keys;
    selection.begins = begins;
    selection.ends = ends;
    selection.listed_rows = reinterpret_cast<uint4*>(rows);

    // Keys that do not fit in registers are kept in shared memory if they fit there.
    constexpr int64_t kLoad = kGroups * kStep;
    const int64_t share = ceil_div(ceil_div<int64_t>(params.keys, selection.cluster), kLoad) * kLoad;
    const int64_t room =
        (current_device().shared_memory - static_cast<int64_t>(sizeof(RadixSelectSharedStorage))) / 1024 * 1024;
    selection.storable = share > kLoad && share * bytes <= room ? static_cast<int>(share) : 0;

    const Kernel kernel = kernel_of(bias.dtype);
    allow_shared_memory(reinterpret_cast<const void*>(kernel), room);
    launch(kernel, {grid_of(plan.lists * selection.cluster), kThreads, selection.storable * bytes, selection.cluster},
           stream, selection);
}

}  // namespace flash_dmattn
