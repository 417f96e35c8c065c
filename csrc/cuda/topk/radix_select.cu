// Launches the radix select of key lists for few query rows (radix_selector.cuh).
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/common/check.h"
#include "cuda/common/cluster_launch.h"
#include "cuda/common/device.h"
#include "radix_selector.cuh"
#include "topk.h"

namespace flash_dmattn {
namespace cuda {
namespace {

template <DataType kType>
__global__ void __launch_bounds__(kThreads, kType == DataType::kFloat32 ? 1 : 2)
    select_lists_kernel(const __grid_constant__ RadixSelectParams selection) {
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

// What the device and the loaded code allow a kernel, queried once per device and kernel.
struct KernelLimits {
    bool has_clusters;
    int shared_bytes;  // dynamic shared memory available to a CTA
};

KernelLimits kernel_limits(DataType dtype) {
    constexpr int kMaxDevices = 64, kTypes = 3;
    static std::atomic<int> known[kMaxDevices][kTypes];  // 0: unknown, else 2 * bytes + clusters + 1
    int device = 0;
    FLASH_CUDA_CHECK(cudaGetDevice(&device));
    const Kernel kernel = kernel_of(dtype);
    const int type = static_cast<int>(dtype);
    int answer = device < kMaxDevices ? known[device][type].load() : 0;
    if (answer == 0) {
        cudaFuncAttributes attributes;
        FLASH_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
        const int64_t max_bytes = current_device().shared_memory;
        const int bytes = static_cast<int>(max_bytes - static_cast<int64_t>(attributes.sharedSizeBytes)) / 1024 * 1024;
        FLASH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        const bool clusters = current_device().code >= 900;
        answer = 2 * bytes + clusters + 1;
        if (device < kMaxDevices) known[device][type].store(answer);
    }
    return {(answer - 1) % 2 == 1, (answer - 1) / 2};
}

}  // namespace
}  // namespace cuda

RadixSelectPlan plan_select_key_lists(const SelectParams& params) {
    using namespace cuda;
    RadixSelectPlan plan{plan_selected_lists(params)};
    // Enough CTAs for most SMs, each with more than two steps of keys, because a cluster barrier costs time.
    if (plan.lists == 0 || !kernel_limits(params.bias.dtype).has_clusters) return plan;
    const int64_t blocks = current_device().num_sms * 7 / 8;
    while (plan.cluster < kMaxCluster && plan.lists * plan.cluster < blocks && params.keys > 2 * kStep * plan.cluster)
        plan.cluster *= 2;
    return plan;
}

void select_key_lists_cuda(const SelectParams& params, const RadixSelectPlan& plan, int32_t* keys, int64_t* begins,
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
    selection.cluster = plan.cluster;
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
    const int64_t share = ceil_div(ceil_div<int64_t>(params.keys, plan.cluster), kLoad) * kLoad;
    const bool stores = share > kLoad && share * bytes <= kernel_limits(bias.dtype).shared_bytes;
    selection.storable = stores ? static_cast<int>(share) : 0;

    launch_in_clusters(kernel_of(bias.dtype), grid_of(plan.lists * plan.cluster), plan.cluster, kThreads,
                       selection.storable * bytes, stream, selection);
}

}  // namespace flash_dmattn
