#include "append.h"

#include <algorithm>

#include "cuda/common/check.h"
#include "gather.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxCtas = 4096;

// grid: (CTAs of a sequence and KV head, B * Hkv)
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ KvCacheArgs p) {
    const int kv_heads = static_cast<int>(p.kv_heads);
    const KvCache cache(p, blockIdx.y / kv_heads, blockIdx.y % kv_heads);
    cache.append<half_t>(blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);  // bits of any 16-bit type
}

}  // namespace

void append_new_tokens(const KvCacheParams& p, cudaStream_t stream) {
    if (p.key.data == nullptr) return;
    const int64_t max_ctas = ceil_div(kMaxCtas, p.batch * p.kv_heads);  // of a sequence and KV head
    const int64_t chunks = p.seqlen_q * p.head_dim / 8;                 // none where all rows are padding
    const int64_t ctas = std::clamp<int64_t>(ceil_div<int64_t>(chunks, kThreads), 1, max_ctas);
    append_kernel<<<grid_of_heads(p, ctas), kThreads, 0, stream>>>(KvCacheArgs(p));
    FLASH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_dmattn::cuda
