#include "best_keys.h"

#include <algorithm>
#include <climits>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/launch.h"
#include "gather.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKeysOfGatherCta = kThreads, kLoads = 8;

// The start of sequence b among the gathered keys of a packed call.
__device__ __forceinline__ int start_of(const KvCacheArgs& p, int max_selected, int b) {
    return min(max(p.cu_seqlens_q[b], 0), static_cast<int>(p.total_q)) + b * max_selected;
}

// grid: (CTAs of kKeysOfCopyCta keys, B * Hkv). Bits: an unsigned integer of the size of a bias.
template <typename Bits>
__global__ void __launch_bounds__(kThreads) read_biases_kernel(const __grid_constant__ KvCacheArgs p, int max_selected,
                                                               Bits* biases, int32_t* prefix, int32_t* offsets) {
    grid_dependency_sync();
    const int kv_heads = static_cast<int>(p.kv_heads);
    const KvCache cache(p, blockIdx.y / kv_heads, blockIdx.y % kv_heads);
    const int earlier = max(cache.keys - cache.rows, 0);
    if (blockIdx.x == 0 && threadIdx.x == 0 && cache.kv_head == 0) {
        prefix[cache.batch] = earlier;
        if (offsets != nullptr) {
            offsets[cache.batch] = start_of(p, max_selected, cache.batch);
            offsets[cache.batch + 1] = start_of(p, max_selected, cache.batch + 1);
        }
    }
    copy_biases(p, cache, earlier, biases + blockIdx.y * p.seqlen_k);
}

template <typename T>
__device__ __forceinline__ T* shuffle(T* pointer, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(pointer), lane));
}

// The keys of a list without its padding, which are entries of -1 at the end.
__device__ __forceinline__ int count_listed(const int32_t* list, int length) {
    int count = max(length - static_cast<int>(KeyListsView::kAlign), 0), end = length;
    while (count < end) {
        const int middle = (count + end) / 2;
        (list[middle] < 0 ? end : count) = list[middle] < 0 ? middle : middle + 1;
    }
    return count;
}

// The key in the cache of a position, counted from the end of its sequence; negative where there is none.
__device__ __forceinline__ int key_at(const KvCache& cache, const BestKeys& best, int from_end, int kv_heads) {
    if (from_end < cache.rows) return cache.keys - 1 - from_end;
    const int64_t list = int64_t{cache.batch} * kv_heads + cache.kv_head, begin = best.begins[list];
    const int count = count_listed(best.lists + begin, static_cast<int>(best.ends[list] - begin));
    const int rank = count - 1 - (from_end - cache.rows);
    return rank < 0 ? -1 : best.lists[begin + rank];
}

// K and V of a key, or null.
struct Rows {
    const half_t *key = nullptr, *value = nullptr;
    half_t *key_in_cache = nullptr, *value_in_cache = nullptr;  // to be written, too
};

// Copies the rows of the first `count` lanes, or zeros where a lane has null, to `at` and the following. A warp calls.
__device__ __forceinline__ void copy_rows(const KvCacheArgs& p, const BestKeys& best, int64_t at, int count,
                                          const Rows& rows) {
    const int chunks = static_cast<int>(p.head_dim) / 8;
    const bool writes_cache = __any_sync(~0u, rows.key_in_cache != nullptr);
    for (int lane = 0; lane < count; lane += kLoads)
        for (int i = lane_id(); i < (2 * chunks + 31) / 32 * 32; i += 32) {  // all lanes take part in the shuffles
            const bool is_value = i >= chunks;
            const int chunk = is_value ? i - chunks : i;
            uint4 x[kLoads];
#pragma unroll
            for (int k = 0; k < kLoads; ++k) {
                const half_t* const key = shuffle(rows.key, lane + k);
                const half_t* const value = shuffle(rows.value, lane + k);
                const half_t* const row = is_value ? value : key;
                x[k] = {};
                if (row != nullptr && chunk < chunks) x[k] = reinterpret_cast<const uint4*>(row)[chunk];
            }
            uint4* const to = static_cast<uint4*>(is_value ? best.value : best.key) + (at + lane) * chunks + chunk;
#pragma unroll
            for (int k = 0; k < kLoads; ++k)
                if (lane + k < count && chunk < chunks) to[int64_t{k} * chunks] = x[k];
            if (!writes_cache) continue;
#pragma unroll
            for (int k = 0; k < kLoads; ++k) {
                half_t* const key = shuffle(rows.key_in_cache, lane + k);
                half_t* const value = shuffle(rows.value_in_cache, lane + k);
                half_t* const row = is_value ? value : key;
                if (row != nullptr && chunk < chunks) reinterpret_cast<uint4*>(row)[chunk] = x[k];
            }
        }
}

// grid: (CTAs of kKeysOfGatherCta positions of KV heads, B + 1): the last row of CTAs has the positions after the last
// packed sequence. Each lane finds one key; then the warp copies them, with kLoads keys and values in flight, and
// writes the new ones into the cache.
template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ BestKeys best) {
    grid_dependency_sync();
    const int kv_heads = static_cast<int>(p.kv_heads), max_selected = static_cast<int>(best.max_selected);
    const int batch = blockIdx.y, sequences = static_cast<int>(p.batch);
    int start, end;  // the positions of the sequence
    if (p.cu_seqlens_q == nullptr) {
        const int width = max_selected + static_cast<int>(p.seqlen_q);
        start = batch * width, end = batch < sequences ? start + width : start;
    } else {
        start = start_of(p, max_selected, batch);
        end = batch < sequences ? start_of(p, max_selected, batch + 1) : static_cast<int>(best.total);
    }
    const int positions = (end - start) * kv_heads;  // negative for offsets that descend
    for (int first = blockIdx.x * kKeysOfGatherCta; first < positions; first += gridDim.x * kKeysOfGatherCta) {
        const int i = first + threadIdx.x, position = i / kv_heads;
        const KvCache cache(p, min(batch, sequences - 1), i % kv_heads);
        const bool skips = batch < sequences && cache.rows <= best.skipped_rows;
        int key = -1;
        if (i < positions && batch < sequences && !skips)
            key = key_at(cache, best, end - start - 1 - position, kv_heads);
        const bool exists = key >= 0 && key < cache.keys && cache.has_row(key);
        if (i < positions) {
            int64_t to = int64_t{start} * kv_heads + i;
            if (p.cu_seqlens_q == nullptr)  // keys contiguous
                to = (int64_t{batch} * kv_heads + cache.kv_head) * (end - start) + position;
            Bits bias = minus_infinity<Bits>(p.bias_cache.dtype);
            if (exists) {
                bias = *cache.row_of<Bits>(p.bias_cache, p.bias, key);
                if (Bits* const in_cache = cache.new_cache_row<Bits>(p.bias_cache, key); in_cache != nullptr)
                    *in_cache = bias;
            }
            static_cast<Bits*>(best.bias)[to] = bias;
        }
        if (skips) continue;
        Rows rows;
        if (exists) {
            rows = {cache.row_of<half_t>(p.k_cache, p.key, key), cache.row_of<half_t>(p.v_cache, p.value, key),
                    cache.new_cache_row<half_t>(p.k_cache, key), cache.new_cache_row<half_t>(p.v_cache, key)};
        }
        const int of_warp = first + static_cast<int>(threadIdx.x) / 32 * 32;
        copy_rows(p, best, int64_t{start} * kv_heads + of_warp, min(positions - of_warp, 32), rows);
    }
}

}  // namespace

bool can_gather_best_keys(const KvCacheParams& p) {
    const int64_t total = p.batch * std::min(p.window_size, p.seqlen_k) + p.total_q;
    return selects_keys(p) && total * p.kv_heads < INT_MAX / 2;
}

void read_biases(const KvCacheParams& params, int64_t max_selected, void* biases, int32_t* prefix, int32_t* offsets,
                 cudaStream_t stream) {
    const KvCacheArgs args(params);
    const dim3 grid = grid_of_heads(params, ceil_div<int64_t>(params.seqlen_k, kKeysOfCopyCta));
    with_bias_bits(params, [&](auto bits) {
        using Bits = decltype(bits);
        launch(read_biases_kernel<Bits>, {grid, kThreads}, stream, args, static_cast<int>(max_selected),
               static_cast<Bits*>(biases), prefix, offsets);
    });
}

void gather_best_keys(const KvCacheParams& params, const BestKeys& best, cudaStream_t stream) {
    const KvCacheArgs args(params);
    // The positions of one sequence; after the last packed one there may be more.
    const int64_t positions = (best.max_selected + params.seqlen_q) * params.kv_heads;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(positions, kKeysOfGatherCta)),
                    static_cast<unsigned>(params.batch + 1));
    with_bias_bits(params,
                   [&](auto bits) { launch(gather_kernel<decltype(bits)>, {grid, kThreads}, stream, args, best); });
}

}  // namespace flash_dmattn::cuda
