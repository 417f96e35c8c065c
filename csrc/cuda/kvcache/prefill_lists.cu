#include "prefill_lists.h"

#include <algorithm>
#include <climits>
#include <numeric>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/launch.h"
#include "cuda/topk/m_block_selector.cuh"
#include "gather.cuh"
#include "row_block.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAppendedRows = 16;  // of a CTA

// Writes the new tokens into the cache. grid: (blocks of kAppendedRows rows, Hkv).
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ PrefillLists lists) {
    grid_dependency_sync();
    const RowBlock<kAppendedRows> block(p, blockIdx.x);
    const KvCache cache(p, block.batch, blockIdx.y);
    if (cache.rows <= lists.skipped_rows) return;
    cache.append<half_t>(block.first_row, block.first_row + kAppendedRows, threadIdx.x, kThreads);
}

// Copies the biases of all keys. grid: (CTAs of kKeysOfCopyCta keys, B * Hkv). Bits: an unsigned integer of the size of
// a bias.
template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    copy_biases_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ PrefillLists lists) {
    grid_dependency_sync();
    const int kv_heads = static_cast<int>(p.kv_heads);
    const KvCache cache(p, blockIdx.y / kv_heads, blockIdx.y % kv_heads);
    if (cache.rows <= lists.skipped_rows) return;
    copy_biases(p, cache, cache.keys, static_cast<Bits*>(lists.bias_copy) + blockIdx.y * lists.bias_copy_stride);
}

// The biases of a sequence and KV head: in a copy, in a contiguous cache, or in pages.
template <typename Bits>
class CachedBiases {
public:
    __device__ CachedBiases(const KvCacheArgs& p, const PrefillLists& lists, const KvCache& cache)
        : p_(p), cache_(cache), adjacent_(nullptr) {
        if (lists.bias_copy != nullptr) {
            adjacent_ = static_cast<const Bits*>(lists.bias_copy) +
                        (cache.batch * p.kv_heads + cache.kv_head) * lists.bias_copy_stride;
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

using MBlock = RowBlock<static_cast<int>(KeyListsView::kRows)>;

// grid: (m_blocks, Hkv).
template <DataType kType>
__global__ void __launch_bounds__(kMBlockSelectThreads)
    list_prefill_keys_kernel(const __grid_constant__ KvCacheArgs p, const __grid_constant__ PrefillLists lists) {
    grid_dependency_sync();
    using Bits = typename FloatBits<kType>::Bits;
    using Selector = MBlockSelector<kType, CachedBiases<Bits>>;
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
    const int page_step = static_cast<int>(lists.cache_rows.page_step),
              row_step = static_cast<int>(lists.cache_rows.row_step);
    const int length = selector.run(
        {lists.keys + begin, reinterpret_cast<uint4*>(lists.rows) + begin, static_cast<Bits*>(lists.biases) + begin},
        [&](int key) { return cache.row_number(key, page_step, row_step); });
    if (threadIdx.x == 0) {
        const int64_t list =
            (int64_t{cache.batch} * p.kv_heads + cache.kv_head) * lists.num_m_blocks + block.first_row / kRows;
        lists.begins[list] = begin;
        lists.ends[list] = begin + KeyListsView::padded(length);
    }
}

// Nothing where K and V need different numbers, or where these do not fit.
CacheRows cache_rows(const KvCacheParams& p) {
    const auto rows_of = [&](const RowsView& cache) -> CacheRows {
        // One page has one number of rows. With batch_invariant it must not matter how many there are.
        const int64_t page_stride = p.cache_batch == 1 && !p.batch_invariant ? 0 : cache.batch_stride;
        if (cache.row_stride <= 0 || page_stride < 0) return {};
        const int64_t unit = std::gcd(page_stride, cache.row_stride);
        return {page_stride / unit, cache.row_stride / unit};
    };
    CacheRows rows = rows_of(p.k_cache);
    const CacheRows values = rows_of(p.v_cache);
    const int64_t keys = p.page_size > 0 ? p.page_size : p.seqlen_k;
    rows.count = (p.cache_batch - 1) * rows.page_step + (keys - 1) * rows.row_step + 1;
    const bool fits =
        rows.page_step == values.page_step && rows.row_step == values.row_step && rows.count < INT_MAX / 2;
    return fits ? rows : CacheRows();
}

// Whether the lists take less time than to select a sequence's best keys once and to gather them (best_keys.h), which on
// an H200 takes about 60 us for 2048 rows. A CTA reads the biases of all keys: 16 us for 2^15, and fewer for each further
// 2^15.
bool is_faster(const KvCacheParams& p) {
    constexpr int64_t kMaxKeys = 1 << 17;  // that an SM reads
    const int64_t ctas = ceil_div<int64_t>(p.total_q, KeyListsView::kRows) * p.kv_heads;
    return ceil_div<int64_t>(ctas, current_device().num_sms) * p.seqlen_k <= kMaxKeys;
}

}  // namespace

PrefillLists plan_prefill_lists(const KvCacheParams& p) {
    constexpr int64_t kRows = KeyListsView::kRows;
    PrefillLists lists;
    if (!selects_keys(p) || !(p.batch_invariant || is_faster(p))) return lists;
    lists.cache_rows = cache_rows(p);
    lists.num_m_blocks = ceil_div(p.seqlen_q, kRows);
    static_assert(kGroup == kVectorBiases);
    const bool reads_cache = has_vector_bias(p) && p.seqlen_k % kVectorBiases == 0;  // also the last biases
    if (!reads_cache) lists.bias_copy_stride = ceil_div<int64_t>(p.seqlen_k, kVectorBiases) * kVectorBiases;
    lists.stride = KeyListsView::padded(std::min(std::min(p.window_size, p.seqlen_k) + kRows, p.seqlen_k));
    lists.capacity = MBlock::count(p) * p.kv_heads * lists.stride;
    return lists;
}

void list_prefill_keys(const KvCacheParams& params, const PrefillLists& lists, cudaStream_t stream) {
    KvCacheArgs args(params);
    args.window_size = std::min(args.window_size, args.seqlen_k);
    const auto kv_heads = static_cast<unsigned>(params.kv_heads);
    if (params.key.data != nullptr)
        launch(append_kernel, {dim3(grid_of(RowBlock<kAppendedRows>::count(params)), kv_heads), kThreads}, stream, args,
               lists);
    if (lists.bias_copy != nullptr)
        with_bias_bits(params, [&](auto bits) {
            const dim3 grid = grid_of_heads(params, ceil_div<int64_t>(params.seqlen_k, kKeysOfCopyCta));
            launch(copy_biases_kernel<decltype(bits)>, {grid, kThreads}, stream, args, lists);
        });
    const auto run = [&](auto kernel) {
        launch(kernel, {dim3(grid_of(MBlock::count(params)), kv_heads), kMBlockSelectThreads}, stream, args, lists);
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
    p.seqlen_k = p.total_k = lists.cache_rows.count;
    p.total_q = params.total_q;
    p.head_dim = params.head_dim;
    p.cu_seqlens_q = params.cu_seqlens_q;
    p.skipped_rows = lists.skipped_rows;
    p.dtype = params.dtype;
    p.softmax_scale = params.softmax_scale;
    p.softcap = params.softcap;
    p.query = params.query;
    const auto in_units = [&](const RowsView& cache) -> RowsView {
        return {cache.data, 0, cache.row_stride / lists.cache_rows.row_step, cache.head_stride};
    };
    p.key = in_units(params.k_cache);
    p.value = in_units(params.v_cache);
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
