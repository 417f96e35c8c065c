// Stable ascending radix sorts of key-value pairs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_dmattn::cuda {

// A double buffer: `current` holds the input, then the sorted output.
template <typename T>
struct DoubleBuffer {
    T* current;
    T* other;
};

int64_t sort_memory_bytes_32(int64_t size);
int64_t sort_memory_bytes_64(int64_t size);
// Only the lowest `bits` of the keys are compared.
void sort_pairs(void* memory, int64_t memory_bytes, DoubleBuffer<uint32_t>& keys, DoubleBuffer<uint32_t>& values,
                int64_t size, int bits, cudaStream_t stream);
void sort_pairs(void* memory, int64_t memory_bytes, DoubleBuffer<uint64_t>& keys, DoubleBuffer<uint32_t>& values,
                int64_t size, int bits, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
