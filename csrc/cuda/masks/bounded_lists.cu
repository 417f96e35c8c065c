// A block has some neighbouring row tiles. It walks over the keys and gathers, in order, those that any of its tiles
// lists, each with a bit for every tile; whenever they are many, a warp for each tile writes those of its tile.
#include "bounded_lists.h"

#include <algorithm>

#include "../common/check.h"
#include "../common/intervals.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostTiles = kWarps;  // of a block
constexpr int kKeys = 4;            // of a thread at a time
constexpr int kStep = kThreads * kKeys;
constexpr int kRoom = 2 * kStep;
constexpr int kTileRows = KeyListsView::kRows;

struct Lists {
    int heads, row_tiles, block_tiles;
    int64_t stride;
    int32_t* keys;    // [lists, stride]
    int64_t* begins;  // [lists]
    int64_t* ends;    // [lists]
};

struct ListedKey {
    int key;
    uint32_t tiles;  // bit t: tile t of the block lists it
};

class Block {
public:
    __device__ Block(const AttentionParams& p, const Lists& lists)
        : p_(p), lists_(lists), sequence_(p, batch_of(lists)) {
        const int steps = ceil_div(lists.row_tiles, lists.block_tiles);
        first_tile_ = static_cast<int>(blockIdx.x % steps) * lists.block_tiles;
        tiles_ = min(lists.block_tiles, lists.row_tiles - first_tile_);
        const int above = blockIdx.x / steps;
        first_list_ = static_cast<int64_t>(above) * lists.row_tiles + first_tile_;
        const int64_t offset = interval_offset(p.intervals, sequence_, above % lists.heads, p.intervals.heads);
        start_ = p.intervals.start + offset;
        end_ = p.intervals.end + offset;
        first_row_ = first_tile_ * kTileRows;
        last_row_ = min(first_row_ + tiles_ * kTileRows, sequence_.rows) - 1;
        keys_ = last_row_ < first_row_ ? 0 : sequence_.keys_of(last_row_, p.is_causal);
        aligned_ = p.intervals.col_stride == 1 &&
                   (reinterpret_cast<uintptr_t>(start_) | reinterpret_cast<uintptr_t>(end_)) % 16 == 0;
    }

    __device__ void run() {
        __shared__ ListedKey gathered[kRoom];
        __shared__ int counts[2][kWarps];
        int size = 0, buffer = 0;
        load(0);
        for (int first = 0; first < keys_; first += kStep, buffer ^= 1) {
            const int key = first + static_cast<int>(threadIdx.x) * kKeys;
            uint32_t tiles[kKeys];
            int own = 0;
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
                tiles[i] = key + i < keys_ ? tiles_of(key + i, starts_[i], ends_[i]) : 0;
                own += tiles[i] != 0;
            }
            load(first + kStep);
            int at = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, at, step);
                if (lane_id() >= step) at += other;
            }
            if (lane_id() == 31) counts[buffer][warp_id()] = at;
            __syncthreads();
            const int of_warp = lane_id() < kWarps ? counts[buffer][lane_id()] : 0;
            at += size - own + __reduce_add_sync(~0u, lane_id() < warp_id() ? of_warp : 0);
            size += __reduce_add_sync(~0u, of_warp);
#pragma unroll
            for (int i = 0; i < kKeys; ++i)
                if (tiles[i] != 0) gathered[at++] = {key + i, tiles[i]};
            if (size > kRoom - kStep || first + kStep >= keys_) {
                __syncthreads();
                write(gathered, size);
                size = 0;
                __syncthreads();
            }
        }
        finish();
    }

private:
    __device__ static int batch_of(const Lists& lists) {
        return blockIdx.x / ceil_div(lists.row_tiles, lists.block_tiles) / lists.heads;
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

    // Of the block's tiles, those with a row that sees the key.
    __device__ uint32_t tiles_of(int key, int start, int end) const {
        const int begin = max(start, p_.is_causal ? sequence_.causal_begin(key) : 0);
        const int first = max(begin, first_row_) - first_row_, last = min(end - 1, last_row_) - first_row_;
        if (begin >= end || first > last) return 0;
        return bits_below(last / kTileRows + 1, 0) & ~bits_below(first / kTileRows, 0);
    }

    __device__ void write(const ListedKey* gathered, int size) {
        const int tile = warp_id();
        if (tile >= tiles_) return;
        int32_t* keys = lists_.keys + (first_list_ + tile) * lists_.stride;
#pragma unroll 2
        for (int i = lane_id(); i - lane_id() < size; i += 32) {
            const ListedKey candidate = i < size ? gathered[i] : ListedKey{0, 0};
            const bool listed = candidate.tiles >> tile & 1;
            const uint32_t ballot = __ballot_sync(~0u, listed);
            const int at = length_ + rank_in(ballot);
            if (listed && at < lists_.stride) keys[at] = candidate.key;
            length_ += __popc(ballot);
        }
    }

    __device__ void finish() const {
        const int tile = warp_id();
        if (tile >= tiles_) return;
        constexpr int kAlign = KeyListsView::kAlign;
        const int64_t list = first_list_ + tile, begin = list * lists_.stride;
        const int length = static_cast<int>(min(static_cast<int64_t>(length_), lists_.stride));
        const int end = ceil_div(length, kAlign) * kAlign;
        for (int at = length + lane_id(); at < end; at += 32) lists_.keys[begin + at] = -1;
        if (lane_id() == 0) lists_.begins[list] = begin, lists_.ends[list] = begin + end;
    }

    const AttentionParams& p_;
    const Lists& lists_;
    const Sequence sequence_;
    int first_tile_, tiles_;
    int64_t first_list_;
    const int32_t* start_;
    const int32_t* end_;
    int first_row_, last_row_, keys_;
    bool aligned_;
    int starts_[kKeys], ends_[kKeys];  // of the keys to be looked at next
    int length_ = 0;                   // of the list of the warp's tile
};

__global__ void __launch_bounds__(kThreads, 2) bounded_lists_kernel(const __grid_constant__ AttentionParams p,
                                                                    const __grid_constant__ Lists lists) {
    Block(p, lists).run();
}

}  // namespace
}  // namespace cuda

BoundedListsPlan plan_bounded_lists(const AttentionParams& params, int64_t keys_per_row) {
    using namespace cuda;
    constexpr int64_t kAlign = KeyListsView::kAlign, kRows = KeyListsView::kRows;
    BoundedListsPlan plan;
    plan.heads = params.intervals.heads;
    plan.batches = params.cu_seqlens_q != nullptr ? params.batch : params.intervals.batches;
    plan.row_tiles = ceil_div(params.seqlen_q, kRows);
    const int64_t more_rows = std::max<int64_t>(std::min(params.seqlen_q, kRows) - 1, 0);
    plan.stride = ceil_div(std::min(keys_per_row + more_rows, params.seqlen_k), kAlign) * kAlign;
    plan.capacity = plan.lists() * plan.stride;
    // As many tiles together as leave most multiprocessors two blocks: each block reads all intervals.
    const int64_t blocks = plan.lists() == 0 ? 0 : device_attribute(cudaDevAttrMultiProcessorCount) * 3 / 2;
    plan.block_tiles = kMostTiles;
    while (plan.block_tiles > 1 &&
           plan.batches * plan.heads * ceil_div<int64_t>(plan.row_tiles, plan.block_tiles) < blocks)
        plan.block_tiles /= 2;
    return plan;
}

void bounded_lists_cuda(const AttentionParams& params, const BoundedListsPlan& plan, int32_t* keys, int64_t* begins,
                        int64_t* ends, cudaStream_t stream) {
    using namespace cuda;
    if (plan.lists() == 0) return;
    const Lists lists{static_cast<int>(plan.heads), static_cast<int>(plan.row_tiles), plan.block_tiles, plan.stride,
                      keys, begins, ends};
    const int64_t blocks = plan.batches * plan.heads * ceil_div<int64_t>(plan.row_tiles, plan.block_tiles);
    bounded_lists_kernel<<<grid_of(blocks), kThreads, 0, stream>>>(params, lists);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_dmattn
