// Builds key lists in chunks of keys: count the listed keys per (chunk, m_block), scan the counts, and write each
// chunk's keys at its offset, in order.
#include "list_builder.h"

#include <algorithm>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/api.h"
#include "cuda/mask/bits.cuh"
#include "cuda/common/check.h"
#include "cuda/common/launch.h"
#include "cuda/mask/intervals.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMBlockRows = KeyListsView::kRows;
constexpr int kRowWords = kMBlockRows / 32;

// The lists as a kernel parameter.
struct CountedLists {
    int batches, heads, num_m_blocks, chunks, chunk_keys;
    int32_t* counts;                   // [batches, heads, chunks, num_m_blocks]; after the scan, of earlier chunks
    unsigned long long* visited_keys;  // keys in non-empty blocks, over all lists; or null
    const int64_t* begins;             // [lists]
    int64_t capacity;
    int32_t* keys;
    uint4* rows;
};

// One chunk of the list of one m_block.
struct ListChunk {
    int batch, head, m_block, chunk;

    __device__ bool exists(const CountedLists& lists) const { return m_block < lists.num_m_blocks; }
    __device__ int64_t list(const CountedLists& lists) const {
        return (static_cast<int64_t>(batch) * lists.heads + head) * lists.num_m_blocks + m_block;
    }
    __device__ int32_t& count(const CountedLists& lists) const {
        const int64_t above = (static_cast<int64_t>(batch) * lists.heads + head) * lists.chunks + chunk;
        return lists.counts[above * lists.num_m_blocks + m_block];
    }
    // Chunk number `index` of a grid that covers `m_blocks_at_once` m_blocks per index; neighbours differ in their
    // chunk.
    __device__ ListChunk(const CountedLists& lists, int64_t index, int m_blocks_at_once) {
        const int steps = ceil_div(lists.num_m_blocks, m_blocks_at_once);
        chunk = static_cast<int>(index % lists.chunks);
        m_block = static_cast<int>(index / lists.chunks % steps) * m_blocks_at_once;
        const int64_t above = index / lists.chunks / steps;
        head = static_cast<int>(above % lists.heads);
        batch = static_cast<int>(above / lists.heads);
    }
};

// The output of a chunk.
class ListWriter {
public:
    __device__ ListWriter(const CountedLists& lists, const ListChunk& chunk)
        : lists_(lists), at_(chunk.exists(lists) ? lists.begins[chunk.list(lists)] + chunk.count(lists) : 0) {}

    __device__ __forceinline__ void append(int key) { put(at_++, key); }
    __device__ __forceinline__ void put(int64_t at, int key) const {
        if (at < lists_.capacity) lists_.keys[at] = key;
    }
    __device__ __forceinline__ void put(int64_t at, int key, uint4 rows) const {
        put(at, key);
        if (at < lists_.capacity) lists_.rows[at] = rows;
    }
    // Appends the keys of the lanes with `listed`.
    template <typename... Rows>
    __device__ __forceinline__ void append_of_warp(bool listed, int key, Rows... rows) {
        const uint32_t ballot = __ballot_sync(~0u, listed);
        if (listed) put(at_ + rank_in(ballot), key, rows...);
        at_ += __popc(ballot);
    }
    __device__ int padding() const {
        constexpr int kAlign = KeyListsView::kAlign;
        return static_cast<int>((kAlign - at_ % kAlign) % kAlign);
    }
    // Pads the list with -1 to a multiple of kAlign. A warp calls.
    template <typename... Rows>
    __device__ void pad_by_warp(Rows... zeros) {
        for (int i = lane_id(), end = padding(); i < end; i += 32) put(at_ + i, -1, zeros...);
    }

private:
    const CountedLists& lists_;
    int64_t at_;
};

// Calls visit(key), in order, for the keys of a chunk whose interval intersects this thread's m_block. All threads of a
// CTA call together; their m_blocks are neighbours.
template <typename Visit>
__device__ __forceinline__ void for_each_listed_key(const AttentionParams& p, const CountedLists& lists,
                                                    const ListChunk& chunk, const Visit& visit) {
    struct alignas(16) ListedKey {
        int key, first_m_block, last_m_block;
    };
    __shared__ ListedKey listed[kThreads];  // of the last kThreads keys, those that any m_block of the CTA lists
    __shared__ int counts[kWarps];

    const Sequence s(p, chunk.batch);
    const int first_m_block = chunk.m_block - static_cast<int>(threadIdx.x),
              last_m_block = first_m_block + kThreads - 1;
    const int64_t offset = interval_offset(p.intervals, s, chunk.head, p.intervals.heads);
    const int end = min((chunk.chunk + 1) * lists.chunk_keys, s.keys);
    for (int first_key = chunk.chunk * lists.chunk_keys; first_key < end; first_key += kThreads) {
        const int key = first_key + threadIdx.x;
        RowRange rows{0, 0};
        if (key < end) rows = rows_of_key(p, s, offset, key);
        const ListedKey own{key, rows.begin / kMBlockRows, (rows.end - 1) / kMBlockRows};
        const bool is_listed = !rows.empty() && own.first_m_block <= last_m_block && own.last_m_block >= first_m_block;
        const uint32_t ballot = __ballot_sync(~0u, is_listed);
        if (lane_id() == 0) counts[warp_id()] = __popc(ballot);
        __syncthreads();
        int before = 0, total = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            if (warp == warp_id()) before = total;
            total += counts[warp];
        }
        if (is_listed) listed[before + rank_in(ballot)] = own;
        __syncthreads();
#pragma unroll 4
        for (int i = 0; i < total; ++i) {
            const ListedKey candidate = listed[i];
            if (candidate.first_m_block <= chunk.m_block && chunk.m_block <= candidate.last_m_block)
                visit(candidate.key);
        }
    }
}

// The chunk of this thread's m_block; a CTA has kThreads m_blocks.
__device__ ListChunk chunk_of_thread(const CountedLists& lists) {
    ListChunk chunk(lists, blockIdx.x, kThreads);
    chunk.m_block += threadIdx.x;
    return chunk;
}

__global__ void __launch_bounds__(kThreads)
    count_intervals_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CountedLists lists) {
    grid_dependency_sync();
    const ListChunk chunk = chunk_of_thread(lists);
    int count = 0;
    for_each_listed_key(p, lists, chunk, [&](int) { ++count; });
    if (chunk.exists(lists)) chunk.count(lists) = count;
}

__global__ void __launch_bounds__(kThreads)
    fill_intervals_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CountedLists lists) {
    grid_dependency_sync();
    const ListChunk chunk = chunk_of_thread(lists);
    ListWriter list(lists, chunk);
    // An m_block that does not exist starts beyond the rows, where no interval reaches.
    for_each_listed_key(p, lists, chunk, [&](int key) { list.append(key); });
    if (chunk.exists(lists) && chunk.chunk == lists.chunks - 1)
        for (int i = list.padding(); i > 0; --i) list.append(-1);
}

// Counts a bool mask's visible keys: the union over the m_block's rows.
__global__ void __launch_bounds__(kThreads)
    count_columns_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CountedLists lists) {
    grid_dependency_sync();
    constexpr int kBlock = PackedMask::kBlock, kBlocks = kMBlockRows / kBlock;
    const PackedMask& mask = p.packed_mask;
    const ListChunk chunk = chunk_of_thread(lists);
    unsigned visited_keys = 0;
    if (chunk.exists(lists)) {
        const Sequence s(p, chunk.batch);
        const bool row_broadcast = mask.row_broadcast();
        const int first = row_broadcast ? 0 : chunk.m_block * kBlocks;
        const int end = row_broadcast ? 1 : min(first + kBlocks, ceil_div(s.rows, kBlock));
        const int64_t offset = chunk.batch * mask.blocks_batch_stride + chunk.head * mask.blocks_head_stride;
        const int first_key = chunk.chunk * lists.chunk_keys, end_key = min(first_key + lists.chunk_keys, s.keys);
        int count = 0;
        for (int n_block = first_key / kBlock; n_block < ceil_div(end_key, kBlock); ++n_block) {
            uint64_t visible_keys = 0;
            for (int row = first; row < end; ++row)
                visible_keys |= mask.visible_keys[offset + row * mask.blocks_row_stride + n_block];
            count += __popcll(visible_keys);
            visited_keys += visible_keys != 0 ? kBlock : 0;
        }
        chunk.count(lists) = count;
    }
    if (lists.visited_keys == nullptr) return;
    visited_keys = __reduce_add_sync(~0u, visited_keys);
    if (lane_id() == 0 && visited_keys > 0) atomicAdd(lists.visited_keys, visited_keys);
}

// Mask bits of 128 keys of a row, 0 from `end` on.
__device__ __forceinline__ uint4 load_bits(const uint32_t* row, int first_key, int end) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + first_key / 32);
    const int limit = end - first_key;
    return {words.x & bits_below(limit, 0), words.y & bits_below(limit, 1), words.z & bits_below(limit, 2),
            words.w & bits_below(limit, 3)};
}

// One warp writes a chunk of a bool mask's list, 128 keys x 128 rows at a time.
template <bool kRowBroadcast>
__global__ void __launch_bounds__(kThreads)
    fill_bits_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CountedLists lists) {
    grid_dependency_sync();
    constexpr int kKeysAtOnce = 128;
    if (lists.begins[0] < 0) return;  // no lists are built
    const PackedMask& mask = p.packed_mask;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id();
    const ListChunk chunk(lists, index, 1);
    if (chunk.batch >= lists.batches) return;
    const Sequence s(p, chunk.batch);
    ListWriter list(lists, chunk);
    const uint32_t* bits = mask.bits + chunk.batch * mask.bits_batch_stride + chunk.head * mask.bits_head_stride;
    const int first_row = chunk.m_block * kMBlockRows, last_row = min(first_row + kMBlockRows, s.rows) - 1;
    int end = min((chunk.chunk + 1) * lists.chunk_keys, s.keys);
    if (!kRowBroadcast) end = last_row < first_row ? 0 : min(end, s.keys_of(last_row, p.is_causal));
    for (int first_key = chunk.chunk * lists.chunk_keys; first_key < end; first_key += kKeysAtOnce) {
        if constexpr (kRowBroadcast) {
            const uint4 words = load_bits(bits, first_key, end);
            const auto append = [&](uint32_t word, int i) {
                list.append_of_warp(word >> lane_id() & 1, first_key + i * 32 + lane_id());
            };
            append(words.x, 0), append(words.y, 1), append(words.z, 2), append(words.w, 3);
        } else {
            uint32_t seen_by[kKeysAtOnce / 32][kRowWords];  // rows that see the lane's keys
#pragma unroll
            for (int w = 0; w < kRowWords; ++w) {
                const int row = first_row + w * 32 + lane_id();
                uint4 words{};
                if (row <= last_row) {
                    const uint32_t* from = bits + (s.first_row + row) * mask.bits_row_stride;
                    words = load_bits(from, first_key, s.keys_of(row, p.is_causal));
                }
                uint32_t of_keys[4] = {words.x, words.y, words.z, words.w};
                transpose_bits(of_keys);
#pragma unroll
                for (int i = 0; i < 4; ++i) seen_by[i][w] = of_keys[i];
            }
#pragma unroll
            for (int i = 0; i < kKeysAtOnce / 32; ++i) {
                const uint4 rows{seen_by[i][0], seen_by[i][1], seen_by[i][2], seen_by[i][3]};
                list.append_of_warp(rows.x | rows.y | rows.z | rows.w, first_key + i * 32 + lane_id(), rows);
            }
        }
    }
    if (chunk.chunk != lists.chunks - 1) return;
    if constexpr (kRowBroadcast) {
        list.pad_by_warp();
    } else {
        list.pad_by_warp(uint4{});
    }
}

// Exclusive scan of the counts over chunks; writes the list lengths. A CTA has 32 neighbouring lists, one per lane; its
// warps split the chunks.
__global__ void __launch_bounds__(kThreads)
    scan_counts_kernel(const __grid_constant__ CountedLists lists, int64_t* lengths) {
    grid_dependency_sync();
    __shared__ int sums[kWarps][32];
    const int steps = ceil_div(lists.num_m_blocks, 32);
    const int m_block = static_cast<int>(blockIdx.x % steps) * 32 + lane_id();
    const int64_t above = blockIdx.x / steps;
    const int begin = static_cast<int>(static_cast<int64_t>(lists.chunks) * warp_id() / kWarps);
    const int end = static_cast<int>(static_cast<int64_t>(lists.chunks) * (warp_id() + 1) / kWarps);
    const bool has_list = m_block < lists.num_m_blocks;
    int32_t* counts = lists.counts + above * lists.chunks * lists.num_m_blocks + m_block;
    int sum = 0;
    if (has_list) {
#pragma unroll 8
        for (int chunk = begin; chunk < end; ++chunk) sum += counts[static_cast<int64_t>(chunk) * lists.num_m_blocks];
    }
    sums[warp_id()][lane_id()] = sum;
    __syncthreads();
    if (!has_list) return;
    int before = 0, total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        if (warp == warp_id()) before = total;
        total += sums[warp][lane_id()];
    }
#pragma unroll 8
    for (int chunk = begin; chunk < end; ++chunk) {
        int32_t& count = counts[static_cast<int64_t>(chunk) * lists.num_m_blocks];
        const int own = count;
        count = before;
        before += own;
    }
    if (warp_id() == 0) lengths[above * lists.num_m_blocks + m_block] = KeyListsView::padded(total);
}

constexpr int kScanThreads = 1024;

// Scans the lengths, stored in `ends`, to begins and ends. One CTA. visited_keys: keys in non-empty blocks; lists are
// built only if they hold at most `percent` of them. Null: always.
__global__ void __launch_bounds__(kScanThreads)
    scan_list_offsets_kernel(int64_t lists, int64_t* begins, int64_t* ends, int64_t capacity, int64_t* total,
                             const unsigned long long* visited_keys, int64_t percent) {
    grid_dependency_sync();
    constexpr int kLists = 4;  // lists per thread and step
    __shared__ int64_t sums[2][kScanThreads / 32];
    const int64_t limit = capacity / KeyListsView::kAlign * KeyListsView::kAlign;
    int64_t before = 0;
    int buffer = 0;
    for (int64_t first = 0; first < lists; first += kScanThreads * kLists, buffer ^= 1) {
        const int64_t list = first + threadIdx.x * kLists;
        int64_t length[kLists], own = 0;
#pragma unroll
        for (int i = 0; i < kLists; ++i) {
            length[i] = list + i < lists ? ends[list + i] : 0;
            own += length[i];
        }
        const int64_t upto = warp_inclusive_sum(own);
        if (lane_id() == 31) sums[buffer][warp_id()] = upto;
        __syncthreads();
        const int64_t of_warp = sums[buffer][lane_id()], warps_upto = warp_inclusive_sum(of_warp);
        int64_t at = before + __shfl_sync(~0u, warps_upto - of_warp, warp_id()) + upto - own;
        before += __shfl_sync(~0u, warps_upto, 31);
#pragma unroll
        for (int i = 0; i < kLists; ++i, at += length[i - 1]) {
            if (list + i >= lists) break;
            begins[list + i] = min(at, limit);
            ends[list + i] = min(at + length[i], limit);
        }
    }
    if (threadIdx.x == 0 && total != nullptr) *total = before;
    if (visited_keys == nullptr || (before <= limit && before <= static_cast<int64_t>(*visited_keys) * percent / 100))
        return;
    __syncthreads();
    for (int64_t list = threadIdx.x; list < lists; list += kScanThreads) begins[list] = ends[list] = -1;
}

CountedLists lists_of(const KeyListsPlan& plan, void* workspace) {
    CountedLists lists{};
    lists.batches = static_cast<int>(plan.batches);
    lists.heads = static_cast<int>(plan.heads);
    lists.num_m_blocks = static_cast<int>(plan.num_m_blocks);
    lists.chunks = static_cast<int>(plan.chunks);
    lists.chunk_keys = static_cast<int>(plan.chunk_keys);
    lists.counts = plan.counts.in<int32_t>(workspace);
    return lists;
}

// Grid size with one thread per chunk of a list.
unsigned grid_of_chunks(const KeyListsPlan& plan) {
    return grid_of(plan.batches * plan.heads * plan.chunks * ceil_div<int64_t>(plan.num_m_blocks, kThreads));
}

}  // namespace
}  // namespace cuda

KeyListsPlan plan_key_lists(const AttentionParams& params) {
    using namespace cuda;
    KeyListsPlan plan;
    const bool varlen = params.cu_seqlens_q != nullptr;
    const bool is_bool = params.mask.present();  // a mask without elements has no lists
    plan.heads = is_bool ? params.mask.heads : params.intervals.heads;
    plan.batches = varlen ? params.batch : is_bool ? params.mask.batches : params.intervals.batches;
    plan.row_broadcast = is_bool && params.mask.per_key;
    plan.has_rows = is_bool && !plan.row_broadcast;
    plan.num_m_blocks = plan.row_broadcast ? 1 : ceil_div(params.seqlen_q, KeyListsView::kRows);
    // Small chunks balance the load, but their counts must stay small.
    constexpr int64_t kMaxCounts = 8 << 20;
    const auto chunks = [&] { return std::max<int64_t>(ceil_div(params.seqlen_k, plan.chunk_keys), 1); };
    for (plan.chunk_keys = kThreads; chunks() > 1 && plan.lists() * chunks() > kMaxCounts;) plan.chunk_keys *= 2;
    plan.chunks = chunks();
    plan.visited_keys = plan.allocate<unsigned long long>(1);
    plan.counts = plan.allocate<int32_t>(plan.lists() * plan.chunks);
    return plan;
}

int64_t room_for_short_lists(const AttentionParams& params, const KeyListsPlan& plan) {
    using cuda::ceil_div;
    const int64_t rows = params.seqlen_q, keys = params.seqlen_k,
                  visible_rows = std::min(rows, keys);  // rows that see a key
    const int64_t causal_scores =
        params.is_causal ? visible_rows * keys - visible_rows * (visible_rows - 1) / 2 : rows * keys;
    constexpr int64_t kAlign = KeyListsView::kAlign;
    const int64_t visited_keys =
        causal_scores / KeyListsView::kRows + keys;  // an upper bound: the last m_block counts as full
    const int64_t keys_per_head = ceil_div(visited_keys / 2, kAlign) + plan.num_m_blocks;  // with padding
    return plan.batches * plan.heads * keys_per_head * kAlign;
}

void key_list_offsets_cuda(const AttentionParams& params, const KeyListsPlan& plan, std::optional<int64_t> percent,
                           void* workspace, int64_t* begins, int64_t* ends, int64_t capacity, int64_t* total,
                           cudaStream_t stream) {
    using namespace cuda;
    if (plan.lists() == 0) {
        if (total != nullptr) FLASH_CUDA_CHECK(cudaMemsetAsync(total, 0, sizeof(int64_t), stream));
        return;
    }
    CountedLists lists = lists_of(plan, workspace);
    if (percent) {
        lists.visited_keys = plan.visited_keys.in<unsigned long long>(workspace);
        FLASH_CUDA_CHECK(cudaMemsetAsync(lists.visited_keys, 0, sizeof(*lists.visited_keys), stream));
    }
    const auto count = params.packed_mask.present() ? count_columns_kernel : count_intervals_kernel;
    launch(count, {grid_of_chunks(plan), kThreads}, stream, params, lists);
    const int64_t blocks = plan.batches * plan.heads * ceil_div<int64_t>(plan.num_m_blocks, 32);
    launch(scan_counts_kernel, {grid_of(blocks), kThreads}, stream, lists, ends);
    launch(scan_list_offsets_kernel, {1, kScanThreads}, stream, plan.lists(), begins, ends, capacity, total,
           lists.visited_keys, percent.value_or(0));
}

void key_list_fill_cuda(const AttentionParams& params, const KeyListsPlan& plan, void* workspace, const int64_t* begins,
                        int64_t capacity, int32_t* keys, uint32_t* rows, cudaStream_t stream) {
    using namespace cuda;
    if (plan.lists() == 0) return;
    CountedLists lists = lists_of(plan, workspace);
    lists.begins = begins;
    lists.capacity = capacity;
    lists.keys = keys;
    lists.rows = reinterpret_cast<uint4*>(rows);
    if (!params.packed_mask.present()) {
        launch(fill_intervals_kernel, {grid_of_chunks(plan), kThreads}, stream, params, lists);
        return;
    }
    const auto kernel = plan.row_broadcast ? fill_bits_kernel<true> : fill_bits_kernel<false>;
    const int64_t blocks = ceil_div<int64_t>(plan.lists() * plan.chunks, kWarps);
    launch(kernel, {grid_of(blocks), kThreads}, stream, params, lists);
}

}  // namespace flash_dmattn
