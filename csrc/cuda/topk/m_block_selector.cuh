// Top-k selection for many query rows: radix select from a key bias straight to the key list of an m_block, with row
// bits. A CTA has an m_block.
//
// The window of a row has the w largest keys up to the row's own. Each row adds its key and, if there are more than w,
// evicts the smallest. An m_block of n rows thus evicts at most the n smallest keys of the window before it
// (evictable); the others stay for all its rows. One radix select finds both thresholds, of the window and of the
// staying keys. A row sees an evictable or new key if fewer than w - (staying keys) of the evictable keys and of the
// new keys up to this row are larger. chunked_sequences.cu divides a sequence in the same way.
#pragma once

#include <climits>

#include "cuda/mask/bits.cuh"
#include "order_group.cuh"

namespace flash_dmattn::cuda {

constexpr int kMBlockSelectThreads = 1024;

// The list of an m_block, as in KeyListsView, with the bias of each key.
template <typename Bits>
struct MBlockList {
    int32_t* keys;
    uint4* rows;
    Bits* biases;
};

// Biases::at(key) is the address of a key's bias. Eight neighbouring ones, from a multiple of 8 on, are adjacent and
// aligned.
template <DataType kType, typename Biases>
class MBlockSelector {
    using Bits = typename FloatBits<kType>::Bits;
    static constexpr int kThreads = kMBlockSelectThreads;
    static constexpr int kWarps = kThreads / 32, kRows = static_cast<int>(KeyListsView::kRows);
    static constexpr int kRowWords = kRows / 32;
    static constexpr int kGroups = sizeof(Bits) == 2 ? 4 : 2;  // of a thread
    static constexpr int kDigits = sizeof(Bits) * 8 / kDigit;
    static_assert(kWarps == 32, "a lane for each warp's sum");
    static_assert(kGroups * kGroup <= 32, "a bit for each key of a thread");
    static_assert(kThreads * kGroups * kGroup < 1 << 16, "two counts in a word");

    // The `wanted` largest of the keys before the m_block: those above `threshold`, and the last `wanted` of the
    // `equal` keys equal to it. No masked key is wanted.
    struct Search {
        uint32_t threshold;
        int wanted, equal;
    };
    enum { kWindow, kStaying, kSearches };
    struct AddedKey {
        uint32_t order;
        int row;
    };
    static constexpr int kStagedKeys = 8192;
    static constexpr int kThreadsPerKey = 8;  // that compare a key with the evictable ones

public:
    struct SharedStorage {
        union {
            alignas(16) uint32_t histograms[kSearches][DigitHistogram::kWords];
            int staying[kStagedKeys];  // the first staying keys; the list has the others
        };
        Search searches[kSearches];
        uint32_t warp_sums[2][kWarps];
        alignas(16) uint32_t evictable[kRows];  // orders
        int evictable_keys[kRows];
        AddedKey added[kRows];                               // the new keys that may enter the window
        int evictable_evicted[kRows], added_evicted[kRows];  // by which row; kRows: by none
        uint32_t ballots[kRowWords];                         // of the first kRows threads
    };

    // The m_block has `rows` rows, of the keys first_key, first_key + 1, .., below `keys`. first_key may be negative:
    // rows without keys.
    __device__ MBlockSelector(const Biases& biases, int first_key, int rows, int keys, int window, SharedStorage& smem)
        : biases_(biases), first_key_(first_key), rows_(rows), keys_(keys), window_(window),
          before_(min(max(first_key, 0), keys)), smem_(smem) {
        per_thread_ = min(ceil_div(before_, kThreads * kGroup), kGroups) * kGroup;
    }

    // Writes the list. row_of(key) is the number that the list has for a key. Returns its length, without padding. All
    // threads call.
    template <typename RowOf>
    __device__ int run(const MBlockList<Bits>& list, const RowOf& row_of) {
        find_thresholds();
        find_window(list);
        find_eviction_rows();
        refuse_nan(found_nan_ || Group<kType>::has_nan(nans_));
        write_window(list, row_of);
        return append_new_keys(list, row_of);
    }

private:
    __device__ int step() const { return kThreads * per_thread_; }
    __device__ int first_of_thread(int first) const { return first + static_cast<int>(threadIdx.x) * per_thread_; }

    // Loads this thread's keys from `first` on; keys that are not before the m_block count as masked.
    __device__ void load(int first) {
        first = first_of_thread(first);
        const int last_group = (before_ - 1) / kGroup * kGroup;
        const uint4* from[kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
            from[g] = reinterpret_cast<const uint4*>(biases_.at(min(first + g * kGroup, last_group)));
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
            for (int part = 0; part < Group<kType>::kWords / 4; ++part)
                reinterpret_cast<uint4*>(groups_[g].words)[part] = __ldg(from[g] + part);
        if (first + per_thread_ > before_) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) groups_[g].mask_from(before_ - first - g * kGroup);
        }
        for_each_group([&](Group<kType>& group, int) {
            group.to_orders(nans_);
            group.clamp_masked();
        });
    }

    // Calls visit(group, its first key's number among this thread's). Short sequences have fewer groups.
    template <typename Visit>
    __device__ __forceinline__ void for_each_group(const Visit& visit) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
            if (g * kGroup < per_thread_) visit(groups_[g], g * kGroup);
    }

    // Calls visit(first key of this thread) with the thread's keys in groups_, for all keys before the m_block.
    template <typename Visit>
    __device__ __forceinline__ void for_each_load(const Visit& visit) {
        for (int first = 0; first < before_; first += step()) {
            if (first > 0 || !is_held_) load(first);
            is_held_ = first + step() >= before_ && first == 0;
            visit(first_of_thread(first));
        }
    }

    __device__ void find_thresholds() {
        searches_[kWindow] = {0, min(window_, before_), 0};
        searches_[kStaying] = {0, min(max(window_ - rows_, 0), before_), 0};
        if (before_ > 0) find_digit<kDigits - 1>();
        // Where none is wanted, all digits are the largest, which no key has. No masked key is wanted: INT_MAX skips
        // all.
#pragma unroll
        for (Search& search : searches_)
            if (search.threshold <= kMaskedOrder<kType>) search = {kMaskedOrder<kType>, 0, INT_MAX};
    }

    template <int kAt>
    __device__ void find_digit() {
        count_digit<kAt * kDigit>();
        choose_digit(kAt * kDigit);
        if constexpr (kAt > 0) find_digit<kAt - 1>();
    }

    template <int kShift>
    __device__ void count_digit() {
        const DigitHistogram histogram(smem_.histograms[0]);
        histogram.clear(kThreads, kSearches);
        __syncthreads();
        for_each_load([&](int) {
            for_each_group([&](const Group<kType>& group, int) {
                group.template count<kShift>(histogram, searches_[kWindow].threshold, searches_[kStaying].threshold);
            });
        });
        __syncthreads();
    }

    // Adds to each threshold the largest digit such that at least `wanted` keys have it or a larger one.
    __device__ void choose_digit(int shift) {
        const int s = warp_id();
        if (s < kSearches) {
            Search search = searches_[kStaying];
            if (s == kWindow) search = searches_[kWindow];
            // While the thresholds have the same digits, the first histogram has all keys.
            const bool is_shared = searches_[kWindow].threshold == searches_[kStaying].threshold;
            const uint32_t* totals = smem_.histograms[is_shared ? 0 : s];
            const ChosenDigit chosen = choose_largest_digit(totals, search.wanted);
            search.threshold |= static_cast<uint32_t>(chosen.digit) << shift;
            search.wanted -= chosen.above;
            search.equal = static_cast<int>(totals[chosen.digit]);
            if (lane_id() == 0) smem_.searches[s] = search;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSearches; ++i) searches_[i] = smem_.searches[i];
    }

    // The sum of x over the threads before this one, and over all of them. All threads call.
    __device__ uint32_t exclusive_sum(uint32_t x, uint32_t& total) {
        uint32_t (&sums)[kWarps] = smem_.warp_sums[buffer_];
        buffer_ ^= 1;
        const uint32_t upto = warp_inclusive_sum(x);
        if (lane_id() == 31) sums[warp_id()] = upto;
        __syncthreads();
        const uint32_t of_warp = sums[lane_id()], warps_upto = warp_inclusive_sum(of_warp);
        total = __shfl_sync(~0u, warps_upto, 31);
        return __shfl_sync(~0u, warps_upto - of_warp, warp_id()) + upto - x;
    }

    using KeyBits = typename Group<kType>::KeyBits;
    // Bit i: this thread's key i is above the threshold of a search, or equal to it.
    __device__ KeyBits compare(const Search& search) {
        KeyBits bits;
        for_each_group([&](const Group<kType>& group, int first) {
            const KeyBits of_group = group.compare(search.threshold);
            bits.above |= of_group.above << first;
            bits.equal |= of_group.equal << first;
        });
        return bits;
    }
    // The largest keys of a search, where the sequence has `before` equal ones before this thread's.
    __device__ static uint32_t largest(const Search& search, KeyBits bits, int before) {
        int skipped = search.equal - search.wanted - before;
        if (skipped >= __popc(bits.equal)) return bits.above;
        for (; skipped > 0; --skipped) bits.equal &= bits.equal - 1;
        return bits.above | bits.equal;
    }

    // Finds the staying and the evictable keys, each in order.
    __device__ void find_window(const MBlockList<Bits>& list) {
        int equal_before[kSearches] = {};
        for_each_load([&](int first) {
            const KeyBits of_window = compare(searches_[kWindow]), of_staying = compare(searches_[kStaying]);
            uint32_t equal_total, total;
            const uint32_t equal = exclusive_sum(__popc(of_window.equal) | __popc(of_staying.equal) << 16, equal_total);
            const uint32_t window =
                largest(searches_[kWindow], of_window, equal_before[kWindow] + static_cast<int>(equal & 0xffff));
            const uint32_t evictable = window & ~largest(searches_[kStaying], of_staying,
                                                         equal_before[kStaying] + static_cast<int>(equal >> 16));
            const uint32_t staying = window & ~evictable;
            const uint32_t before = exclusive_sum(__popc(staying) | __popc(evictable) << 16, total);
            int at = staying_ + static_cast<int>(before & 0xffff), n = evictable_ + static_cast<int>(before >> 16);
            for (uint32_t left = staying; left != 0; left &= left - 1, ++at)
                (at < kStagedKeys ? smem_.staying : list.keys)[at] = first + __ffs(left) - 1;
            for (uint32_t left = evictable; left != 0; left &= left - 1, ++n)
                smem_.evictable_keys[n] = first + __ffs(left) - 1;
            equal_before[kWindow] += equal_total & 0xffff, equal_before[kStaying] += equal_total >> 16;
            staying_ += total & 0xffff, evictable_ += total >> 16;
        });
        __syncthreads();
    }

    // Finds the row that evicts each evictable and each new key.
    __device__ void find_eviction_rows() {
        const int i = threadIdx.x % kRows;
        uint32_t order = 0;
        if (threadIdx.x < kRows) {
            const int key = first_key_ + i;
            bool may_enter = false;
            if (i < rows_ && key >= 0 && key < keys_) {
                const Bits bits = *biases_.at(key);
                found_nan_ = is_nan<kType>(bits);
                order = rank_of_bias<kType>(bits);
                // The smallest key of a full window never decreases.
                may_enter = order > 0 && (before_ < window_ || order >= searches_[kWindow].threshold);
            }
            const uint32_t ballot = __ballot_sync(~0u, may_enter);
            if (lane_id() == 0) smem_.ballots[warp_id()] = ballot;
        } else if (threadIdx.x < 2 * kRows) {
            smem_.evictable[i] = i < evictable_ ? rank_of_bias<kType>(*biases_.at(smem_.evictable_keys[i])) : 0;
        }
        __syncthreads();
        int before = 0;
#pragma unroll
        for (int w = 0; w < kRowWords; ++w) {
            const uint32_t word = smem_.ballots[w];
            if (threadIdx.x < kRows && w == warp_id() && (word >> lane_id() & 1) != 0)
                smem_.added[before + rank_in(word)] = {order, i};
            before += __popc(word);
        }
        added_ = before;
        __syncthreads();

        // On ties the later key is larger. New keys are later than evictable ones.
        const int free_slots = window_ - staying_, n = threadIdx.x / kThreadsPerKey;
        static_assert(kThreads == kRows * kThreadsPerKey);
        const bool is_leader = threadIdx.x % kThreadsPerKey == 0;
        const uint32_t evictable = smem_.evictable[n];
        const int left = free_slots - count_larger(evictable, n);
        if (is_leader && n < evictable_)
            smem_.evictable_evicted[n] = left > added_ ? kRows : find_eviction_row(evictable, 0, left);
        if (n - lane_id() / kThreadsPerKey < added_) {  // a warp at a time
            const AddedKey added = smem_.added[min(n, added_ - 1)];
            int slots = free_slots - count_larger(added.order, kRows);
            if (is_leader && n < added_) {
                for (int earlier = 0; earlier < n; ++earlier)
                    if (smem_.added[earlier].order > added.order) --slots;
                smem_.added_evicted[n] = slots > 0 ? find_eviction_row(added.order, n + 1, slots) : added.row;
            }
        }
        __syncthreads();
    }

    // The number of evictable keys that are larger than the n-th one, of this order. kThreadsPerKey threads share the
    // work; a warp calls.
    __device__ int count_larger(uint32_t order, int n) const {
        int larger = 0;
#pragma unroll
        for (int i = 0; i < kRows; i += 4 * kThreadsPerKey) {
            const int first = i + static_cast<int>(threadIdx.x) % kThreadsPerKey * 4;
            const uint4 words = *reinterpret_cast<const uint4*>(smem_.evictable + first);
            const uint32_t orders[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) larger += orders[j] >= order + (first + j > n ? 0 : 1) ? 1 : 0;
        }
#pragma unroll
        for (int lanes = 1; lanes < kThreadsPerKey; lanes *= 2) larger += __shfl_xor_sync(~0u, larger, lanes);
        return larger;
    }

    // The row of the `count`-th new key, from number `first` on, that is larger than an earlier key of this order;
    // kRows where there are fewer.
    __device__ int find_eviction_row(uint32_t order, int first, int count) const {
        for (int i = first; i < added_; ++i)
            if (smem_.added[i].order >= order && --count == 0) return smem_.added[i].row;
        return kRows;
    }

    // Rows [begin, end) of the m_block.
    __device__ uint4 row_bits(int begin, int end) const {
        end = min(end, rows_);
        return {bits_between(begin, end, 0), bits_between(begin, end, 1), bits_between(begin, end, 2),
                bits_between(begin, end, 3)};
    }

    template <typename RowOf>
    __device__ void write_entry(const MBlockList<Bits>& list, int at, int key, const uint4& rows, const RowOf& row_of) {
        list.keys[at] = row_of(key);
        list.biases[at] = *biases_.at(key);
        list.rows[at] = rows;
    }

    // The staying keys come first: most n_blocks then need no mask.
    template <typename RowOf>
    __device__ void write_window(const MBlockList<Bits>& list, const RowOf& row_of) {
        for (int at = threadIdx.x; at < staying_; at += kThreads) {
            const int key = at < kStagedKeys ? smem_.staying[at] : list.keys[at];
            write_entry(list, at, key, row_bits(0, rows_), row_of);
        }
        const int n = threadIdx.x;
        if (n < evictable_)
            write_entry(list, staying_ + n, smem_.evictable_keys[n], row_bits(0, smem_.evictable_evicted[n]), row_of);
    }

    // Appends the new keys that a row sees, and the padding. Returns the length without padding.
    template <typename RowOf>
    __device__ int append_new_keys(const MBlockList<Bits>& list, const RowOf& row_of) {
        const int n = threadIdx.x, row = n < added_ ? smem_.added[n].row : 0;
        const bool is_seen = n < added_ && smem_.added_evicted[n] > row;
        const uint32_t ballot = __ballot_sync(~0u, is_seen);
        if (n < kRows && lane_id() == 0) smem_.ballots[warp_id()] = ballot;
        __syncthreads();
        int length = staying_ + evictable_, at = length + rank_in(ballot);
#pragma unroll
        for (int w = 0; w < kRowWords; ++w) {
            const int count = __popc(smem_.ballots[w]);
            if (w < warp_id()) at += count;
            length += count;
        }
        if (is_seen) write_entry(list, at, first_key_ + row, row_bits(row, smem_.added_evicted[n]), row_of);
        if (length + n < static_cast<int>(KeyListsView::padded(length))) list.keys[length + n] = -1;
        return length;
    }

    const Biases& biases_;
    const int first_key_, rows_, keys_, window_;
    const int before_;  // keys before the m_block's
    SharedStorage& smem_;
    int per_thread_;  // keys of a thread in a load
    Group<kType> groups_[kGroups];
    bool is_held_ = false;  // all keys are in groups_
    Search searches_[kSearches];
    int staying_ = 0, evictable_ = 0, added_ = 0;
    int buffer_ = 0;
    uint32_t nans_ = 0;
    bool found_nan_ = false;
};

}  // namespace flash_dmattn::cuda
