// Top-k selection for many query rows: radix select from a key bias straight to the key list of an m_block, with row
// bits. A CTA has an m_block.
//
// The window of a row has the w largest keys up to the row's own. Each row adds its key to the window of the row before
// and, if there are more than w, evicts the smallest. So of the window before an m_block of n rows only the n smallest
// keys can be evicted (evictable), and the others stay for all rows. Radix select finds both ends of the evictable keys
// in the same passes over the biases. Then a row sees an evictable or new key if fewer keys than there are places beside
// the staying ones are larger, among the evictable keys and the new keys up to the row.
#pragma once

#include <climits>

#include "cuda/mask/bits.cuh"
#include "order_group.cuh"

namespace flash_dmattn::cuda {

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
public:
    using Bits = typename FloatBits<kType>::Bits;
    static constexpr int kThreads = 1024;

private:
    static constexpr int kWarps = kThreads / 32, kRows = static_cast<int>(KeyListsView::kRows);
    static constexpr int kRowWords = kRows / 32;
    static constexpr int kGroups = sizeof(Bits) == 2 ? 4 : 2;  // of a thread
    static constexpr int kDigits = sizeof(Bits) * 8 / kDigit;
    static_assert(kWarps == 32, "a lane for each warp's sum");
    static_assert(kGroups * kGroup <= 32, "a bit for each key of a thread");

    // The `wanted` largest of the keys before the m_block: those above `threshold`, and the last `wanted` of the `equal`
    // keys equal to it. No masked key is wanted.
    struct Search {
        uint32_t threshold;
        int wanted, equal;
    };
    enum { kWindow, kStaying, kSearches };
    struct AddedKey {
        uint32_t order;
        int row;
    };
    static constexpr int kStaged = kSearches * DigitHistogram::kWords;
    static constexpr int kParts = 8;  // threads that compare a key with the evictable ones

public:
    struct SharedStorage {
        union {
            uint32_t histograms[kSearches * DigitHistogram::kWords];
            int window[kStaged];  // the first keys of the window; the list has the others
        };
        uint32_t totals[kSearches][kBins];
        Search searches[kSearches];
        uint32_t warp_sums[2][kWarps];
        alignas(16) uint32_t evictable[kRows];  // orders
        int evictable_at[kRows];                // positions in the list
        AddedKey added[kRows];                  // the new keys that may enter the window
        int evictable_end[kRows], added_end[kRows];
        uint32_t enters[kRowWords];  // bit i % 32 of word i / 32: new key i
    };

    // The m_block has `rows` rows, of the keys first_key, first_key + 1, .., below `keys`. first_key may be negative:
    // rows without keys.
    __device__ MBlockSelector(const Biases& biases, int first_key, int rows, int keys, int window, SharedStorage& smem)
        : biases_(biases), first_key_(first_key), rows_(rows), keys_(keys), window_(window),
          before_(min(max(first_key, 0), keys)), smem_(smem) {
        per_thread_ = min(ceil_div(before_, kThreads * kGroup), kGroups) * kGroup;
    }

    // Writes the list, with id_of(key) for each key. Returns its length, without padding. All threads call.
    template <typename IdOf>
    __device__ int run(const MBlockList<Bits>& list, const IdOf& id_of) {
        find_thresholds();
        write_window(list);
        find_ends(list);
        return finish(list, id_of);
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

    // Where the thresholds have the same digits so far, both searches use the first histogram.
    template <int kShift>
    __device__ void count_digit() {
        const DigitHistogram histogram(smem_.histograms);
        histogram.clear(kThreads);
        DigitHistogram(smem_.histograms + DigitHistogram::kWords).clear(kThreads);
        __syncthreads();
        for_each_load([&](int) {
            for_each_group([&](const Group<kType>& group, int) {
                group.template count<kShift>(histogram, searches_[kWindow].threshold, searches_[kStaying].threshold);
            });
        });
        __syncthreads();
        static_assert(kThreads >= kSearches * kBins);
        const int search = threadIdx.x / kBins, bin = threadIdx.x % kBins;
        if (search < kSearches)
            smem_.totals[search][bin] = DigitHistogram(smem_.histograms + search * DigitHistogram::kWords).sum(bin);
        __syncthreads();
    }

    // Adds to each threshold the largest digit such that at least `wanted` keys have it or a larger one.
    __device__ void choose_digit(int shift) {
        const int s = warp_id();
        if (s < kSearches) {
            Search search = searches_[kStaying];
            if (s == kWindow) search = searches_[kWindow];
            const bool is_shared = searches_[kWindow].threshold == searches_[kStaying].threshold;
            const uint32_t* totals = smem_.totals[is_shared ? 0 : s];
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

    struct Bitmap {
        uint32_t above = 0, equal = 0;
    };
    // Bit i: this thread's key i is above the threshold of a search, or equal to it.
    __device__ Bitmap compare(const Search& search) {
        Bitmap bits;
        for_each_group([&](const Group<kType>& group, int first) {
            const auto of_group = group.compare(search.threshold);
            bits.above |= of_group.above << first;
            bits.equal |= of_group.equal << first;
        });
        return bits;
    }
    // The largest keys of a search, where the sequence has `before` equal ones before this thread's.
    __device__ static uint32_t largest(const Search& search, Bitmap bits, int before) {
        int skipped = search.equal - search.wanted - before;
        if (skipped >= __popc(bits.equal)) return bits.above;
        for (; skipped > 0; --skipped) bits.equal &= bits.equal - 1;
        return bits.above | bits.equal;
    }

    __device__ int key_at(const MBlockList<Bits>& list, int at) const {
        return at < kStaged ? smem_.window[at] : list.keys[at];
    }

    // Writes the window's keys, and finds which of them are evictable.
    __device__ void write_window(const MBlockList<Bits>& list) {
        int equal_before[kSearches] = {};
        for_each_load([&](int first) {
            const Bitmap of_window = compare(searches_[kWindow]), of_staying = compare(searches_[kStaying]);
            uint32_t equal_total, total;
            const uint32_t equal = exclusive_sum(__popc(of_window.equal) | __popc(of_staying.equal) << 16, equal_total);
            const uint32_t window =
                largest(searches_[kWindow], of_window, equal_before[kWindow] + static_cast<int>(equal & 0xffff));
            const uint32_t evictable = window & ~largest(searches_[kStaying], of_staying,
                                                         equal_before[kStaying] + static_cast<int>(equal >> 16));
            const uint32_t before = exclusive_sum(__popc(window) | __popc(evictable) << 16, total);
            int at = listed_ + static_cast<int>(before & 0xffff), number = evictable_ + static_cast<int>(before >> 16);
            for (uint32_t left = window; left != 0; left &= left - 1) {
                (at < kStaged ? smem_.window : list.keys)[at] = first + __ffs(left) - 1;
                if ((evictable & left & -left) != 0) smem_.evictable_at[number++] = at;
                ++at;
            }
            equal_before[kWindow] += equal_total & 0xffff, equal_before[kStaying] += equal_total >> 16;
            listed_ += total & 0xffff, evictable_ += total >> 16;
        });
        __syncthreads();
    }

    // Finds the row at which each evictable and each new key is evicted.
    __device__ void find_ends(const MBlockList<Bits>& list) {
        const int i = threadIdx.x % kRows;
        uint32_t order = 0;
        if (threadIdx.x < kRows) {
            const int key = first_key_ + i;
            bool may_enter = false;
            if (i < rows_ && key >= 0 && key < keys_) {
                const Bits bits = *biases_.at(key);
                found_nan_ = is_nan<kType>(bits);
                order = rank_of_bias<kType>(bits);
                // A full window only grows: smaller keys never enter it.
                may_enter = order > 0 && (before_ < window_ || order >= searches_[kWindow].threshold);
            }
            const uint32_t ballot = __ballot_sync(~0u, may_enter);
            if (lane_id() == 0) smem_.enters[warp_id()] = ballot;
        } else if (threadIdx.x < 2 * kRows) {
            smem_.evictable[i] =
                i < evictable_ ? rank_of_bias<kType>(*biases_.at(key_at(list, smem_.evictable_at[i]))) : 0;
        }
        __syncthreads();
        int before = 0;
#pragma unroll
        for (int w = 0; w < kRowWords; ++w) {
            const uint32_t word = smem_.enters[w];
            if (threadIdx.x < kRows && w == warp_id() && (word >> lane_id() & 1) != 0)
                smem_.added[before + rank_in(word)] = {order, i};
            before += __popc(word);
        }
        added_ = before;
        __syncthreads();

        // On ties the later key is larger. New keys are later than evictable ones.
        const int places = window_ - (listed_ - evictable_);
        for (int n = threadIdx.x / kParts; n < kRows; n += kThreads / kParts) {
            const uint32_t key = smem_.evictable[n];
            const int left = places - count_larger(key, n);
            const bool is_one = n < evictable_ && threadIdx.x % kParts == 0;
            if (is_one) smem_.evictable_end[n] = left > added_ ? kRows : find_end(key, 0, left);
        }
        for (int n = threadIdx.x / kParts; n - lane_id() / kParts < added_; n += kThreads / kParts) {
            const AddedKey key = smem_.added[min(n, added_ - 1)];
            int left = places - count_larger(key.order, kRows);
            if (n >= added_ || threadIdx.x % kParts != 0) continue;
            for (int earlier = 0; earlier < n; ++earlier) left -= smem_.added[earlier].order > key.order ? 1 : 0;
            smem_.added_end[n] = left > 0 ? find_end(key.order, n + 1, left) : key.row;
        }
        __syncthreads();
    }

    // The number of evictable keys that are larger than the n-th one, of order `key`. kParts threads share the work; a
    // warp calls.
    __device__ int count_larger(uint32_t key, int n) const {
        int larger = 0;
#pragma unroll
        for (int i = 0; i < kRows; i += 4 * kParts) {
            const int first = i + static_cast<int>(threadIdx.x) % kParts * 4;
            const uint4 words = *reinterpret_cast<const uint4*>(smem_.evictable + first);
            const uint32_t orders[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) larger += orders[j] >= key + (first + j > n ? 0 : 1) ? 1 : 0;
        }
#pragma unroll
        for (int lanes = 1; lanes < kParts; lanes *= 2) larger += __shfl_xor_sync(~0u, larger, lanes);
        return larger;
    }

    // The row of the `count`-th new key, from number `first` on, that is larger than an earlier key of this order; kRows
    // where there are fewer.
    __device__ int find_end(uint32_t order, int first, int count) const {
        for (int i = first; i < added_; ++i)
            if (smem_.added[i].order >= order && --count == 0) return smem_.added[i].row;
        return kRows;
    }

    // Rows [begin, end) of the m_block.
    __device__ uint4 row_bits(int begin, int end) const {
        end = min(end, rows_);
        return {bits_below(end, 0) & ~bits_below(begin, 0), bits_below(end, 1) & ~bits_below(begin, 1),
                bits_below(end, 2) & ~bits_below(begin, 2), bits_below(end, 3) & ~bits_below(begin, 3)};
    }

    // Adds the new keys and the padding, row bits and biases, and replaces keys by their ids.
    template <typename IdOf>
    __device__ int finish(const MBlockList<Bits>& list, const IdOf& id_of) {
        refuse_nan(found_nan_ || Group<kType>::has_nan(nans_));
        const auto put = [&](int at, int key, const uint4& rows) {
            list.keys[at] = id_of(key);
            list.biases[at] = *biases_.at(key);
            list.rows[at] = rows;
        };
        const int n = threadIdx.x, row = n < added_ ? smem_.added[n].row : 0;
        const bool is_listed = n < added_ && smem_.added_end[n] > row;
        const uint32_t ballot = __ballot_sync(~0u, is_listed);
        if (n < kRows && lane_id() == 0) smem_.enters[warp_id()] = ballot;
        for (int at = threadIdx.x; at < listed_; at += kThreads) put(at, key_at(list, at), row_bits(0, rows_));
        __syncthreads();
        if (n < evictable_) list.rows[smem_.evictable_at[n]] = row_bits(0, smem_.evictable_end[n]);
        int at = listed_ + rank_in(ballot), length = listed_;
#pragma unroll
        for (int w = 0; w < kRowWords; ++w) {
            const int count = __popc(smem_.enters[w]);
            if (w < warp_id()) at += count;
            length += count;
        }
        if (is_listed) put(at, first_key_ + row, row_bits(row, smem_.added_end[n]));
        const int padded = static_cast<int>(KeyListsView::padded(length));
        if (length + n < padded) list.keys[length + n] = -1;
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
    int listed_ = 0, evictable_ = 0, added_ = 0;
    int buffer_ = 0;
    uint32_t nans_ = 0;
    bool found_nan_ = false;
};

}  // namespace flash_dmattn::cuda
