// A sequence's eviction times (eviction_order.cuh) are cut into chunks, and one CTA finds the keys evicted in a chunk.
//
// Before the chunk's first time, the window holds the w largest keys so far. Each time evicts the smallest, so n times
// can evict only the n smallest of the window and the n keys that arrive. A CTA holds the ranks of all earlier keys,
// finds the rank of the window's smallest and n-th smallest by bisection, and sorts these n keys together with the
// arriving ones.
#include "chunked_sequences.h"

#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "eviction_order.cuh"
#include "order.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kHeld = 8;  // neighbouring keys per thread, among those before the chunk
constexpr int kMaxKeys = kThreads * kHeld;
using Order = EvictionOrder<kThreads, 1>;
constexpr int kChunk = Order::kTimes / 2;  // times: as many keys of the window can be evicted as arrive
static_assert(kWarps == 32, "a lane for each warp's count");
static_assert(kMaxKeys < 1 << 16, "two counts share a word");

// The largest keys: those above `rank`, and the last `equal` of those equal to it.
struct Best {
    uint32_t rank;
    int equal;
};

template <typename Bits>
class ChunkSelector {
    using Sort = cub::BlockMergeSort<uint64_t, kThreads, 1>;
    using Scan = cub::BlockScan<uint32_t, kThreads>;

public:
    struct SharedStorage {
        union {
            typename Scan::TempStorage scan;
            uint64_t candidates[Order::kTimes];
            typename Sort::TempStorage sort;
            Order::SharedStorage order;
        };
        uint32_t counts[2][kWarps];
    };

    __device__ ChunkSelector(const Sequences& all, const KeyBias& bias, SharedStorage& smem)
        : all_(all), bias_(bias), smem_(smem), s_(all, blockIdx.y / all.heads, blockIdx.y % all.heads),
          from_(bias.of<Bits>(s_)), first_time_(blockIdx.x * kChunk),
          times_(min(kChunk, s_.keys - all.window - first_time_)), before_(all.window + first_time_),
          evictable_(min(all.window, times_)), is_last_(before_ + times_ == s_.keys) {}

    __device__ void run() {
        load();
        Best window, staying;
        find_best(all_.window, all_.window - evictable_, window, staying);
        gather_candidates(window, staying);
        refuse_nan(found_nan_);
        sort_candidates();
        Order(smem_.order, evictable_ + times_, first_time_, all_.window).run([&](uint32_t key, int time) {
            // Keys that stay take a time after the last.
            if (!(key & kMasked) && (is_last_ || time < first_time_ + times_))
                s_.write_end(all_, key, all_.window + time);
        });
    }

private:
    __device__ uint32_t to_rank(Bits bits) { return rank_of(bits, bias_.is_bfloat16, found_nan_); }

    __device__ int key(int i) const { return static_cast<int>(threadIdx.x) * kHeld + i; }

    // The rank of a key; writes its interval's start if this chunk owns the key.
    __device__ uint32_t arrive(int key) {
        const uint32_t rank = to_rank(from_[key * bias_.col_stride]);
        s_.write_start(all_, key);
        if (rank == 0) s_.write_masked(all_, key);
        return rank;
    }

    __device__ void load() {
        constexpr int kVector = 16 / sizeof(Bits);
        static_assert(kHeld % kVector == 0);
        const bool aligned = bias_.col_stride == 1 && reinterpret_cast<uintptr_t>(from_) % 16 == 0;
#pragma unroll
        for (int i = 0; i < kHeld; i += kVector) {
            union {
                uint4 whole;
                Bits parts[kVector];
            };
            whole = {};
            if (aligned && key(i) + kVector <= before_) {
                whole = __ldg(reinterpret_cast<const uint4*>(from_ + key(i)));
            } else {
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    if (key(i + j) < before_) parts[j] = from_[key(i + j) * bias_.col_stride];
            }
#pragma unroll
            for (int j = 0; j < kVector; ++j) rank_[i + j] = key(i + j) < before_ ? to_rank(parts[j]) : 0;
        }
        if (first_time_ > 0) return;
        for (int i = threadIdx.x; i < before_; i += kThreads) arrive(i);
    }

    // Counts the keys before the chunk with rank >= low and with rank >= high; both are above 0.
    __device__ uint2 count(uint32_t low, uint32_t high, int buffer) {
        uint32_t own = 0;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) own += (rank_[i] >= low ? 1 : 0) + (rank_[i] >= high ? 1 << 16 : 0);
        const uint32_t of_warp = __reduce_add_sync(~0u, own);
        if (lane_id() == 0) smem_.counts[buffer][warp_id()] = of_warp;
        __syncthreads();
        const uint32_t total = __reduce_add_sync(~0u, smem_.counts[buffer][lane_id()]);
        return {total & 0xffff, total >> 16};
    }

    // Finds the `more` largest and the `fewer` largest keys before the chunk, both by bisection.
    __device__ void find_best(int more, int fewer, Best& of_more, Best& of_fewer) {
        // Invariant: at least `wanted` keys have rank >= low; `above` < wanted keys have rank >= high.
        struct Search {
            uint32_t low, high;
            int above;

            __device__ bool is_open() const { return high - low > 1; }
            __device__ uint32_t middle() const { return low + (high - low) / 2; }
            __device__ void narrow(uint32_t rank, int found, int wanted) {
                if (!is_open()) return;
                if (found >= wanted) low = rank;
                if (found <= wanted) high = rank, above = found;
                if (found == wanted) low = rank - 1;
            }
        };
        constexpr uint32_t kMax = static_cast<Bits>(~Bits{0});  // above every rank
        Search a{0, kMax, 0}, b{0, kMax, 0};
        for (int buffer = 0; a.is_open() || b.is_open(); buffer ^= 1) {
            const uint32_t low = a.middle(), high = b.middle();
            const uint2 found = count(low, high, buffer);
            a.narrow(low, static_cast<int>(found.x), more);
            b.narrow(high, static_cast<int>(found.y), fewer);
        }
        of_more = {a.low, more - a.above};
        of_fewer = {b.low, fewer - b.above};
    }

    // Writes the candidates to shared memory by position: the evictable keys of the window, then the arriving keys.
    __device__ void gather_candidates(const Best& window, const Best& staying) {
        uint32_t equal = 0, before,
                 all;  // two packed counts: of the window's smallest rank, of the smallest that stays
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (key(i) < before_) equal += (rank_[i] == window.rank ? 1 : 0) + (rank_[i] == staying.rank ? 1 << 16 : 0);
        Scan(smem_.scan).ExclusiveSum(equal, before, all);
        // Number of keys of equal rank from this thread's first key on.
        int left_window = static_cast<int>((all & 0xffff) - (before & 0xffff));
        int left_staying = static_cast<int>((all >> 16) - (before >> 16));
        uint32_t is_candidate = 0, is_never_evicted = 0;  // one bit per key of this thread
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            if (key(i) >= before_) continue;
            const bool in_window = rank_[i] > window.rank || (rank_[i] == window.rank && left_window-- <= window.equal);
            const bool stays = rank_[i] > staying.rank || (rank_[i] == staying.rank && left_staying-- <= staying.equal);
            if (in_window && !stays) is_candidate |= 1u << i;
            if (stays && rank_[i] != 0) is_never_evicted |= 1u << i;
        }
        if (is_last_)
            for (; is_never_evicted != 0; is_never_evicted &= is_never_evicted - 1)
                s_.write_end(all_, key(__ffs(is_never_evicted) - 1), s_.keys);
        uint32_t at;
        __syncthreads();
        Scan(smem_.scan).ExclusiveSum(__popc(is_candidate), at);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (is_candidate >> i & 1) smem_.candidates[at++] = entry(rank_[i], key(i));
        for (int i = threadIdx.x; i < Order::kTimes - evictable_; i += kThreads) {
            uint64_t arriving = ~uint64_t{0};  // sorts last
            if (i < times_) arriving = entry(arrive(before_ + i), before_ + i);
            smem_.candidates[evictable_ + i] = arriving;
        }
        __syncthreads();
    }

    __device__ static uint64_t entry(uint32_t rank, int key) {
        return static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(key);
    }

    __device__ void sort_candidates() {
        uint64_t candidate[1] = {smem_.candidates[threadIdx.x]};
        __syncthreads();
        Sort(smem_.sort).Sort(candidate, [](uint64_t a, uint64_t b) { return a < b; });
        __syncthreads();
        smem_.order.keys[threadIdx.x] = static_cast<uint32_t>(candidate[0]) | (candidate[0] >> 32 == 0 ? kMasked : 0);
        __syncthreads();
    }

    const Sequences& all_;
    const KeyBias& bias_;
    SharedStorage& smem_;
    const OneSequence s_;
    const Bits* from_;
    const int first_time_, times_;  // of the chunk
    const int before_;              // number of keys before its first time
    const int evictable_;           // number of evictable keys of the window
    const bool is_last_;
    bool found_nan_ = false;
    uint32_t rank_[kHeld];
};

template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    select_chunks_kernel(const __grid_constant__ Sequences all, const __grid_constant__ KeyBias bias) {
    grid_dependency_sync();
    using Selector = ChunkSelector<Bits>;
    __shared__ typename Selector::SharedStorage smem;
    Selector(all, bias, smem).run();
}

int64_t chunks_of(int64_t keys, int64_t window) { return ceil_div<int64_t>(keys - window, kChunk); }

template <typename Bits>
void select(const Sequences& all, const KeyBias& bias, cudaStream_t stream) {
    const dim3 grid{grid_of(chunks_of(all.keys, all.window)), static_cast<unsigned>(all.count())};
    launch(select_chunks_kernel<Bits>, {grid, kThreads}, stream, all, bias);
}

}  // namespace

bool suits_chunks(const SelectParams& params) {
    constexpr int64_t kMinKeys = 4096;  // one CTA sorts shorter sequences as fast
    if (params.cu_seqlens_k != nullptr || params.bias.dtype == DataType::kFloat64 || params.keys <= kMinKeys ||
        params.keys > kMaxKeys || params.window == 0 || params.window >= params.keys)
        return false;
    return params.batches * params.bias.heads * chunks_of(params.keys, params.window) <= current_device().num_sms;
}

void select_chunked_sequences(const Sequences& sequences, const BiasView& view, cudaStream_t stream) {
    const KeyBias bias(sequences, view);
    view.dtype == DataType::kFloat32 ? select<uint32_t>(sequences, bias, stream)
                                     : select<uint16_t>(sequences, bias, stream);
}

}  // namespace flash_dmattn::cuda
