// A CTA builds one list: it sets a bit per listed key in shared memory, which sorts and deduplicates the keys, and
// writes them. If rows of the list see different keys, a second pass over the indices sets each row's bit at the key's
// list position. Long sequences are processed in windows of keys.
#include "index_list_builder.h"

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/mask/intervals.cuh"
#include "cuda/mask/key_list.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kWords = 4096;          // of the bit vector
constexpr int kWindow = kWords * 32;  // keys per window
constexpr int kUnroll = 8;            // indices per thread in flight

struct IndexLists {
    int heads, num_m_blocks, m_blocks_per_group, num_groups, rows_per_group;
    int64_t stride;
    int32_t* keys;    // [units, stride]
    int64_t* begins;  // [lists]
    int64_t* ends;    // [lists]
    uint32_t* rows;   // [units, stride, KeyList::kWords], or null
};

struct SharedStorage {
    uint32_t listed_bits[kWords];    // bit j % 32 of word j / 32: key j of the window is listed
    int listed_before_word[kWords];  // number of listed keys in earlier words
    int sums[kWarps];
};

class IndexListBuilder {
public:
    __device__ IndexListBuilder(const IndexListsParams& p, const IndexLists& lists, SharedStorage& smem)
        : p_(p), lists_(lists), smem_(smem), sequence_(p, blockIdx.x / lists.num_groups / lists.heads) {
        const int head = blockIdx.x / lists.num_groups % lists.heads;
        first_row_ = static_cast<int>(blockIdx.x % lists.num_groups) * lists.rows_per_group;
        end_row_ = first_row_ + min(lists.rows_per_group, sequence_.rows - first_row_);
        const IndexView& view = p.indices;
        first_index_row_ = first_row_ / tile_rows();
        const int index_rows = end_row_ > first_row_ ? (end_row_ - 1) / tile_rows() - first_index_row_ + 1 : 0;
        total_ = static_cast<unsigned>(index_rows) * static_cast<unsigned>(view.count);
        indices_ = view.data + (view.batches > 1 ? sequence_.batch * view.batch_stride : 0) +
                   shared_head(head, p.heads, view.heads) * view.head_stride +
                   ((view.packed ? sequence_.first_row : 0) + first_index_row_) * view.row_stride;
        if (p.intervals.start != nullptr) {
            const int64_t offset = interval_offset(p.intervals, sequence_, head, p.heads);
            start_ = p.intervals.start + offset;
            end_ = p.intervals.end + offset;
        }
    }

    __device__ void run() {
        const int64_t begin = blockIdx.x * lists_.stride;
        const int end_key = total_ > 0 ? sequence_.keys_of(end_row_ - 1, p_.is_causal) : 0;
        int size = 0;
        for (int first_key = 0; first_key < end_key; first_key += kWindow) {
            const int keys = min(end_key - first_key, kWindow), words = ceil_div(keys, 32);
            for (int word = threadIdx.x; word < words; word += kThreads) smem_.listed_bits[word] = 0;
            __syncthreads();
            for_each_index(first_key, keys,
                           [&](int key, const RowRange&) { atomicOr(&smem_.listed_bits[key / 32], 1u << key % 32); });
            __syncthreads();
            const int listed = count_before(words);
            write_keys(begin + size, first_key, words);
            if (lists_.rows != nullptr) write_rows(begin + size, first_key, keys, listed);
            size += listed;
            __syncthreads();
        }
        finish(begin, size);
    }

private:
    __device__ int tile_rows() const { return static_cast<int>(p_.indices.tile_rows); }

    // Calls visit(key, rows) for every index in the window: the key relative to the window, and the rows that see
    // it relative to the group's first row.
    template <typename Visit>
    __device__ __forceinline__ void for_each_index(int first_key, int keys, const Visit& visit) const {
        const unsigned count = static_cast<unsigned>(p_.indices.count);
        for (unsigned first = threadIdx.x; first < total_; first += kThreads * kUnroll) {
            int index[kUnroll], index_row[kUnroll];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const unsigned at = first + i * kThreads;
                index[i] = -1;
                if (at >= total_) continue;
                index_row[i] = static_cast<int>(at / count);
                index[i] = indices_[index_row[i] * p_.indices.row_stride +
                                    (at - index_row[i] * count) * p_.indices.col_stride];
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                if (index[i] < 0 || !is_key(index[i] - first_key, keys)) continue;
                const RowRange rows = visible_rows(index[i], first_index_row_ + index_row[i]);
                if (!rows.empty()) visit(index[i] - first_key, rows);
            }
        }
    }

    // The same for the rows of the group that share one row of indices.
    __device__ RowRange visible_rows(int key, int index_row) const {
        const int64_t row_begin = static_cast<int64_t>(index_row) * tile_rows();
        RowRange rows{max(static_cast<int>(row_begin), first_row_),
                      static_cast<int>(min(row_begin + tile_rows(), static_cast<int64_t>(end_row_)))};
        if (p_.is_causal) rows.begin = max(rows.begin, sequence_.causal_begin(key));
        if (start_ != nullptr) {
            rows.begin = max(rows.begin, start_[key * p_.intervals.col_stride]);
            rows.end = min(rows.end, max(end_[key * p_.intervals.col_stride], first_row_));
        }
        return {rows.begin - first_row_, rows.end - first_row_};
    }

    // Fills listed_before_word and returns the number of keys. A thread scans consecutive words.
    __device__ int count_before(int words) {
        const int each = ceil_div(words, kThreads);
        const int first = min(static_cast<int>(threadIdx.x) * each, words), end = min(first + each, words);
        int own = 0;
        for (int word = first; word < end; ++word) own += __popc(smem_.listed_bits[word]);
        const int upto = warp_inclusive_sum(own);
        if (lane_id() == 31) smem_.sums[warp_id()] = upto;
        __syncthreads();
        const int of_warp = lane_id() < kWarps ? smem_.sums[lane_id()] : 0;
        int listed_before_word = upto - own + __reduce_add_sync(~0u, lane_id() < warp_id() ? of_warp : 0);
        for (int word = first; word < end; ++word) {
            smem_.listed_before_word[word] = listed_before_word;
            listed_before_word += __popc(smem_.listed_bits[word]);
        }
        __syncthreads();
        return __reduce_add_sync(~0u, of_warp);
    }

    __device__ void write_keys(int64_t begin, int first_key, int words) const {
        for (int word = threadIdx.x; word < words; word += kThreads) {
            int64_t at = begin + smem_.listed_before_word[word];
            for (uint32_t bits = smem_.listed_bits[word]; bits != 0; bits &= bits - 1)
                lists_.keys[at++] = first_key + word * 32 + __ffs(bits) - 1;
        }
    }

    __device__ void write_rows(int64_t begin, int first_key, int keys, int listed) const {
        uint4* to = reinterpret_cast<uint4*>(lists_.rows) + begin;
        for (int i = threadIdx.x; i < listed; i += kThreads) to[i] = uint4{};
        __syncthreads();
        for_each_index(first_key, keys, [&](int key, const RowRange& rows) {
            const uint32_t named_before = smem_.listed_bits[key / 32] & bits_below(key % 32, 0);
            uint32_t* words =
                reinterpret_cast<uint32_t*>(to + smem_.listed_before_word[key / 32] + __popc(named_before));
            for (int word = rows.begin / 32; word <= (rows.end - 1) / 32; ++word)
                atomicOr(words + word, bits_between(rows.begin, rows.end, word));
        });
    }

    __device__ void finish(int64_t begin, int size) const {
        constexpr int kAlign = KeyListsView::kAlign;
        const int end = ceil_div(size, kAlign) * kAlign;
        const int pad = size + static_cast<int>(threadIdx.x);
        if (pad < end) {
            lists_.keys[begin + pad] = -1;
            if (lists_.rows != nullptr) reinterpret_cast<uint4*>(lists_.rows)[begin + pad] = uint4{};
        }
        const int group = blockIdx.x % lists_.num_groups;
        const int64_t above = static_cast<int64_t>(blockIdx.x / lists_.num_groups) * lists_.num_m_blocks;
        const int first_m_block = group * lists_.m_blocks_per_group;
        const int end_m_block = min(first_m_block + lists_.m_blocks_per_group, lists_.num_m_blocks);
        for (int m_block = first_m_block + threadIdx.x; m_block < end_m_block; m_block += kThreads) {
            lists_.begins[above + m_block] = begin;
            lists_.ends[above + m_block] = begin + end;
        }
    }

    const IndexListsParams& p_;
    const IndexLists& lists_;
    SharedStorage& smem_;
    const Sequence sequence_;
    int first_row_, end_row_;  // of the group
    int first_index_row_;      // the first row of indices that covers the group
    unsigned total_;           // number of indices of the group
    const int32_t* indices_;
    const int32_t* start_ = nullptr;  // intervals of the sequence's keys, or null
    const int32_t* end_ = nullptr;
};

__global__ void __launch_bounds__(kThreads, 2)
    index_lists_kernel(const __grid_constant__ IndexListsParams p, const __grid_constant__ IndexLists lists) {
    grid_dependency_sync();
    __shared__ SharedStorage smem;
    IndexListBuilder(p, lists, smem).run();
}

}  // namespace
}  // namespace cuda

void index_lists_cuda(const IndexListsParams& params, const IndexListsPlan& plan, int32_t* keys, int64_t* begins,
                      int64_t* ends, uint32_t* rows, cudaStream_t stream) {
    using namespace cuda;
    if (plan.units() == 0) return;
    const auto to_int = [](int64_t size) { return static_cast<int>(size); };
    const IndexLists lists{to_int(plan.heads),
                           to_int(plan.num_m_blocks),
                           to_int(plan.m_blocks_per_group),
                           to_int(plan.num_groups),
                           to_int(plan.rows_per_group()),
                           plan.stride,
                           keys,
                           begins,
                           ends,
                           rows};
    launch(index_lists_kernel, {grid_of(plan.units()), kThreads}, stream, params, lists);
}

}  // namespace flash_dmattn
