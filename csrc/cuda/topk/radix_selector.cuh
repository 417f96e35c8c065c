// Top-k selection for few query rows (decoding): radix select from the bias straight to key lists. The CTAs of a
// cluster share a list, each with a part of its keys.
//
// First row: the w-th largest bias is found digit by digit, from the highest. Each CTA histograms the digit of the keys
// that match the digits found so far, and the histograms are summed over DSMEM. Then every larger key is listed, and
// the last of the equal ones. Prefix sums over threads, warps and CTAs keep the keys in order.
//
// Each further row adds one key and evicts the smallest if there are more than w. Only the rows - 1 smallest keys of
// the first row can be evicted, so one warp simulates all rows with these and the new keys.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/mask/bits.cuh"
#include "order_group.cuh"
#include "topk.h"

namespace flash_dmattn::cuda {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 8;  // the portable cluster size
constexpr int kGroups = 4;      // groups of a thread per load
constexpr int kStep = kThreads * kGroup;
constexpr int kMaxRows = static_cast<int>(kMaxListedRows);
constexpr int kRowWords = KeyListsView::kRows / 32;
static_assert(kRowWords == 4, "written as 16 bytes");
static_assert(2 * (kMaxRows - 1) <= 32, "a warp holds the added and the evictable keys");

struct RadixSelectParams {
    const void* bias;
    int64_t batch_stride, head_stride, col_stride;
    int heads, keys, rows, window, cluster;
    int storable;  // keys of a CTA that fit in its shared memory
    bool aligned;  // groups of keys can be loaded 16 bytes at a time
    int64_t list_stride;
    const int32_t* seqused_k;
    int32_t* listed;     // [lists, list_stride]
    int64_t* begins;     // [lists]
    int64_t* ends;       // [lists]
    uint4* listed_rows;  // [lists, list_stride], or null
};

// A listed key for comparison: by bias, then by position.
using Entry = uint64_t;
constexpr Entry kNoEntry = ~0ull;
constexpr int kStagedEntries = 2048;
__device__ __forceinline__ Entry entry_of(uint32_t rank, int key) {
    return static_cast<Entry>(rank) << 32 | static_cast<uint32_t>(key);
}

struct alignas(16) RadixSelectSharedStorage {
    union {
        uint32_t histogram[DigitHistogram::kWords];
        Entry entries[kStagedEntries];  // the first row's keys, if they fit
    };
    uint32_t counts[2][kBins];  // histograms of this CTA's keys, read by the others
    alignas(16) uint32_t totals[kBins];
    int digit, above, own_above;
    int greater, equal;  // counts of this CTA's keys
    uint32_t warp_counts[2][kGroups * kWarps];
    Entry warp_least[2][kWarps];
    Entry least[32];  // the smallest keys of the first row, ascending
    int least_at[32];
};

// Loads from CTA `rank` of the cluster. Before compute capability 9.0 a cluster is one CTA.
__device__ __forceinline__ uint32_t load_from_cta(const uint32_t* from, int rank) {
    if constexpr (kHasSm90) return load_dsmem(map_to_cta(smem_address(from), rank));
    return *from;
}

template <DataType kType>
class RadixSelector {
    using Bits = typename FloatBits<kType>::Bits;
    static constexpr int kDigits = sizeof(Bits) * 8 / kDigit;
    static constexpr uint32_t kMasked = kMaskedOrder<kType>;

public:
    __device__ RadixSelector(const RadixSelectParams& s, RadixSelectSharedStorage& smem)
        : s_(s), smem_(smem), list_(blockIdx.x / s.cluster), rank_(static_cast<int>(blockIdx.x % s.cluster)) {
        const int batch = static_cast<int>(list_ / s.heads), head = static_cast<int>(list_ % s.heads);
        bias_ = static_cast<const Bits*>(s.bias) + batch * s.batch_stride + head * s.head_stride;
        const int keys = s.seqused_k == nullptr ? s.keys : min(max(s.seqused_k[batch], 0), s.keys);
        newest_ = keys - s.rows;
        first_keys_ = max(newest_ + 1, 0);
        const int share = ceil_div(ceil_div(first_keys_, s.cluster), kGroup) * kGroup;
        begin_ = min(rank_ * share, first_keys_);
        end_ = min(begin_ + share, first_keys_);
        held_ = end_ - begin_ <= kGroups * kStep;
        stores_ = !held_ && end_ - begin_ <= s.storable;
        if (held_) load(begin_);
    }

    __device__ void run() {
        find_threshold();
        scan_ctas();
        write_first_row();
        refuse_nan(Group<kType>::has_nan(nans_));
        sync_cluster();  // the others have read this CTA's shared memory, and all keys are written
        if (rank_ != 0) return;
        if (s_.rows > 1) follow_rows();
        finish();
    }

private:
    __device__ void sync_cluster() const {
        if constexpr (kHasSm90) {
            if (s_.cluster > 1) return cluster_sync();
        }
        __syncthreads();
    }

    __device__ Bits bits_of(int key) const { return bias_[key * s_.col_stride]; }

    __device__ int first_of_group(int first, int g) const {
        return first + g * kStep + static_cast<int>(threadIdx.x) * kGroup;
    }

    __device__ void load(int first) {
        Bits bits[kGroups][kGroup];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int key = first_of_group(first, g);
            uint4* words = reinterpret_cast<uint4*>(groups_[g].words);
            if (s_.aligned && key + kGroup <= end_) {
#pragma unroll
                for (int part = 0; part < Group<kType>::kWords / 4; ++part)
                    words[part] = __ldg(reinterpret_cast<const uint4*>(bias_ + key) + part);
            } else {
#pragma unroll
                for (int i = 0; i < kGroup; ++i)
                    bits[g][i] = key + i < end_ ? bits_of(key + i) : FloatBits<kType>::kLowest;
#pragma unroll
                for (int i = 0; i < Group<kType>::kWords; ++i) {
                    if constexpr (sizeof(Bits) == 2) {
                        groups_[g].words[i] = bits[g][2 * i] | static_cast<uint32_t>(bits[g][2 * i + 1]) << 16;
                    } else {
                        groups_[g].words[i] = bits[g][i];
                    }
                }
            }
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            groups_[g].to_orders(nans_);
            groups_[g].clamp_masked();
            if (stores_) stored(first, g) = groups_[g];
        }
    }

    __device__ Group<kType>& stored(int first, int g) const {
        extern __shared__ uint4 dynamic_smem[];
        return reinterpret_cast<Group<kType>*>(dynamic_smem)[((first - begin_) / kStep + g) * kThreads + threadIdx.x];
    }

    // Calls visit(first) with this CTA's keys from `first` on in groups_; keys beyond the last count as masked.
    template <typename Visit>
    __device__ __forceinline__ void for_each_load(const Visit& visit) {
        for (int first = begin_; first < end_; first += kGroups * kStep) {
            if (is_stored_) {
#pragma unroll
                for (int g = 0; g < kGroups; ++g) groups_[g] = stored(first, g);
            } else if (!held_) {
                load(first);
            }
            visit(first);
        }
    }

    // The first row sees the keys above threshold_ and the last `equal_taken_` of those equal to it.
    __device__ void find_threshold() {
        threshold_ = static_cast<Bits>(~Bits{0});  // above every bias
        greater_ = equal_ = equal_taken_ = 0;
        int wanted = min(s_.window, first_keys_);
        if (wanted == 0) return;
        threshold_ = 0;
        find_digit<kDigits - 1>(wanted);
        if (threshold_ <= kMasked) {  // masked keys fill up what is wanted
            threshold_ = kMasked;
            return;
        }
        equal_ = smem_.counts[0][smem_.digit];
        equal_taken_ = wanted;
    }

    template <int kAt>
    __device__ void find_digit(int& wanted) {
        count_digit<kAt * kDigit>();
        choose_digit(kAt % 2, wanted);
        threshold_ |= static_cast<Bits>(smem_.digit) << (kAt * kDigit);
        wanted -= smem_.above;
        greater_ += smem_.own_above;
        if constexpr (kAt > 0) find_digit<kAt - 1>(wanted);
    }

    template <int kShift>
    __device__ void count_digit() {
        const DigitHistogram histogram(smem_.histogram);
        histogram.clear(kThreads);
        __syncthreads();
        for_each_load([&](int) {
#pragma unroll
            for (const Group<kType>& group : groups_) group.template count<kShift>(histogram, threshold_);
        });
        is_stored_ = stores_;
        __syncthreads();
        const int bin = threadIdx.x;
        if (bin < kBins) smem_.counts[kShift / kDigit % 2][bin] = smem_.histogram[bin];
    }

    // Chooses the largest digit such that at least `wanted` keys have this digit or a larger one.
    __device__ void choose_digit(int buffer, int wanted) {
        sync_cluster();
        const uint32_t* own = smem_.counts[buffer];
        if (threadIdx.x < kBins) {
            uint32_t sum = 0;
            for (int rank = 0; rank < s_.cluster; ++rank) sum += load_from_cta(&own[threadIdx.x], rank);
            smem_.totals[threadIdx.x] = sum;
        }
        __syncthreads();
        if (warp_id() == 0) {
            const auto [digit, above] = choose_largest_digit(smem_.totals, wanted);
            int own_above = 0;
            for (int bin = digit + 1 + lane_id(); bin < kBins; bin += 32) own_above += own[bin];
            own_above = __reduce_add_sync(~0u, own_above);
            if (lane_id() == 0) smem_.digit = digit, smem_.above = above, smem_.own_above = own_above;
        }
        __syncthreads();
    }

    // Prefix sums over the CTAs of the keys above and equal to the threshold, and the totals.
    __device__ void scan_ctas() {
        if (threadIdx.x == 0) smem_.greater = greater_, smem_.equal = equal_;
        sync_cluster();
        greater_ = equal_ = 0;
        int all_greater = 0, all_equal = 0;
        for (int rank = 0; rank < s_.cluster; ++rank) {
            const int greater = load_from_cta(reinterpret_cast<const uint32_t*>(&smem_.greater), rank);
            const int equal = load_from_cta(reinterpret_cast<const uint32_t*>(&smem_.equal), rank);
            if (rank < rank_) greater_ += greater, equal_ += equal;
            all_greater += greater, all_equal += equal;
        }
        length_ = all_greater + equal_taken_;
        equal_left_ = all_equal - equal_taken_;
    }

    __device__ void write_first_row() {
        int buffer = 0;
        const uint4 all_rows{(1u << s_.rows) - 1, 0, 0, 0};
        int32_t* listed = s_.listed + list_ * s_.list_stride;
        for_each_load([&](int first) {
            // Group g has bits [8 g, 8 g + 8).
            uint32_t greater = 0, equal = 0;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const auto bits = groups_[g].compare(threshold_);
                greater |= bits.above << (g * kGroup);
                equal |= bits.equal << (g * kGroup);
            }
            if (equal_taken_ == 0) equal = 0;
            // Counts of greater (low half) and equal (high half) keys of this load before the thread's.
            uint32_t before[kGroups], own[kGroups];
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                constexpr uint32_t kBits = (1u << kGroup) - 1;
                own[g] = __popc(greater >> (g * kGroup) & kBits) | __popc(equal >> (g * kGroup) & kBits) << 16;
                before[g] = warp_inclusive_sum(own[g]);
                if (lane_id() == 31) smem_.warp_counts[buffer][g * kWarps + warp_id()] = before[g];
            }
            __syncthreads();
            static_assert(kGroups * kWarps == 64);
            const uint32_t low = smem_.warp_counts[buffer][lane_id()], high = smem_.warp_counts[buffer][32 + lane_id()];
            const uint32_t low_upto = warp_inclusive_sum(low), low_sum = __shfl_sync(~0u, low_upto, 31);
            const uint32_t high_upto = warp_inclusive_sum(high) + low_sum, sum = __shfl_sync(~0u, high_upto, 31);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const int warp = g * kWarps + warp_id();
                before[g] += __shfl_sync(~0u, g * kWarps < 32 ? low_upto - low : high_upto - high, warp % 32) - own[g];
            }
            for (uint32_t left = greater | equal; left != 0; left &= left - 1) {
                const int bit = __ffs(left) - 1, g = bit / kGroup;
                const uint32_t below = ((1u << bit) - 1) & (~0u << (g * kGroup));
                uint32_t of_group = before[0];
#pragma unroll
                for (int other = 1; other < kGroups; ++other)
                    if (g == other) of_group = before[other];
                const int equal_before = equal_ + static_cast<int>(of_group >> 16) + __popc(equal & below);
                if ((equal >> bit & 1) != 0 && equal_before < equal_left_) continue;
                const int at = greater_ + static_cast<int>(of_group & 0xffff) + __popc(greater & below) +
                               max(equal_before - equal_left_, 0);
                listed[at] = first_of_group(first, g) + bit % kGroup;
                if (s_.rows > 1) s_.listed_rows[list_ * s_.list_stride + at] = all_rows;
            }
            greater_ += sum & 0xffff, equal_ += sum >> 16;
            buffer ^= 1;
        });
    }

    __device__ Entry read_entry(int at) const {
        const int key = __ldcg(s_.listed + list_ * s_.list_stride + at);
        return entry_of(rank_of_bias<kType>(bits_of(key)), key);
    }

    // Finds the smallest keys of the first row, ascending (smem_.least), and their list positions.
    __device__ void find_least() {
        const bool fit = length_ <= kStagedEntries;
        if (fit)
            for (int at = threadIdx.x; at < length_; at += kThreads) smem_.entries[at] = read_entry(at);
        // This thread's smallest entry above `floor`; entries are at least 1.
        Entry own;
        int own_at = 0;
        const auto find_own = [&](Entry floor) {
            own = kNoEntry;
            for (int at = threadIdx.x; at < length_; at += kThreads) {
                const Entry entry = fit ? smem_.entries[at] : read_entry(at);
                if (entry > floor && entry < own) own = entry, own_at = at;
            }
        };
        find_own(0);
        for (int i = 0; i < s_.rows - 1; ++i) {
            Entry least = min_of_lanes(own);
            if (lane_id() == 0) smem_.warp_least[i % 2][warp_id()] = least;
            __syncthreads();
            least = min_of_lanes(smem_.warp_least[i % 2][lane_id() % kWarps]);
            if (threadIdx.x == 0) smem_.least[i] = least;
            if (least == kNoEntry) continue;
            if (own == least) {
                smem_.least_at[i] = own_at;
                find_own(least);
            }
        }
        __syncthreads();
    }

    __device__ static Entry min_of_lanes(Entry x) {
        const uint32_t high = __reduce_min_sync(~0u, static_cast<uint32_t>(x >> 32));
        const uint32_t low = __reduce_min_sync(~0u, x >> 32 == high ? static_cast<uint32_t>(x) : ~0u);
        return static_cast<Entry>(high) << 32 | low;
    }

    __device__ void follow_rows() {
        find_least();
        if (warp_id() != 0) return;
        constexpr int kHalf = 16;
        const int i = lane_id() % kHalf;
        const bool is_new = lane_id() < kHalf;
        const bool exists = i + 1 < s_.rows;
        // The lower half-warp holds the keys that rows 1, 2, .. add, the upper half the evictable keys.
        Entry entry = kNoEntry;
        if (exists && is_new && newest_ + 1 + i >= 0) {
            const Bits bits = bits_of(newest_ + 1 + i);
            refuse_nan(is_nan<kType>(bits));
            const uint32_t rank = rank_of_bias<kType>(bits);
            if (rank != 0) entry = entry_of(rank, newest_ + 1 + i);
        } else if (exists && !is_new) {
            entry = smem_.least[i];
        }
        int size = length_, evicted = s_.rows;  // by which row
        bool is_in = !is_new && entry != kNoEntry;
        for (int row = 1; row < s_.rows; ++row) {
            const bool comes = is_new && i + 1 == row && entry != kNoEntry;
            is_in |= comes;
            size += __any_sync(~0u, comes);
            if (size <= s_.window) continue;
            const Entry least = min_of_lanes(is_in ? entry : kNoEntry);
            if (is_in && entry == least) evicted = row, is_in = false;
            --size;
        }
        const uint32_t rows = bits_below(evicted, 0) & (is_new ? ~bits_below(i + 1, 0) : ~0u);
        const int64_t first = list_ * s_.list_stride;
        const bool is_listed = is_new && entry != kNoEntry && rows != 0;
        const uint32_t listed = __ballot_sync(~0u, is_listed);
        if (is_listed) {
            const int at = length_ + rank_in(listed);
            s_.listed[first + at] = newest_ + 1 + i;
            s_.listed_rows[first + at] = {rows, 0, 0, 0};
        }
        if (!is_new && evicted < s_.rows) s_.listed_rows[first + smem_.least_at[i]] = {rows, 0, 0, 0};
        length_ += __popc(listed);
    }

    // Pads the list and writes its bounds. Only the first warp knows the length.
    __device__ void finish() const {
        if (warp_id() != 0) return;
        constexpr int kAlign = KeyListsView::kAlign;
        const int64_t first = list_ * s_.list_stride;
        const int end = ceil_div(length_, kAlign) * kAlign;
        for (int at = length_ + lane_id(); at < end; at += 32) {
            s_.listed[first + at] = -1;
            if (s_.rows > 1) s_.listed_rows[first + at] = {};
        }
        if (lane_id() == 0) s_.begins[list_] = first, s_.ends[list_] = first + end;
    }

    const RadixSelectParams& s_;
    RadixSelectSharedStorage& smem_;
    const int64_t list_;
    const int rank_;
    const Bits* bias_;
    int newest_;              // the last key of the first row; below 0 where it has none
    int first_keys_;          // number of causal keys of the first row
    int begin_, end_;         // this CTA's part of them
    bool held_;               // groups_ holds all keys of this CTA
    bool stores_;             // shared memory has room for them
    bool is_stored_ = false;  // shared memory holds them
    uint32_t nans_ = 0;
    Group<kType> groups_[kGroups];
    Bits threshold_;
    int greater_, equal_;  // counts of this CTA; after scan_ctas, of the CTAs before it
    int equal_taken_, equal_left_;
    int length_;
};

}  // namespace flash_dmattn::cuda
