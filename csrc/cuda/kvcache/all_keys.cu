#include "all_keys.h"

#include <algorithm>
#include <climits>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/launch.h"
#include "gather.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256, kLoads = 4;
constexpr int64_t kMaxCtas = 8192;

// The keys of a sequence that are gathered.
__device__ __forceinline__ int gathered_keys(const KvCacheArgs& p, const AllKeys& all, int batch) {
    const KvCache cache(p, batch, 0);
    return cache.rows <= all.skipped_rows ? 0 : cache.keys;
}

// The first gathered key of a sequence. All threads call.
__device__ __forceinline__ int find_offset(const KvCacheArgs& p, const AllKeys& all, int batch) {
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    int keys = 0;
    for (int b = threadIdx.x; b < batch; b += kThreads) keys += gathered_keys(p, all, b);
    if (keys > 0) atomicAdd(&sum, keys);
    __syncthreads();
    return sum;
}

// grid: (CTAs of a sequence and KV head, B * Hkv). Each thread has kLoads chunks of K and of V in flight.
template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ AllKeys all) {
    grid_dependency_sync();
    const int kv_heads = static_cast<int>(p.kv_heads), chunks = static_cast<int>(p.head_dim) / 8;
    const KvCache cache(p, blockIdx.y / kv_heads, blockIdx.y % kv_heads);
    const int keys = gathered_keys(p, all, cache.batch);
    const bool writes_offset = blockIdx.x == 0 && cache.kv_head == 0;
    if (keys == 0 && !writes_offset) return;
    const int offset = find_offset(p, all, cache.batch);
    if (writes_offset && threadIdx.x == 0) {
        if (cache.batch == 0) all.offsets[0] = 0;
        all.offsets[cache.batch + 1] = offset + keys;
    }
    const int step = gridDim.x * kThreads;
    const auto at = [&](int key) { return (int64_t{offset} + key) * kv_heads + cache.kv_head; };
    for (int first = blockIdx.x * kThreads + threadIdx.x; first < keys * chunks; first += kLoads * step) {
        uint4 key_chunks[kLoads], value_chunks[kLoads];
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
            const int i = first + n * step;
            if (i >= keys * chunks) continue;
            const int key = i / chunks, chunk = i % chunks;
            key_chunks[n] = reinterpret_cast<const uint4*>(cache.row_of<half_t>(p.k_cache, p.key, key))[chunk];
            value_chunks[n] = reinterpret_cast<const uint4*>(cache.row_of<half_t>(p.v_cache, p.value, key))[chunk];
        }
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
            const int i = first + n * step;
            if (i >= keys * chunks) continue;
            const int key = i / chunks, chunk = i % chunks;
            const int64_t to = at(key) * chunks + chunk;
            static_cast<uint4*>(all.key)[to] = key_chunks[n];
            static_cast<uint4*>(all.value)[to] = value_chunks[n];
            half_t* const key_in_cache = cache.new_cache_row<half_t>(p.k_cache, key);
            if (key_in_cache == nullptr) continue;
            reinterpret_cast<uint4*>(key_in_cache)[chunk] = key_chunks[n];
            reinterpret_cast<uint4*>(cache.new_cache_row<half_t>(p.v_cache, key))[chunk] = value_chunks[n];
        }
    }
    if (all.bias == nullptr) return;
    for (int key = blockIdx.x * kThreads + threadIdx.x; key < keys; key += step) {
        const Bits bias = bias_of<Bits>(p, cache, key);
        static_cast<Bits*>(all.bias)[at(key)] = bias;
        if (Bits* const in_cache = cache.new_cache_row<Bits>(p.bias_cache, key); in_cache != nullptr) *in_cache = bias;
    }
}

}  // namespace

bool can_gather_all_keys(const KvCacheParams& p) {
    return can_gather(p) && p.window_size == 0 && p.cu_seqlens_q != nullptr && p.batch * p.seqlen_k < INT_MAX / 2 &&
           p.seqlen_k * (p.head_dim / 8) < INT_MAX / 2;
}

void gather_all_keys(const KvCacheParams& p, const AllKeys& all, cudaStream_t stream) {
    const int64_t ctas = ceil_div<int64_t>(p.seqlen_k * (p.head_dim / 8), kThreads * kLoads);
    const int64_t max_ctas = std::max<int64_t>(kMaxCtas / (p.batch * p.kv_heads), 1);
    const dim3 grid = grid_of_heads(p, std::clamp<int64_t>(ctas, 1, max_ctas));
    with_bias_bits(
        p, [&](auto bits) { launch(gather_kernel<decltype(bits)>, {grid, kThreads}, stream, KvCacheArgs(p), all); });
}

}  // namespace flash_dmattn::cuda
