// What the kernels share that gather keys from a cache.
#pragma once

#include "cache.cuh"

namespace flash_dmattn::cuda {

// The bits of -inf in the dtype of a bias. Bits: an unsigned integer of the size of a bias.
template <typename Bits>
__device__ __forceinline__ Bits minus_infinity(DataType dtype) {
    if (sizeof(Bits) == 4) return static_cast<Bits>(0xff800000u);
    return static_cast<Bits>(dtype == DataType::kBFloat16 ? 0xff80u : 0xfc00u);
}

// The bits of a key's bias; -inf where the key has no row in the cache.
template <typename Bits>
__device__ __forceinline__ Bits bias_of(const KvCacheArgs& p, const KvCache& cache, int key) {
    return cache.has_row(key) ? *cache.row_of<Bits>(p.bias_cache, p.bias, key)
                              : minus_infinity<Bits>(p.bias_cache.dtype);
}

constexpr int kKeysOfCopyCta = 1024;

// Copies the biases of the keys below `end`. The CTAs along x share them, kKeysOfCopyCta each.
template <typename Bits>
__device__ __forceinline__ void copy_biases(const KvCacheArgs& p, const KvCache& cache, int end, Bits* to) {
    const int first = blockIdx.x * kKeysOfCopyCta;
    for (int key = first + threadIdx.x; key < min(end, first + kKeysOfCopyCta); key += blockDim.x)
        to[key] = bias_of<Bits>(p, cache, key);
}

// Calls run(Bits()) with an unsigned integer of the size of a bias.
template <typename Run>
void with_bias_bits(const KvCacheParams& p, const Run& run) {
    p.bias_cache.dtype == DataType::kFloat32 ? run(uint32_t()) : run(uint16_t());
}

inline dim3 grid_of_heads(const KvCacheParams& p, int64_t ctas) {
    return dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(p.batch * p.kv_heads));
}

}  // namespace flash_dmattn::cuda
