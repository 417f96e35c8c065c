// Stable radix sorts of keys with their values, ascending.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_dmattn::cuda {

// One of two buffers holds what there is to sort, afterwards what is sorted.
template <typename T>
struct Buffers {
    T* current;
    T* other;
};

int64_t sort_scratch_bytes_32(int64_t size);
int64_t sort_scratch_bytes_64(int64_t size);
// Of the keys the lowest `bits` are looked at.
void sort_pairs(void* scratch, int64_t scratch_bytes, Buffers<uint32_t>& keys, Buffers<uint32_t>& values, int64_t size,
                int bits, cudaStream_t stream);
void sort_pairs(void* scratch, int64_t scratch_bytes, Buffers<uint64_t>& keys, Buffers<uint32_t>& values, int64_t size,
                int bits, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
