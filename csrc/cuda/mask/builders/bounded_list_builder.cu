// A CTA builds the lists of some neighbouring m_blocks. It scans the keys and collects, in order, those that any of its
// rows sees. When the buffer is full, its warps write the keys of each m_block. The keys of a single m_block are
// written without the buffer.
//
// A list ends with its partial keys, which some rows of the m_block do not see. Otherwise they would lie among the
// others, and most n_blocks would need a mask. The first kMaxPartial of them wait in shared memory until all other keys
// are written. So the order of a list depends on the list alone.
#include "bounded_list_builder.h"

#include <algorithm>
#include <climits>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/shared_storage.cuh"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/mask/intervals.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMBlocksPerWarp = 4;  // m_blocks per warp, at most
constexpr int kMaxMBlocks = kWarps * kMBlocksPerWarp;
constexpr int kKeys = 4;  // keys per thread and step
constexpr int kStep = kThreads * kKeys;
constexpr int kRoom = kStep + kStep / 2;
constexpr int kMBlockRows = KeyListsView::kRows;
constexpr int kMaxPartial = 2 * kMBlockRows;  // of a list; top-k selection has fewer

struct BoundedLists {
    int heads, num_m_blocks, m_blocks_per_cta;
    int64_t stride;
    int32_t* keys;    // [lists, stride]
    int64_t* begins;  // [lists]
    int64_t* ends;    // [lists]
};

struct SharedStorage {
    // Keys that some of the CTA's rows see, with those rows: [begin, end), relative to the CTA's first row.
    int key[kRoom];
    short2 rows[kRoom];
    int counts[2][kWarps];
    int partial[kMaxMBlocks][kMaxPartial];  // of the CTA's m_blocks; the memory of the others is not allocated
};
static_assert(kMaxMBlocks * kMBlockRows <= SHRT_MAX, "rows of a CTA have 16 bits");

class BoundedListBuilder {
public:
    __device__ BoundedListBuilder(const AttentionParams& p, const BoundedLists& lists, SharedStorage& smem)
        : p_(p), lists_(lists), smem_(smem), sequence_(p, batch_of(lists)) {
        const int steps = ceil_div(lists.num_m_blocks, lists.m_blocks_per_cta);
        first_m_block_ = static_cast<int>(blockIdx.x % steps) * lists.m_blocks_per_cta;
        num_m_blocks_ = min(lists.m_blocks_per_cta, lists.num_m_blocks - first_m_block_);
        const int above = blockIdx.x / steps;
        first_list_ = static_cast<int64_t>(above) * lists.num_m_blocks + first_m_block_;
        const int64_t offset = interval_offset(p.intervals, sequence_, above % lists.heads, p.intervals.heads);
        start_ = p.intervals.start + offset;
        end_ = p.intervals.end + offset;
        first_row_ = first_m_block_ * kMBlockRows;
        last_row_ = min(first_row_ + num_m_blocks_ * kMBlockRows, sequence_.rows) - 1;
        keys_ = last_row_ < first_row_ ? 0 : sequence_.keys_of(last_row_, p.is_causal);
        aligned_ = p.intervals.col_stride == 1 &&
                   (reinterpret_cast<uintptr_t>(start_) | reinterpret_cast<uintptr_t>(end_)) % 16 == 0;
    }

    __device__ void run() {
        int size = 0, buffer = 0;
        load(0);
        for (int first = 0; first < keys_; first += kStep, buffer ^= 1) {
            const int key = first + static_cast<int>(threadIdx.x) * kKeys;
            RowRange rows[kKeys];
            uint32_t seen = 0;
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
                rows[i] = {starts_[i], ends_[i]};
                seen |= key + i < keys_ && is_seen(key + i, rows[i]) ? 1u << i : 0;
            }
            load(first + kStep);
            if (num_m_blocks_ == 1) {
                append(lengths_[0], key, seen, rows, buffer);
                continue;
            }
            int at = size, total;
            at += sum_before(__popc(seen), buffer, total);
            size += total;
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
                if ((seen >> i & 1) == 0) continue;
                smem_.key[at] = key + i;
                smem_.rows[at++] = {static_cast<short>(max(rows[i].begin - first_row_, 0)),
                                    static_cast<short>(min(rows[i].end - first_row_, SHRT_MAX))};
            }
            if (size > kRoom - kStep || first + kStep >= keys_) {
                __syncthreads();
                write(size);
                size = 0;
                __syncthreads();
            }
        }
        __syncthreads();
        finish();
    }

private:
    // The keys found so far for an m_block, also those beyond the capacity of its list.
    struct Length {
        int keys = 0, partial = 0;

        __device__ int waiting() const { return min(partial, kMaxPartial); }
        __device__ int written() const { return keys - waiting(); }
    };

    __device__ static int batch_of(const BoundedLists& lists) {
        return blockIdx.x / ceil_div(lists.num_m_blocks, lists.m_blocks_per_cta) / lists.heads;
    }

    __device__ void load(int first) {
        const int key = first + static_cast<int>(threadIdx.x) * kKeys;
        if (aligned_ && key + kKeys <= keys_) {
            static_assert(kKeys == 4);
            const int4 starts = __ldg(reinterpret_cast<const int4*>(start_ + key));
            const int4 ends = __ldg(reinterpret_cast<const int4*>(end_ + key));
            starts_[0] = starts.x, starts_[1] = starts.y, starts_[2] = starts.z, starts_[3] = starts.w;
            ends_[0] = ends.x, ends_[1] = ends.y, ends_[2] = ends.z, ends_[3] = ends.w;
            return;
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            if (key + i >= keys_) break;
            starts_[i] = start_[(key + i) * p_.intervals.col_stride];
            ends_[i] = end_[(key + i) * p_.intervals.col_stride];
        }
    }

    // Whether any of the CTA's rows sees the key; applies causality to rows.begin.
    __device__ bool is_seen(int key, RowRange& rows) const {
        rows.begin = max(rows.begin, p_.is_causal ? max(key - sequence_.keys + sequence_.rows, 0) : 0);
        return rows.begin <= last_row_ && rows.end > first_row_ && !rows.empty();
    }

    // Whether a row of [first_row, last_row] does not see a key that the rows [begin, end) see.
    __device__ static bool is_partial(int begin, int end, int first_row, int last_row) {
        return begin > first_row || end <= last_row;
    }
    // Puts a key at the end of a list of this length.
    __device__ __forceinline__ void put(const Length& length, int m_block, int key, bool is_partial) {
        if (is_partial && length.partial < kMaxPartial) {
            smem_.partial[m_block][length.partial] = key;
        } else if (length.written() < lists_.stride) {
            lists_.keys[(first_list_ + m_block) * lists_.stride + length.written()] = key;
        }
    }

    // The sum of `own` over the threads before this one. All threads call.
    __device__ __forceinline__ int sum_before(int own, int buffer, int& total) {
        const int upto = warp_inclusive_sum(own);
        if (lane_id() == 31) smem_.counts[buffer][warp_id()] = upto;
        __syncthreads();
        const int of_warp = lane_id() < kWarps ? smem_.counts[buffer][lane_id()] : 0;
        total = __reduce_add_sync(~0u, of_warp);
        return upto - own + __reduce_add_sync(~0u, lane_id() < warp_id() ? of_warp : 0);
    }

    // Appends a step's keys to the CTA's only list.
    __device__ __forceinline__ void append(Length& length, int key, uint32_t seen, const RowRange (&rows)[kKeys],
                                           int buffer) {
        uint32_t partial = 0;
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
            partial |= is_partial(rows[i].begin, rows[i].end, first_row_, last_row_) ? 1u << i : 0;
        partial &= seen;
        int total;  // in the low half the keys, in the high half the partial ones
        const int before = sum_before(__popc(seen) | __popc(partial) << 16, buffer, total);
        Length at{length.keys + (before & 0xffff), length.partial + (before >> 16)};
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            if ((seen >> i & 1) == 0) continue;
            put(at, 0, key + i, (partial >> i & 1) != 0);
            ++at.keys, at.partial += partial >> i & 1;
        }
        length.keys += total & 0xffff, length.partial += total >> 16;
    }

    // A warp's m_blocks are kWarps apart.
    template <typename Visit>
    __device__ void for_each_m_block(const Visit& visit) {
#pragma unroll
        for (int i = 0; i < kMBlocksPerWarp; ++i) {
            const int m_block = i * kWarps + warp_id();
            if (m_block < num_m_blocks_) visit(m_block, lengths_[i]);
        }
    }

    __device__ void write(int size) {
        for_each_m_block([&](int m_block, Length& length) {
            const int first_row = m_block * kMBlockRows;
            const int last_row = min(first_row + kMBlockRows, last_row_ - first_row_ + 1) - 1;
            if (last_row < first_row) return;  // beyond the sequence's rows
#pragma unroll 4
            for (int i = lane_id(); i - lane_id() < size; i += 32) {
                const short2 rows = i < size ? smem_.rows[i] : short2{0, 0};
                const bool is_listed = rows.x <= last_row && rows.y > first_row;
                const bool is_last = is_listed && is_partial(rows.x, rows.y, first_row, last_row);
                const uint32_t listed = __ballot_sync(~0u, is_listed), partial = __ballot_sync(~0u, is_last);
                if (is_listed)
                    put({length.keys + rank_in(listed), length.partial + rank_in(partial)}, m_block, smem_.key[i],
                        is_last);
                length.keys += __popc(listed), length.partial += __popc(partial);
            }
        });
    }

    __device__ void finish() {
        for_each_m_block([&](int m_block, const Length& full) {
            constexpr int kAlign = KeyListsView::kAlign;
            const int64_t list = first_list_ + m_block, begin = list * lists_.stride;
            const int length = static_cast<int>(min(static_cast<int64_t>(full.keys), lists_.stride));
            for (int i = lane_id(); full.written() + i < length; i += 32)
                lists_.keys[begin + full.written() + i] = smem_.partial[m_block][i];
            const int end = ceil_div(length, kAlign) * kAlign;
            for (int at = length + lane_id(); at < end; at += 32) lists_.keys[begin + at] = -1;
            if (lane_id() == 0) lists_.begins[list] = begin, lists_.ends[list] = begin + end;
        });
    }

    const AttentionParams& p_;
    const BoundedLists& lists_;
    SharedStorage& smem_;
    const Sequence sequence_;
    int first_m_block_, num_m_blocks_;
    int64_t first_list_;
    const int32_t* start_;
    const int32_t* end_;
    int first_row_, last_row_, keys_;
    bool aligned_;
    int starts_[kKeys], ends_[kKeys];  // of the next keys
    Length lengths_[kMBlocksPerWarp];  // of the warp's m_blocks
};

__global__ void __launch_bounds__(kThreads, 2)
    bounded_lists_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ BoundedLists lists) {
    grid_dependency_sync();
    BoundedListBuilder(p, lists, dynamic_shared_storage<SharedStorage>()).run();
}

constexpr int kMergeThreads = 256;

// Merges the two ascending parts of each list. A CTA has a list. Lists of a caller with more parts are sorted slowly.
__global__ void __launch_bounds__(kMergeThreads)
    merge_lists_kernel(const __grid_constant__ KeyListsView lists, int32_t* merged) {
    grid_dependency_sync();
    const int64_t begin = min(max(lists.begins[blockIdx.x], int64_t{0}), lists.capacity);
    const int size = static_cast<int>(max(min(lists.ends[blockIdx.x], lists.capacity) - begin, int64_t{0}));
    const int32_t* const keys = lists.keys + begin;
    __shared__ int end_of_first, end_of_keys, num_parts;
    if (threadIdx.x == 0) end_of_first = end_of_keys = size, num_parts = 1;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kMergeThreads) {
        if (keys[i] < 0) {
            atomicMin(&end_of_keys, i);
        } else if (i > 0 && keys[i] <= keys[i - 1]) {
            atomicMin(&end_of_first, i);
            atomicAdd(&num_parts, 1);
        }
    }
    __syncthreads();
    const int total = end_of_keys, first = min(end_of_first, total);
    for (int i = threadIdx.x; i < size; i += kMergeThreads) {
        const int key = keys[i];
        int at = i;
        if (i < total && num_parts > 2) {
            at = 0;
            for (int j = 0; j < total; ++j) at += keys[j] < key || (keys[j] == key && j < i) ? 1 : 0;
        } else if (i < total) {
            // The keys of the other part before this one, by bisection.
            int low = i < first ? first : 0, high = i < first ? total : first;
            while (low < high) {
                const int middle = (low + high) / 2;
                keys[middle] < key || (keys[middle] == key && middle < i) ? low = middle + 1 : high = middle;
            }
            at += low - first;
        }
        merged[begin + at] = key;
    }
}

}  // namespace
}  // namespace cuda

BoundedListsPlan plan_bounded_lists(const AttentionParams& params, int64_t keys_per_row) {
    using namespace cuda;
    constexpr int64_t kRows = KeyListsView::kRows;
    BoundedListsPlan plan;
    plan.heads = params.intervals.heads;
    plan.batches = params.cu_seqlens_q != nullptr ? params.batch : params.intervals.batches;
    plan.num_m_blocks = ceil_div(params.seqlen_q, kRows);
    const int64_t more_rows = std::max<int64_t>(std::min(params.seqlen_q, kRows) - 1, 0);
    plan.stride = KeyListsView::padded(std::min(keys_per_row + more_rows, params.seqlen_k));
    plan.capacity = plan.lists() * plan.stride;
    // Every CTA reads all intervals, so it takes as many m_blocks as leave 1.5 CTAs per SM. With at most 4 lists per SM
    // (two rounds of two CTAs) it takes one, which needs no buffer.
    const int64_t num_sms = plan.lists() == 0 ? 0 : current_device().num_sms, min_ctas = num_sms * 3 / 2;
    plan.m_blocks_per_cta = plan.lists() <= 4 * num_sms ? 1 : kMaxMBlocks;
    while (plan.m_blocks_per_cta > 1 &&
           plan.batches * plan.heads * ceil_div<int64_t>(plan.num_m_blocks, plan.m_blocks_per_cta) < min_ctas)
        plan.m_blocks_per_cta /= 2;
    return plan;
}

void bounded_lists_cuda(const AttentionParams& params, const BoundedListsPlan& plan, int32_t* keys, int64_t* begins,
                        int64_t* ends, cudaStream_t stream) {
    using namespace cuda;
    if (plan.lists() == 0) return;
    const BoundedLists lists{static_cast<int>(plan.heads),
                             static_cast<int>(plan.num_m_blocks),
                             plan.m_blocks_per_cta,
                             plan.stride,
                             keys,
                             begins,
                             ends};
    const int64_t blocks = plan.batches * plan.heads * ceil_div<int64_t>(plan.num_m_blocks, plan.m_blocks_per_cta);
    constexpr int64_t kPartialBytes = sizeof(SharedStorage::partial[0]);
    allow_shared_memory(reinterpret_cast<const void*>(bounded_lists_kernel), sizeof(SharedStorage));
    const int64_t shared_bytes = sizeof(SharedStorage) - (kMaxMBlocks - plan.m_blocks_per_cta) * kPartialBytes;
    launch(bounded_lists_kernel, {grid_of(blocks), kThreads, shared_bytes}, stream, params, lists);
}

void merge_bounded_lists_cuda(const KeyListsView& lists, int32_t* keys, cudaStream_t stream) {
    using namespace cuda;
    const int64_t blocks = lists.batches * lists.heads * lists.num_m_blocks;
    if (blocks > 0) launch(merge_lists_kernel, {grid_of(blocks), kMergeThreads}, stream, lists, keys);
}

}  // namespace flash_dmattn
