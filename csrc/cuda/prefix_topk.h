// The search that finds how long a key stays among the best of a prefix: flash_dmattn/prefix_topk.py says why.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_dmattn {

// For each query the number that would stand at `wanted` if values[: last + 1] were sorted.
struct PrefixSearch {
    const int32_t* values;  // [size], a permutation of 0 .. size - 1; size is below 2^30
    const int32_t* last;    // [queries], the last place of the prefix
    const int32_t* wanted;  // [queries], a place of the sorted prefix: at most `last`
    int32_t* found;         // [queries]
    int64_t size, queries;
    int levels;  // how many bits of `found` to find; the higher ones are those of `wanted` and of a value's own place
};

// Bytes of scratch memory.
int64_t prefix_search_scratch(const PrefixSearch& search);
void search_prefixes_cuda(const PrefixSearch& search, void* scratch, cudaStream_t stream);

}  // namespace flash_dmattn
