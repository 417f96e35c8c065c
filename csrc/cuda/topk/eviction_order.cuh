// When keys drop out, for one block's keys in shared memory.
//
// Let a sequence's keys be in order from the worst to the best (least bias first; of equal ones the earlier first).
// With the arrival of each key from number w on, one of those that are there goes: the worst. So there is one key for
// each `turn` 0, 1, .. at which key w + turn arrives (w more turns, which never come, take those that stay), and going
// through the keys in order, each takes the first free turn at which it is there: at or after its arrival, which of key j
// is turn max(j - w, 0).
//
// Of the keys that go within some turns, those that go within the first half are the first ones in order, as many as
// there are turns, of those that have arrived by then: all that stay are better. So a stable partition parts them, half
// by half, until each key stands at its turn.
#pragma once

#include "cuda/mask/bits.cuh"
#include "sequences.cuh"

namespace flash_dmattn::cuda {

// kThreads threads with kWords words of 32 keys a warp: the turns of one block.
template <int kThreads, int kWords>
class EvictionOrder {
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kOfWarp = 32 * kWords;

public:
    static constexpr int kTurns = kThreads * kWords;

    struct SharedStorage {
        uint32_t keys[kTurns];  // in order; kHidden may be set
        int counts[kWarps];
    };

    // smem.keys holds the `turns` keys that go at the turns first_turn, first_turn + 1, ..; all threads see them.
    __device__ EvictionOrder(SharedStorage& smem, int turns, int first_turn, int window)
        : smem_(smem), turns_(turns), first_turn_(first_turn), window_(window), first_(warp_id() * kOfWarp) {}

    // Calls visit(key, turn) for each, the key as it stood in smem.keys.
    template <typename Visit>
    __device__ void run(const Visit& visit) {
        load();
#pragma unroll 1
        for (int half = kTurns / 2; half >= kOfWarp; half /= 2) split_among_warps(half);
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
            if (at < turns_) visit(key_[w], first_turn_ + at);
        });
    }

private:
    template <typename Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) visit(w, first_ + w * 32 + lane_id());
    }
    __device__ __forceinline__ void load() {
        for_each([&](int w, int at) { key_[w] = at < turns_ ? smem_.keys[at] : 0; });
    }
    // The first of the block's turns at which a key is there; below 0 where it was there before.
    __device__ int arrival(uint32_t key) const { return static_cast<int>(key & ~kHidden) - window_ - first_turn_; }

    // Where the key at `at` goes: `before` keys of its node, which begins at `node`, are there by its middle.
    __device__ static int place_of(bool early, int at, int node, int half, int before) {
        return early && before < half ? node + before : at + half - min(before, half);
    }

    __device__ void split_among_warps(int half) {
        const int node = first_ / (2 * half) * (2 * half);
        uint32_t early[kWords];
        int own = 0;
        for_each([&](int w, int at) {
            early[w] = __ballot_sync(~0u, at < turns_ && arrival(key_[w]) < node + half);
            own += __popc(early[w]);
        });
        if (lane_id() == 0) smem_.counts[warp_id()] = own;
        __syncthreads();
        const bool counted = lane_id() >= node / kOfWarp && lane_id() < warp_id();
        int before = __reduce_add_sync(~0u, counted ? smem_.counts[lane_id()] : 0);
        for_each([&](int w, int at) {
            const int to = place_of(early[w] >> lane_id() & 1, at, node, half, before + rank_in(early[w]));
            if (at < turns_) smem_.keys[to] = key_[w];
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
            const uint32_t early = __ballot_sync(~0u, at < turns_ && arrival(key_[w]) < node + kHalf);
            const int to = place_of(early >> lane_id() & 1, at, node, kHalf, before + rank_in(early));
            if (at < turns_) smem_.keys[to] = key_[w];
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
            const uint32_t early = __ballot_sync(~0u, at < turns_ && arrival(key_[w]) < node + kHalf);
            const int to = place_of(early >> lane_id() & 1, at, node, kHalf, rank_in(early >> node_lane << node_lane));
            if (at < turns_) smem_.keys[to] = key_[w];
        });
        __syncwarp();
        load();
    }

    SharedStorage& smem_;
    const int turns_, first_turn_, window_;
    const int first_;  // the warp's first key
    uint32_t key_[kWords];
};

}  // namespace flash_dmattn::cuda
