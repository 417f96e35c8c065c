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
// by half, until a thread can deal out the turns that are left, one key after the other.
#pragma once

#include "../common/bits.cuh"
#include "sequences.cuh"

namespace flash_dmattn::cuda {

// kThreads threads with kWords words of 32 keys a warp: the turns of one block.
template <int kThreads, int kWords>
class DropOut {
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kOfWarp = 32 * kWords;
    static constexpr int kOfThread = 32;  // turns that one thread deals out

public:
    static constexpr int kTurns = kThreads * kWords;

    struct Smem {
        uint32_t keys[kTurns];  // in order; kHidden may be set
        int counts[kWarps];
    };

    // smem.keys holds the `turns` keys that go at the turns first_turn, first_turn + 1, ..; all threads see them.
    __device__ DropOut(Smem& smem, int turns, int first_turn, int window)
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
        deal(visit);
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

    // A thread's keys are written so that all lanes find theirs in different banks.
    __device__ static int at_of(int thread, int i) { return thread * kOfThread + (i ^ thread % 32); }

    template <typename Visit>
    __device__ void deal(const Visit& visit) {
        __syncwarp();
        for_each([&](int w, int at) { smem_.keys[at_of(at / kOfThread, at % kOfThread)] = key_[w]; });
        __syncthreads();
        const int thread = static_cast<int>(threadIdx.x), first = thread * kOfThread;
        if (first >= turns_) return;
        const int count = min(turns_ - first, kOfThread);
        uint32_t free = ~0u;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const uint32_t key = smem_.keys[at_of(thread, i)];
            const uint32_t turn = free & (~0u << max(arrival(key) - first, 0));
            free &= ~(turn & -turn);
            visit(key, first_turn_ + first + __ffs(turn) - 1);
        }
    }

    Smem& smem_;
    const int turns_, first_turn_, window_;
    const int first_;  // the warp's first key
    uint32_t key_[kWords];
};

}  // namespace flash_dmattn::cuda
