// A wavelet tree of a permutation, and what it tells of prefixes.
//
// A node of the tree holds the values that agree in all but their lowest bits, in the order in which they came; its next
// bit splits it in two. The node of the values a to b lies at the places a to b, so that where a value goes follows from
// how many ones stand before it. Nodes that lie in one chunk of values are split by one block, level after level in
// shared memory; larger ones by two launches a level, of which the first counts the ones of every chunk.
#include "prefix_topk.h"

#include <algorithm>

#include "common/check.h"
#include "common/ptx.cuh"
#include "common/sequence.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kWords = 8;  // of 32 values, one a lane, that a warp has
constexpr int kChunkLevels = 12;
constexpr int kChunk = 1 << kChunkLevels;
static_assert(kWarps * kWords * 32 == kChunk);

// A bit of 32 neighbouring values, and how many ones stand before them.
struct alignas(8) BitWord {
    uint32_t bits;
    int32_t ones_before;
};

struct Tree {
    int64_t size;
    int64_t words;    // of a level
    BitWord* levels;  // [levels, words]
    int32_t* ones;    // [chunks], of the level that is split
    int32_t* values;  // [2, size]
};

// Of the bits up to `bit`, itself included.
__device__ int ones_upto(uint32_t bits, int bit) { return __popc(bits & (~0u >> (31 - bit))); }

__device__ int ones_before_node(int place, int level) { return (place >> (level + 1)) << level; }

// Of a value with `ones` ones up to it, itself included: where the last zero of its node up to there goes, and where the
// last one.
__device__ int zero_to(int place, int ones, int level) { return place + ones_before_node(place, level) - ones; }
__device__ int one_to(int place, int ones, int level) {
    return ones + ones_before_node(place, level) + (1 << level) - 1;
}

// One block's chunk of the values.
class Chunk {
public:
    __device__ Chunk(const Tree& tree, const int32_t* values)
        : tree_(tree), first_(static_cast<int>(blockIdx.x) * kChunk + warp_id() * kWords * 32) {
        for_each_word([&](int w, int place) { value_[w] = place < tree.size ? values[place] : 0; });
    }

    __device__ int start() const { return static_cast<int>(blockIdx.x) * kChunk; }

    __device__ int warp_ones(int level) const {
        int ones = 0;
        for_each_word([&](int w, int) { ones += __popc(bits(w, level)); });
        return ones;
    }

    // Writes the level's bits down, and calls move(place, value) for every value with the place where it goes.
    // ones_before: before the chunk. Between two calls the block is to be synchronized.
    template <typename Move>
    __device__ void split(int level, int ones_before, const Move& move) {
        __shared__ int ones_of[kWarps];
        const int own = warp_ones(level);
        if (lane_id() == 0) ones_of[warp_id()] = own;
        __syncthreads();
        for (int warp = 0; warp < warp_id(); ++warp) ones_before += ones_of[warp];
        for_each_word([&](int w, int place) {
            const uint32_t word = bits(w, level);
            const bool exists = place < tree_.size;
            if (lane_id() == 0 && exists) tree_.levels[level * tree_.words + place / 32] = {word, ones_before};
            const int ones = ones_before + ones_upto(word, lane_id());
            const bool is_one = word >> lane_id() & 1;
            if (exists) move(is_one ? one_to(place, ones, level) : zero_to(place, ones, level), value_[w]);
            ones_before += __popc(word);
        });
    }

    __device__ void take_from(const int32_t* values) {
        for_each_word([&](int w, int place) { value_[w] = place < tree_.size ? values[place - start()] : 0; });
    }

private:
    template <typename Visit>
    __device__ void for_each_word(const Visit& visit) const {
#pragma unroll
        for (int w = 0; w < kWords; ++w) visit(w, first_ + w * 32 + lane_id());
    }
    __device__ uint32_t bits(int w, int level) const { return __ballot_sync(~0u, value_[w] >> level & 1); }

    const Tree& tree_;
    int first_;  // place of the warp's first value
    int value_[kWords];
};

__global__ void __launch_bounds__(kThreads) count_ones_kernel(const __grid_constant__ Tree tree, const int32_t* values,
                                                              int level) {
    __shared__ int ones;
    if (threadIdx.x == 0) ones = 0;
    __syncthreads();
    const int own = Chunk(tree, values).warp_ones(level);
    if (lane_id() == 0) atomicAdd(&ones, own);
    __syncthreads();
    if (threadIdx.x == 0) tree.ones[blockIdx.x] = ones;
}

// Of a node that is larger than a chunk.
__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ Tree tree, const int32_t* values,
                                                         int32_t* to, int level) {
    Chunk chunk(tree, values);
    __shared__ int ones_before;
    if (threadIdx.x == 0) ones_before = ones_before_node(chunk.start(), level);
    __syncthreads();
    int ones = 0;
    const int node = chunk.start() >> (level + 1) << (level + 1);
    for (int c = node / kChunk + threadIdx.x; c < blockIdx.x; c += kThreads) ones += tree.ones[c];
    ones = __reduce_add_sync(~0u, ones);
    if (lane_id() == 0) atomicAdd(&ones_before, ones);
    __syncthreads();
    chunk.split(level, ones_before, [&](int place, int value) { to[place] = value; });
}

// The levels from `levels` - 1 down, whose nodes lie in chunks.
__global__ void __launch_bounds__(kThreads) split_chunks_kernel(const __grid_constant__ Tree tree, const int32_t* values,
                                                                int levels) {
    __shared__ int32_t moved[kChunk];
    Chunk chunk(tree, values);
    for (int level = levels - 1; level >= 0; --level) {
        // Half of the values before are ones.
        chunk.split(level, chunk.start() / 2, [&](int place, int value) { moved[place - chunk.start()] = value; });
        __syncthreads();
        chunk.take_from(moved);
    }
}

__global__ void __launch_bounds__(kThreads) search_kernel(const __grid_constant__ Tree tree,
                                                          const __grid_constant__ PrefixSearch search) {
    const int64_t query = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (query >= search.queries) return;
    int last = search.last[query], wanted = search.wanted[query];
    for (int level = search.levels - 1; level >= 0; --level) {
        const BitWord word = tree.levels[level * tree.words + last / 32];
        const int ones = word.ones_before + ones_upto(word.bits, last % 32);
        const int last_zero = zero_to(last, ones, level), last_one = one_to(last, ones, level);
        const bool in_ones = wanted > last_zero;  // the prefix has too few zeros
        if (in_ones) wanted += last_one - last;
        last = in_ones ? last_one : last_zero;
    }
    search.found[query] = wanted;
}

int64_t chunks_of(int64_t size) { return ceil_div<int64_t>(size, kChunk); }

Tree tree_in(const PrefixSearch& search, void* scratch) {
    Tree tree;
    tree.size = search.size;
    tree.words = ceil_div<int64_t>(search.size, 32);
    tree.levels = static_cast<BitWord*>(scratch);
    tree.ones = reinterpret_cast<int32_t*>(tree.levels + search.levels * tree.words);
    tree.values = tree.ones + chunks_of(search.size);
    return tree;
}

}  // namespace
}  // namespace cuda

int64_t prefix_search_scratch(const PrefixSearch& search) {
    using namespace cuda;
    const Tree tree = tree_in(search, nullptr);
    return reinterpret_cast<intptr_t>(tree.values + 2 * search.size);
}

void search_prefixes_cuda(const PrefixSearch& search, void* scratch, cudaStream_t stream) {
    using namespace cuda;
    if (search.queries == 0) return;
    const Tree tree = tree_in(search, scratch);
    const unsigned chunks = grid_of(chunks_of(search.size));
    const int32_t* values = search.values;
    for (int level = search.levels - 1; level >= kChunkLevels; --level) {
        int32_t* to = tree.values + level % 2 * search.size;
        count_ones_kernel<<<chunks, kThreads, 0, stream>>>(tree, values, level);
        split_kernel<<<chunks, kThreads, 0, stream>>>(tree, values, to, level);
        values = to;
    }
    split_chunks_kernel<<<chunks, kThreads, 0, stream>>>(tree, values, std::min(search.levels, kChunkLevels));
    search_kernel<<<grid_of(ceil_div<int64_t>(search.queries, kThreads)), kThreads, 0, stream>>>(tree, search);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_dmattn
