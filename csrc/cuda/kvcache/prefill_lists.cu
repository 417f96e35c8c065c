#include "prefill_lists.h"

#include <algorithm>
#include <climits>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/launch.h"
#include "cuda/topk/m_block_selector.cuh"
#include "gather.cuh"
#include "row_block.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKeysOfCta = 4 * kThreads;  // biases that a CTA copies
constexpr int kAppendedRows = 16;         // of a CTA

// Writes the new tokens into the cache. grid: (blocks of kAppendedRows rows, Hkv).
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ PrefillLists lists) {
    grid_dependency_sync();
    const RowBlock<kAppendedRows> block(p, blockIdx.x);
    const KvCache cache(p, block.batch, blockIdx.y);
    if (cache.rows <= lists.skipped_rows) return;
    cache.append<half_t>(block.first_row, block.first_row + kAppendedRows, threadIdx.x, kThreads);
}

// Copies the biases of all keys. grid: (CTAs of kKeysOfCta keys, B * Hkv). Bits: an unsigned integer of the size of a
// bias.
template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    copy_biases_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ PrefillLists lists) {
    grid_dependency_sync();
    const int kv_heads = static_cast<int>(p.kv_heads);
    const KvCache cache(p, blockIdx.y / kv_heads, blockIdx.y % kv_heads);
    if (cache.rows <= lists.skipped_rows) return;
    Bits* const to = static_cast<Bits*>(lists.all_biases) + blockIdx.y * lists.bias_stride;
    const int first = blockIdx.x * kKeysOfCta, end = min(cache.keys, first + kKeysOfCta);
    for (int key = first + threadIdx.x; key < end; key += kThreads) to[key] = bias_of<Bits>(p, cache, key);
}

// The biases of a sequence and KV head: in a copy, in a contiguous cache, or in pages.
template <typename Bits>
class CachedBiases {
public:
    __device__ CachedBiases(const KvCacheArgs& p, const PrefillLists& lists, const KvCache& cache)
        : p_(p), cache_(cache), adjacent_(nullptr) {
        if (lists.all_biases != nullptr) {
            adjacent_ = static_cast<const Bits*>(lists.all_biases) +
                        (cache.batch * p.kv_heads + cache.kv_head) * lists.bias_stride;
        } else if (p.block_table == nullptr) {
            adjacent_ = cache.cached_row_of<Bits>(p.bias_cache, 0);
        }
    }
    __device__ const Bits* at(int key) const {
        return adjacent_ != nullptr ? adjacent_ + key : cache_.cached_row_of<Bits>(p_.bias_cache, key);
    }

private:
    const KvCacheArgs& p_;
    const KvCache& cache_;
    const Bits* adjacent_;  // null: in pages
};

constexpr int kSelectThreads = 1024;

using MBlock = RowBlock<static_cast<int>(KeyListsView::kRows)>;

// grid: (m_blocks, Hkv).
template <DataType kType>
__global__ void __launch_bounds__(kSelectThreads)
    list_prefill_keys_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ PrefillLists lists) {
    grid_dependency_sync();
    using Bits = typename FloatBits<kType>::Bits;
    using Selector = MBlockSelector<kType, CachedBiases<Bits>>;
    static_assert(Selector::kThreads == kSelectThreads);
    constexpr int kRows = static_cast<int>(KeyListsView::kRows);
    __shared__ typename Selector::SharedStorage smem;
    const MBlock block(p, blockIdx.x);
    const KvCache cache(p, block.batch, blockIdx.y);
    const int rows = min(cache.rows - block.first_row, kRows);
    if (rows <= 0 || cache.rows <= lists.skipped_rows) return;
    const int64_t begin = (int64_t{blockIdx.x} * gridDim.y + cache.kv_head) * lists.stride;
    const CachedBiases<Bits> biases(p, lists, cache);
    Selector selector(biases, cache.keys - cache.rows + block.first_row, rows, cache.keys,
                      static_cast<int>(p.window_size), smem);
    const int rows_per_page = static_cast<int>(lists.rows_per_page);
    const int length = selector.run(
        {lists.keys + begin, reinterpret_cast<uint4*>(lists.rows) + begin, static_cast<Bits*>(lists.biases) + begin},
        [&](int key) { return cache.row_number(key, rows_per_page); });
    if (threadIdx.x == 0) {
        const int64_t list =
            (int64_t{cache.batch} * p.kv_heads + cache.kv_head) * lists.num_m_blocks + block.first_row / kRows;
        lists.begins[list] = begin;
        lists.ends[list] = begin + KeyListsView::padded(length);
    }
}

// Rows of the cache that a page or batch element takes: 0 where keys and values need different numbers.
int64_t rows_per_page(const KvCacheParams& p) {
    const int64_t keys = p.page_size > 0 ? p.page_size : p.seqlen_k;
    if (p.cache_batch == 1) return keys;
    const auto rows_of = [](const RowsView& cache) {
        return cache.row_stride > 0 && cache.batch_stride % cache.row_stride == 0
                   ? cache.batch_stride / cache.row_stride
                   : 0;
    };
    return rows_of(p.k_cache) == rows_of(p.v_cache) ? rows_of(p.k_cache) : 0;
}

// Whether the lists take less time than to select a sequence's best keys once and to gather them (best_keys.h): each CTA
// reads the biases of all keys. As measured on an H200.
bool is_faster(const KvCacheParams& p) {
    constexpr int64_t kMaxKeys = 1 << 18;  // that an SM reads
    const int64_t ctas = ceil_div<int64_t>(p.total_q, KeyListsView::kRows) * p.kv_heads;
    return ceil_div<int64_t>(ctas, current_device().num_sms) * p.seqlen_k <= kMaxKeys;
}

// A window of all keys selects nothing, unless bits must not depend on the room of a sequence.
bool serves(const KvCacheParams& p) {
    if (!can_gather(p) || p.window_size == 0 || p.seqlen_k == 0) return false;
    if (!p.bias_cache.present() || p.relative_bias.present()) return false;
    return p.batch_invariant || (p.window_size < p.seqlen_k && is_faster(p));
}

}  // namespace

PrefillLists plan_prefill_lists(const KvCacheParams& p) {
    constexpr int64_t kRows = KeyListsView::kRows;
    PrefillLists lists;
    if (!serves(p)) return lists;
    const int64_t rows = rows_per_page(p), keys = p.page_size > 0 ? p.page_size : p.seqlen_k;
    lists.cache_rows = (p.cache_batch - 1) * rows + keys;
    lists.num_m_blocks = ceil_div(p.seqlen_q, kRows);
    const bool reads_cache = has_vector_bias(p) && (p.page_size > 0 || p.seqlen_k % kGroup == 0);
    if (!reads_cache) lists.bias_stride = ceil_div<int64_t>(p.seqlen_k, kGroup) * kGroup;
    lists.stride = KeyListsView::padded(std::min(std::min(p.window_size, p.seqlen_k) + kRows, p.seqlen_k));
    lists.capacity = MBlock::count(p) * p.kv_heads * lists.stride;
    if (lists.cache_rows < INT_MAX / 2) lists.rows_per_page = rows;
    return lists;
}

void list_prefill_keys(const KvCacheParams& params, const PrefillLists& lists, cudaStream_t stream) {
    KvCacheArgs args(params);
    args.window_size = std::min(args.window_size, args.seqlen_k);
    const auto kv_heads = static_cast<unsigned>(params.kv_heads);
    if (params.key.data != nullptr)
        launch(append_kernel, {dim3(grid_of(RowBlock<kAppendedRows>::count(params)), kv_heads), kThreads}, stream, args,
               lists);
    if (lists.all_biases != nullptr)
        with_bias_bits(params, [&](auto bits) {
            const dim3 grid = grid_of_heads(params, ceil_div<int64_t>(params.seqlen_k, kKeysOfCta));
            launch(copy_biases_kernel<decltype(bits)>, {grid, kThreads}, stream, args, lists);
        });
    const auto run = [&](auto kernel) {
        launch(kernel, {dim3(grid_of(MBlock::count(params)), kv_heads), kSelectThreads}, stream, args, lists);
    };
    switch (params.bias_cache.dtype) {
        case DataType::kFloat16: return run(list_prefill_keys_kernel<DataType::kFloat16>);
        case DataType::kBFloat16: return run(list_prefill_keys_kernel<DataType::kBFloat16>);
        default: return run(list_prefill_keys_kernel<DataType::kFloat32>);
    }
}

FwdParams attention_to_lists(const KvCacheParams& params, const PrefillLists& lists) {
    FwdParams p;
    p.batch = params.batch;
    p.heads = params.heads;
    p.kv_heads = params.kv_heads;
    p.seqlen_q = params.seqlen_q;
    p.seqlen_k = p.total_k = lists.cache_rows;
    p.total_q = params.total_q;
    p.head_dim = params.head_dim;
    p.cu_seqlens_q = params.cu_seqlens_q;
    p.skipped_rows = lists.skipped_rows;
    p.dtype = params.dtype;
    p.softmax_scale = params.softmax_scale;
    p.softcap = params.softcap;
    p.query = params.query;
    p.key = {params.k_cache.data, 0, params.k_cache.row_stride, params.k_cache.head_stride};
    p.value = {params.v_cache.data, 0, params.v_cache.row_stride, params.v_cache.head_stride};
    p.out = params.out;
    p.lse = params.lse;
    p.lists.keys = lists.keys;
    p.lists.begins = lists.begins;
    p.lists.ends = lists.ends;
    p.lists.rows = lists.rows;
    p.lists.biases = lists.biases;
    p.lists.capacity = lists.capacity;
    p.lists.batches = params.batch;
    p.lists.heads = params.kv_heads;
    p.lists.num_m_blocks = lists.num_m_blocks;
    p.lists.estimated_length = lists.stride;
    p.bias.kind = BiasKind::kKey;
    p.bias.data = lists.biases;
    p.bias.dtype = params.bias_cache.dtype;
    p.bias.batches = params.batch;
    p.bias.heads = params.kv_heads;
    p.bias.per_key = true;
    return p;
}

}  // namespace flash_dmattn::cuda
