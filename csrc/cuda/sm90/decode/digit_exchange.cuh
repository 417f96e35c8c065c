// The digits of a radix select among the CTAs of a cluster: in each round every CTA counts a digit of its keys, and its
// histogram is sent to all CTAs.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <int kWarps>
class DigitExchange {
    static constexpr int kThreads = kWarps * 32;

public:
    // `histograms`: decode_histogram_bytes.
    __device__ DigitExchange(DecodeSharedStorage& smem, uint32_t* histograms, int cluster, int rank)
        : smem_(smem), histograms_(histograms), received_(histograms + 2 * DigitHistogram::kWords), cluster_(cluster),
          rank_(rank) {}

    // Before all else. Its fence waits for what was loaded before.
    __device__ static void init(DecodeSharedStorage& smem, uint32_t* histograms) {
        if (lane_id() == 0 && warp_id() < 2) mbarrier_init(smem_address(&smem.histogram_ready[warp_id()]), 1);
        DigitHistogram(histograms).clear(kThreads, 2);
    }

    // The other CTAs may send their histograms.
    __device__ void start() const {
        if (cluster_ > 1) cluster_arrive_relaxed();
    }

    // Begins a round.
    __device__ __forceinline__ DigitHistogram begin() {
        ++round_;
        if (round_ >= 2) {
            own().clear(kThreads);
            __syncthreads();
        }
        return own();
    }

    // Ends it when this CTA has counted: sends its histogram to all CTAs, and waits for theirs.
    __device__ __forceinline__ void exchange() const {
        __syncthreads();
        if (cluster_ == 1) return;
        if (round_ == 0) cluster_wait();  // for start()
        if (threadIdx.x == 0) mbarrier_arrive_and_expect_tx(ready(round_), cluster_ * kBins * 4);
        constexpr int kVectors = kBins / 4;  // each is sent by several threads, each to several CTAs
        const int vector = threadIdx.x % kVectors;
        const uint4 own = reinterpret_cast<const uint4*>(own_counts())[vector];
        const uint32_t to = smem_address(received(rank_)) + vector * 16;
#pragma unroll 1
        for (int cta = threadIdx.x / kVectors; cta < cluster_; cta += kThreads / kVectors)
            store_dsmem_async(map_to_cta(to, cta), own, map_to_cta(ready(round_), cta));
        mbarrier_wait(ready(round_), round_ / 2 % 2);
        static_assert(kThreads >= kBins);
        const int bin = threadIdx.x;
        if (bin < kBins) {
            uint32_t sum = 0;
#pragma unroll 4
            for (int cta = 0; cta < cluster_; ++cta) sum += received(cta)[bin];
            smem_.histogram[bin] = sum;
        }
        __syncthreads();
    }

    // The largest digit such that at least `wanted` keys have it or a larger one, and how many have a larger one. If
    // fewer keys were counted, the digit is -1. All warps call.
    __device__ __forceinline__ ChosenDigit choose(int wanted) const {
        constexpr int kBinsOfLane = kBins / 32;
        const uint32_t* totals = cluster_ == 1 ? own_counts() : smem_.histogram;
        const int first = (31 - lane_id()) * kBinsOfLane;  // lane 0 has the highest
        int bins[kBinsOfLane], of_lane = 0;
#pragma unroll
        for (int i = 0; i < kBinsOfLane; i += 4)
            *reinterpret_cast<int4*>(bins + i) = *reinterpret_cast<const int4*>(totals + first + i);
#pragma unroll
        for (int i = 0; i < kBinsOfLane; ++i) of_lane += bins[i];
        const int upto = warp_inclusive_sum(of_lane);
        int above = upto - of_lane, bin = first;
#pragma unroll
        for (int i = kBinsOfLane - 1; i > 0; --i) {
            if (bin == first && above + bins[i] >= wanted) bin = first + i;
            if (bin == first) above += bins[i];
        }
        const uint32_t lanes = __ballot_sync(~0u, upto >= wanted);
        const int lane = __ffs(lanes) - 1;
        const ChosenDigit chosen{__shfl_sync(~0u, bin, lane), __shfl_sync(~0u, above, lane)};
        return lanes == 0 ? ChosenDigit{-1, 0} : chosen;
    }

    // Of the cluster's keys in a bin, the last `wanted` are selected. Returns how many this CTA has, and how many of
    // these, the first ones, are not selected.
    struct EqualKeys {
        int all, skipped;
    };
    __device__ __forceinline__ EqualKeys equal_keys(int bin, int wanted) const {
        int equal = 0;  // in CTA `lane`
        if (lane_id() < cluster_) equal = static_cast<int>((cluster_ == 1 ? own_counts() : received(lane_id()))[bin]);
        const int own = __shfl_sync(~0u, equal, rank_);
        const int later = __reduce_add_sync(~0u, lane_id() > rank_ ? equal : 0);
        return {own, own - min(max(wanted - later, 0), own)};
    }

private:
    // Histograms of even and odd rounds alternate: no CTA is more than one round ahead of another, and no warp of another in its CTA.
    __device__ uint32_t* own_counts() const { return histograms_ + (round_ & 1) * DigitHistogram::kWords; }
    __device__ DigitHistogram own() const { return DigitHistogram(own_counts()); }
    __device__ uint32_t* received(int cta) const { return received_ + kBins * (round_ % 2 * cluster_ + cta); }
    __device__ uint32_t ready(int round) const { return smem_address(&smem_.histogram_ready[round % 2]); }

    DecodeSharedStorage& smem_;
    uint32_t* const histograms_;  // of this CTA
    uint32_t* const received_;    // from all CTAs
    const int cluster_, rank_;
    int round_ = -1;
};

}  // namespace flash_dmattn::cuda::sm90
