#include "sort.h"

#include <cub/device/device_radix_sort.cuh>

#include "cuda/common/check.h"

namespace flash_dmattn::cuda {
namespace {

template <typename Key>
size_t sort(void* memory, size_t bytes, DoubleBuffer<Key>& keys, DoubleBuffer<uint32_t>& values, int64_t size, int bits,
            cudaStream_t stream) {
    cub::DoubleBuffer<Key> sorted_keys(keys.current, keys.other);
    cub::DoubleBuffer<uint32_t> sorted_values(values.current, values.other);
    FLASH_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(memory, bytes, sorted_keys, sorted_values,
                                                     static_cast<int32_t>(size), 0, bits, stream));
    keys = {sorted_keys.Current(), sorted_keys.Alternate()};
    values = {sorted_values.Current(), sorted_values.Alternate()};
    return bytes;
}

template <typename Key>
int64_t memory_bytes(int64_t size) {
    DoubleBuffer<Key> keys{};
    DoubleBuffer<uint32_t> values{};
    return static_cast<int64_t>(sort(nullptr, 0, keys, values, size, sizeof(Key) * 8, nullptr));
}

}  // namespace

int64_t sort_memory_bytes_32(int64_t size) { return memory_bytes<uint32_t>(size); }
int64_t sort_memory_bytes_64(int64_t size) { return memory_bytes<uint64_t>(size); }

void sort_pairs(void* memory, int64_t memory_bytes, DoubleBuffer<uint32_t>& keys, DoubleBuffer<uint32_t>& values,
                int64_t size, int bits, cudaStream_t stream) {
    sort(memory, static_cast<size_t>(memory_bytes), keys, values, size, bits, stream);
}
void sort_pairs(void* memory, int64_t memory_bytes, DoubleBuffer<uint64_t>& keys, DoubleBuffer<uint32_t>& values,
                int64_t size, int bits, cudaStream_t stream) {
    sort(memory, static_cast<size_t>(memory_bytes), keys, values, size, bits, stream);
}

}  // namespace flash_dmattn::cuda
