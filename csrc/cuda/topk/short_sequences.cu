#include "short_sequences.h"

#include <cub/block/block_radix_sort.cuh>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/launch.h"
#include "eviction_order.cuh"
#include "order.cuh"

namespace flash_dmattn::cuda {
namespace {

// Sorts a CTA's keys ascending by (bias, position).
template <typename Bits, int kThreads, int kWords>
struct Sorter {
    using Sort = cub::BlockRadixSort<uint32_t, kThreads, kWords, uint32_t>;
    using SharedStorage = typename Sort::TempStorage;

    __device__ static void run(SharedStorage& smem, const uint32_t (&rank)[kWords], uint32_t (&key)[kWords]) {
        uint32_t sorted[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            sorted[i] = rank[i];
            if (rank[i] == 0) key[i] |= kMasked;
        }
        Sort(smem).SortBlockedToStriped(sorted, key);
    }
};

// Rank and position of a key fit in one word.
template <int kThreads, int kWords>
struct Sorter<uint16_t, kThreads, kWords> {
    using Sort = cub::BlockRadixSort<uint32_t, kThreads, kWords>;
    using SharedStorage = typename Sort::TempStorage;
    static_assert(kThreads * kWords <= 1 << 16);

    __device__ static void run(SharedStorage& smem, const uint32_t (&rank)[kWords], uint32_t (&key)[kWords]) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) key[i] |= rank[i] << 16;
        Sort(smem).SortBlockedToStriped(key, 16, 32);
#pragma unroll
        for (int i = 0; i < kWords; ++i) key[i] = (key[i] & 0xffff) | (key[i] >> 16 == 0 ? kMasked : 0);
    }
};

template <typename Bits, int kThreads, int kWords>
__global__ void __launch_bounds__(kThreads)
    select_short_kernel(const __grid_constant__ Sequences all, const __grid_constant__ KeyBias bias) {
    grid_dependency_sync();
    using Sort = Sorter<Bits, kThreads, kWords>;
    using Order = EvictionOrder<kThreads, kWords>;
    __shared__ union {
        typename Sort::SharedStorage sort;
        typename Order::SharedStorage order;
    } smem;

    const OneSequence s(all, blockIdx.x / all.heads, blockIdx.x % all.heads);
    const Bits* from = bias.of<Bits>(s);
    uint32_t rank[kWords], key[kWords];
    bool found_nan = false;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        key[i] = threadIdx.x * kWords + i;
        rank[i] = static_cast<Bits>(~Bits{0});  // above every bias
        if (key[i] < s.keys) rank[i] = rank_of(from[key[i] * bias.col_stride], bias.is_bfloat16, found_nan);
    }
    refuse_nan(found_nan);
    Sort::run(smem.sort, rank, key);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWords; ++i) smem.order.keys[i * kThreads + threadIdx.x] = key[i];
    __syncthreads();

    for (int i = threadIdx.x; i < s.keys; i += kThreads) s.write_start(all, i);
    const int times = min(s.keys, Order::kTimes);  // clamped, in case a sequence is longer than `max_keys`
    Order(smem.order, times, 0, all.window).run([&](uint32_t key, int time) {
        if (key & kMasked) {
            s.write_masked(all, key & ~kMasked);
        } else {
            s.write_end(all, key, all.window + time);
        }
    });
    if (!all.varlen() || s.batch != all.batches - 1) return;
    for (int i = s.first_key + s.keys + threadIdx.x; i < all.keys; i += kThreads)
        all.start[i * s.out_stride + s.head] = all.end[i * s.out_stride + s.head] = 0;
}

template <typename Bits>
void select(const Sequences& all, const KeyBias& bias, int64_t max_keys, cudaStream_t stream) {
    const unsigned blocks = grid_of(all.count());
    static_assert(kShortSequence == 1024 * 8);
    if (max_keys <= 1024) {
        launch(select_short_kernel<Bits, 256, 4>, {blocks, 256}, stream, all, bias);
    } else if (max_keys <= 2048) {
        launch(select_short_kernel<Bits, 512, 4>, {blocks, 512}, stream, all, bias);
    } else if (max_keys <= 4096) {
        launch(select_short_kernel<Bits, 1024, 4>, {blocks, 1024}, stream, all, bias);
    } else {
        launch(select_short_kernel<Bits, 1024, 8>, {blocks, 1024}, stream, all, bias);
    }
}

}  // namespace

void select_short_sequences(const Sequences& sequences, const BiasView& view, int64_t max_keys, cudaStream_t stream) {
    const KeyBias bias(sequences, view);
    if (view.dtype == DataType::kFloat32) {
        select<uint32_t>(sequences, bias, max_keys, stream);
    } else {
        select<uint16_t>(sequences, bias, max_keys, stream);
    }
}

}  // namespace flash_dmattn::cuda
