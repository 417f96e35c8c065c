// The digits of a radix select among the CTAs of a cluster: in each round every CTA counts a digit of its keys, and the
// histograms of all CTAs are summed.
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

    // Initializes mbarriers and clears both histograms. Call before any load: the fence of mbarrier_init waits for
    // earlier loads.
    __device__ static void init(DecodeSharedStorage& smem, uint32_t* histograms) {
        if (lane_id() == 0 && warp_id() < 2) mbarrier_init(smem_address(&smem.histogram_ready[warp_id()]), 1);
        DigitHistogram(histograms).clear(kThreads, 2);
    }

    // Signals that this CTA's mbarriers are initialized. The first all_reduce waits for this signal from all CTAs.
    __device__ void signal_ready() const {
        if (cluster_ > 1) cluster_arrive_relaxed();
    }

    // Begins a round. Returns the cleared histogram of this CTA.
    __device__ __forceinline__ DigitHistogram begin_round() {
        ++round_;
        DigitHistogram histogram(own_counts());
        if (round_ >= 2) {
            histogram.clear(kThreads);
            __syncthreads();
        }
        return histogram;
    }

    // Ends the round: sends this CTA's histogram and a tag to all CTAs, waits for theirs and sums the histograms.
    __device__ __forceinline__ void all_reduce(uint32_t tag = 0) const {
        if (threadIdx.x == 0) own_counts()[kTag] = tag;
        __syncthreads();
        if (cluster_ == 1) return;
        if (round_ == 0) cluster_wait();  // for signal_ready()
        if (threadIdx.x == 0) mbarrier_arrive_and_expect_tx(ready(), cluster_ * (kBins + 4) * 4);
        constexpr int kVectors = kBins / 4;
        const int vector = threadIdx.x % kVectors;
#pragma unroll 1
        for (int cta = threadIdx.x / kVectors; cta < cluster_; cta += kThreads / kVectors) send(vector, cta);
        if (static_cast<int>(threadIdx.x) < cluster_) send(kVectors, threadIdx.x);  // the tag
        mbarrier_wait(ready(), round_ / 2 % 2);
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

    __device__ __forceinline__ ChosenDigit choose_digit(int wanted) const {
        return choose_largest_digit(cluster_ == 1 ? own_counts() : smem_.histogram, wanted);
    }

    // Whether all CTAs passed the same tag.
    __device__ __forceinline__ bool agree() const {
        const bool is_other = cluster_ > 1 && lane_id() < cluster_;
        return __all_sync(~0u, !is_other || received(lane_id())[kTag] == own_counts()[kTag]);
    }

    // The keys of this CTA in a bin, and how many of them are skipped: the last `wanted` keys of the cluster in this
    // bin are selected, so each CTA skips its first ones.
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
    static constexpr int kTag = kBins + 1;  // the histogram's word of the tag, behind the bin of keys without a digit
    static_assert(kTag < DigitHistogram::kWords && kBins + 4 == DigitHistogram::kWords);

    // Sends four words of this CTA's histogram.
    __device__ __forceinline__ void send(int vector, int cta) const {
        const uint4 own = reinterpret_cast<const uint4*>(own_counts())[vector];
        store_dsmem_async(map_to_cta(smem_address(received(rank_)) + vector * 16, cta), own, map_to_cta(ready(), cta));
    }

    // Two buffers, for even and odd rounds: a CTA is at most one round ahead of the others, and so is a warp in its
    // CTA.
    __device__ int buffer() const { return round_ & 1; }
    __device__ uint32_t* own_counts() const { return histograms_ + buffer() * DigitHistogram::kWords; }
    __device__ uint32_t* received(int cta) const {
        return received_ + DigitHistogram::kWords * (buffer() * cluster_ + cta);
    }
    __device__ uint32_t ready() const { return smem_address(&smem_.histogram_ready[buffer()]); }

    DecodeSharedStorage& smem_;
    uint32_t* const histograms_;  // of this CTA
    uint32_t* const received_;    // from all CTAs
    const int cluster_, rank_;
    int round_ = -1;
};

// The sum of `equal` over the warps of the CTA before this one. All threads call; `equal` is uniform in a warp.
template <int kWarps>
__device__ __forceinline__ int equal_before_warp(DecodeSharedStorage& smem, int equal) {
    if (lane_id() == 0) smem.equal_counts[warp_id()] = equal;
    __syncthreads();
    return __reduce_add_sync(~0u, lane_id() < warp_id() ? smem.equal_counts[lane_id() % kWarps] : 0);
}

}  // namespace flash_dmattn::cuda::sm90
