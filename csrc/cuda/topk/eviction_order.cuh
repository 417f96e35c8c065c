// When each key is evicted from the top-k window, for the keys of one CTA in shared memory.
//
// Sort the keys of a sequence ascending by (bias, position). When key w + t arrives (eviction time t = 0, 1, ..), the
// smallest key in the window is evicted, so each time evicts exactly one key (w further times, which never happen, take
// the keys that stay). In ascending order, each key takes the first free time at or after its arrival; key j arrives at
// time max(j - w, 0).
//
// Divide and conquer: among the keys evicted within a range of times, those evicted in the first half of the range are
// the first ones in order that have arrived by its middle, as many as the half has times, because every key that stays
// is larger. A stable partition separates the halves, down to single times.
#pragma once

#include "cuda/mask/bits.cuh"
#include "sequences.cuh"

namespace flash_dmattn::cuda {

// kThreads threads, kWords words of 32 keys per warp: kTimes eviction times per CTA.
template <int kThreads, int kWords>
class EvictionOrder {
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kTimesPerWarp = 32 * kWords;

public:
    static constexpr int kTimes = kThreads * kWords;

    struct SharedStorage {
        uint32_t keys[kTimes];  // ascending; kMasked may be set
        int counts[kWarps];
    };

    // smem.keys holds the `times` keys that are evicted at times first_time, first_time + 1, ..; visible to all
    // threads.
    __device__ EvictionOrder(SharedStorage& smem, int times, int first_time, int window)
        : smem_(smem), times_(times), first_time_(first_time), window_(window), first_(warp_id() * kTimesPerWarp) {}

    // Calls visit(key, time) for each key.
    template <typename Visit>
    __device__ void run(const Visit& visit) {
        load();
#pragma unroll 1
        for (int half = kTimes / 2; half >= kTimesPerWarp; half /= 2) split_among_warps(half);
        if constexpr (kWords >= 16) split_in_warp<8>();
        if constexpr (kWords >= 8) split_in_warp<4>();
        if constexpr (kWords >= 4) split_in_warp<2>();
        if constexpr (kWords >= 2) split_in_warp<1>();
        split_in_word<16>();
        split_in_word<8>();
        split_in_word<4>();
        split_in_word<2>();
        split_in_word<1>();
        for_each([&](int w, int at) {
            if (at < times_) visit(key_[w], first_time_ + at);
        });
    }

private:
    template <typename Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) visit(w, first_ + w * 32 + lane_id());
    }
    __device__ __forceinline__ void load() {
        for_each([&](int w, int at) { key_[w] = at < times_ ? smem_.keys[at] : 0; });
    }
    // Arrival time of a key relative to first_time_; negative if it arrived before.
    __device__ int arrival(uint32_t key) const { return static_cast<int>(key & ~kMasked) - window_ - first_time_; }

    // Target of the key at `at`. `before` keys of its node, which starts at `node`, have arrived by the node's middle.
    __device__ static int position_of(bool early, int at, int node, int half, int before) {
        return early && before < half ? node + before : at + half - min(before, half);
    }

    __device__ void split_among_warps(int half) {
        const int node = first_ / (2 * half) * (2 * half);
        uint32_t early[kWords];
        int own = 0;
        for_each([&](int w, int at) {
            early[w] = __ballot_sync(~0u, at < times_ && arrival(key_[w]) < node + half);
            own += __popc(early[w]);
        });
        if (lane_id() == 0) smem_.counts[warp_id()] = own;
        __syncthreads();
        const bool counted = lane_id() >= node / kTimesPerWarp && lane_id() < warp_id();
        int before = __reduce_add_sync(~0u, counted ? smem_.counts[lane_id()] : 0);
        for_each([&](int w, int at) {
            const int to = position_of(early[w] >> lane_id() & 1, at, node, half, before + rank_in(early[w]));
            if (at < times_) smem_.keys[to] = key_[w];
            before += __popc(early[w]);
        });
        __syncthreads();
        load();
    }

    template <int kHalfWords>
    __device__ void split_in_warp() {
        constexpr int kHalf = 32 * kHalfWords;
        __syncwarp();
        int before = 0;
        for_each([&](int w, int at) {
            if (w % (2 * kHalfWords) == 0) before = 0;
            const int node = first_ + w / (2 * kHalfWords) * (2 * kHalf);
            const uint32_t early = __ballot_sync(~0u, at < times_ && arrival(key_[w]) < node + kHalf);
            const int to = position_of(early >> lane_id() & 1, at, node, kHalf, before + rank_in(early));
            if (at < times_) smem_.keys[to] = key_[w];
            before += __popc(early);
        });
        __syncwarp();
        load();
    }

    template <int kHalf>
    __device__ void split_in_word() {
        const int node_lane = lane_id() / (2 * kHalf) * (2 * kHalf);
        __syncwarp();
        for_each([&](int w, int at) {
            const int node = at - lane_id() + node_lane;
            const uint32_t early = __ballot_sync(~0u, at < times_ && arrival(key_[w]) < node + kHalf);
            const int to =
                position_of(early >> lane_id() & 1, at, node, kHalf, rank_in(early >> node_lane << node_lane));
            if (at < times_) smem_.keys[to] = key_[w];
        });
        __syncwarp();
        load();
    }

    SharedStorage& smem_;
    const int times_, first_time_, window_;
    const int first_;  // the warp's first key
    uint32_t key_[kWords];
};

}  // namespace flash_dmattn::cuda
