// Values that are not finite, a bit a key.
#include "nonfinite.h"

#include "../common/basics.cuh"
#include "../common/check.h"
#include "../common/sequence.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKeys = 32;  // of a warp

// Whether one of two 16-bit numbers is infinity or NaN: its exponent is all ones.
template <typename T>
__device__ __forceinline__ bool has_nonfinite(uint32_t pair) {
    constexpr uint32_t kExponents = std::is_same_v<T, half_t> ? 0x7c007c00 : 0x7f807f80;
    return __vcmpeq2(pair & kExponents, kExponents) != 0;
}

// 16 bytes a lane; kLanes, a power of 2, take a key of up to 8 * kLanes columns.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) nonfinite_kernel(const __grid_constant__ FwdArgs p, int words) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + warp_id();
    const int kv_heads = static_cast<int>(p.kv_heads);
    if (index >= p.batch * kv_heads * words) return;
    const int first_key = static_cast<int>(index % words) * kKeys;
    const Sequence s(p, static_cast<int>(index / words / kv_heads));
    const T* value = static_cast<const T*>(p.value.data) + key_offset(p.value, s, static_cast<int>(index / words % kv_heads));

    constexpr int kAtOnce = 32 / kLanes;
    constexpr uint32_t kLanesOfKey = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
    const int col = lane_id() % kLanes * 8;
    uint32_t word = 0;
#pragma unroll 8
    for (int i = 0; i < kKeys; i += kAtOnce) {
        const int key = first_key + i + lane_id() / kLanes;
        bool is_bad = key >= s.keys;
        if (!is_bad && col < p.head_dim) {
            const uint4 x = __ldg(reinterpret_cast<const uint4*>(value + key * p.value.row_stride + col));
            is_bad = has_nonfinite<T>(x.x) || has_nonfinite<T>(x.y) || has_nonfinite<T>(x.z) || has_nonfinite<T>(x.w);
        }
        const uint32_t bad = __ballot_sync(~0u, is_bad);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
            if (bad >> k * kLanes & kLanesOfKey) word |= 1u << (i + k);
    }
    if (lane_id() == 0) p.nonfinite_values[index] = word;
}

template <typename T, int kLanes>
void launch(const FwdArgs& p, cudaStream_t stream) {
    const int64_t words = nonfinite_words(p), blocks = ceil_div<int64_t>(p.batch * p.kv_heads * words, kThreads / 32);
    if (blocks == 0) return;
    nonfinite_kernel<T, kLanes><<<grid_of(blocks), kThreads, 0, stream>>>(p, static_cast<int>(words));
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch(const FwdArgs& p, cudaStream_t stream) {
    if (p.head_dim <= 32) return launch<T, 4>(p, stream);
    if (p.head_dim <= 64) return launch<T, 8>(p, stream);
    if (p.head_dim <= 128) return launch<T, 16>(p, stream);
    launch<T, 32>(p, stream);
}

}  // namespace

void find_nonfinite_values(const FwdArgs& args, cudaStream_t stream) {
    args.dtype == DataType::kFloat16 ? launch<half_t>(args, stream) : launch<bfloat16_t>(args, stream);
}

}  // namespace flash_dmattn::cuda
