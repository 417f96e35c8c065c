// Top-k selection in a decoding kernel: the `window` keys of largest bias of one sequence and KV head, among the CTAs
// of a cluster. Each CTA has a contiguous share of the keys, each of its warps a contiguous segment of that.
//
// A CTA keeps the high 16 bits of the order-preserving integers of its biases in shared memory. The w-th largest is
// found digit by digit: every CTA sends its histogram to all CTAs. float32 has two more digits, for which keys that
// match the first two are read again from memory. Then each warp compacts its segment in place to the offsets of its
// selected keys. The selected keys of all segments in order are those of the sequence. Each CTA reads those of its
// splits (DecodeSplits) through DSMEM, wherever they are.
#pragma once

#include "cuda/kvcache/cache.cuh"
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/mask/bits.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// The order-preserving integer of a bias, of 32 bits: a 16-bit bias is in its high half.
template <DataType kType>
__device__ __forceinline__ uint32_t decode_order(typename FloatBits<kType>::Bits bits) {
    return uint32_t{order_of<kType>(bits)} << (32 - 8 * sizeof(bits));
}

// kHalf: the dtype of biases that are not float32. kPlain: DecodeArgs::is_plain.
template <DataType kHalf, int kWarps, bool kPlain>
class DecodeSelector {
    static constexpr int kThreads = kWarps * 32, kStep = kThreads * kDecodeGroup;
    static constexpr int kHighestDigit = 3;  // of orders of 32 bits
    static_assert(kDecodeGroup == kGroup, "Group holds that many keys");

public:
    __device__ DecodeSelector(const DecodeArgs& p, const KvCache& cache, DecodeSharedStorage& smem, uint16_t* orders,
                              uint32_t* histograms, int rank)
        : p_(p), cache_(cache), smem_(smem), orders_(orders), histogram_(histograms),
          received_(histograms + DigitHistogram::kWords), cluster_(p.cluster), rank_(rank) {
        share_ = decode_share(cache.keys, cluster_);
        begin_ = min(rank * share_, cache.keys);
        keys_ = min(share_, cache.keys - begin_);
        segment_ = decode_segment(share_, kWarps);
    }

    // Starts to bring this CTA's biases to L2, where they are contiguous. One thread calls.
    __device__ void prefetch() const {
        if (!reads_vectors() || p_.block_table != nullptr) return;
        is_float() ? prefetch_biases<DataType::kFloat32>() : prefetch_biases<kHalf>();
    }

    // Selects, and writes the keys of this CTA's splits to `list`. Returns the number of selected keys in all CTAs. All
    // threads of the cluster call.
    __device__ int run(int* list, const DecodeSplits& splits) {
        if (threadIdx.x < 2) mbarrier_init(histogram_ready(threadIdx.x), 1);
        if (cluster_ > 1) cluster_arrive_relaxed();  // the others may send their histograms
        clear_histogram();
        is_float() ? load<DataType::kFloat32>() : load<kHalf>();
        if (cluster_ > 1) cluster_wait();
        int wanted = static_cast<int>(p_.window_size), shift = kHighestDigit * kDigit;
        threshold_ = 0;
#pragma unroll 1
        while (true) {
            send_histogram(shift / kDigit);
            choose_digit(shift, wanted);
            if (shift == 0 || (shift == 16 && (!is_float() || (threshold_ | 0xffff) <= masked()))) break;
            shift -= kDigit;
            clear_histogram();
            count(shift);
        }
        divide_equal(shift / kDigit, wanted);
        compact();
        refuse_nan(found_nan_);
        cluster_barrier();
        return read_list(list, splits);
    }

    __device__ void cluster_barrier() const {
        if (cluster_ > 1) return cluster_sync();
        __syncthreads();
    }

private:
    // The order of the largest bias that masks its key.
    __device__ uint32_t masked() const {
        return is_float() ? kMaskedOrder<DataType::kFloat32> : uint32_t{kMaskedOrder<kHalf>} << 16;
    }
    __device__ bool is_float() const { return !kPlain && p_.bias_cache.dtype == DataType::kFloat32; }

    // Whether neighbouring biases are read 16 bytes at a time.
    __device__ bool reads_vectors() const { return kPlain || p_.has_vector_bias; }
    // This CTA's keys in the cache.
    __device__ int cached_keys() const { return max(min(keys_, cache_.cached_keys() - begin_), 0); }

    template <DataType kType>
    __device__ void prefetch_biases() const {
        using Bits = typename FloatBits<kType>::Bits;
        const int keys = cached_keys() / kDecodeGroup * kDecodeGroup;
        if (keys > 0) prefetch_l2(cache_.template cached_row_of<Bits>(p_.bias_cache, begin_), keys * sizeof(Bits));
    }

    template <DataType kType>
    __device__ uint32_t order_at(int at) const {
        using Bits = typename FloatBits<kType>::Bits;
        return decode_order<kType>(__ldcg(cache_.template row_of<Bits>(p_.bias_cache, p_.bias, begin_ + at)));
    }

    // Reads the biases of this CTA, stores the high halves of their orders and counts the first digit.
    template <DataType kType>
    __device__ void load() {
        using Bits = typename FloatBits<kType>::Bits;
        const int cached = cached_keys();
        const int done = reads_vectors() ? cached / kDecodeGroup * kDecodeGroup : cached;
        const bool is_paged = p_.block_table != nullptr;
        if (reads_vectors()) {
            is_paged ? load_vectors<kType, true>(done) : load_vectors<kType, false>(done);
        } else {
            is_paged ? load_rows<kType, true>(done) : load_rows<kType, false>(done);
        }
#pragma unroll 1
        for (int at = done + threadIdx.x; at < keys_; at += kThreads) {
            const Bits bits = __ldcg(cache_.template row_of<Bits>(p_.bias_cache, p_.bias, begin_ + at));
            found_nan_ |= is_nan<kType>(bits);
            const uint32_t order = decode_order<kType>(bits);
            orders_[at] = static_cast<uint16_t>(order >> 16);
            histogram_.add(order >> 24);
        }
        // Positions without a key are below all visible ones: whether they are counted makes no difference.
#pragma unroll 1
        for (int at = keys_ + threadIdx.x; at < segment_ * kWarps; at += kThreads) orders_[at] = 0;
    }

    // The first `keys` of this CTA's keys with any strides. Neighbouring lanes read neighbouring keys: where the heads
    // of a key are contiguous, a warp reads each sector once. All loads of a step are in flight together.
    template <DataType kType, bool kPaged>
    __device__ __forceinline__ void load_rows(int keys) {
        using Bits = typename FloatBits<kType>::Bits;
        constexpr int kGroups = 2, kPerWord = 4 / sizeof(Bits);
        const int64_t stride = p_.bias_cache.row_stride;
        const Bits* const begin = kPaged ? nullptr : cache_.template cached_row_of<Bits>(p_.bias_cache, begin_);
        uint32_t nans = 0;
#pragma unroll 1
        for (int first = threadIdx.x; first < keys; first += kGroups * kStep) {
            uint32_t biases[kGroups][kDecodeGroup / kPerWord] = {};
#pragma unroll
            for (int i = 0; i < kGroups * kDecodeGroup; ++i) {
                const int at = min(first + i * kThreads, keys - 1);
                const Bits* from =
                    kPaged ? cache_.template cached_row_of<Bits>(p_.bias_cache, begin_ + at) : begin + at * stride;
                biases[i / kDecodeGroup][i % kDecodeGroup / kPerWord] |= uint32_t{__ldcg(from)} << i % kPerWord * 16;
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                uint32_t words[kDecodeGroup / 2];
                to_high_orders<kType>(biases[g], words, nans);
#pragma unroll
                for (int i = 0; i < kDecodeGroup; ++i) {
                    const int at = first + (g * kDecodeGroup + i) * kThreads;
                    const uint32_t order = words[i / 2] >> i % 2 * 16;
                    if (at < keys) orders_[at] = static_cast<uint16_t>(order);
                    histogram_.add(at < keys ? order >> 8 & (kBins - 1) : kBins);
                }
            }
        }
        found_nan_ |= Group<kType>::has_nan(nans);
    }

    // The high halves of the orders of eight biases, two in a word.
    template <DataType kType, int kWords>
    __device__ static void to_high_orders(const uint32_t (&biases)[kWords], uint32_t (&words)[kDecodeGroup / 2],
                                          uint32_t& nans) {
        if constexpr (kType == DataType::kFloat32) {
#pragma unroll
            for (int i = 0; i < kDecodeGroup / 2; ++i) {
                const uint32_t low = biases[2 * i], high = biases[2 * i + 1];
                Group<kType>::propagate_nan(low, nans);
                Group<kType>::propagate_nan(high, nans);
                words[i] = __byte_perm(decode_order<kType>(low), decode_order<kType>(high), 0x7632);
            }
        } else {
            Group<kType> group{{biases[0], biases[1], biases[2], biases[3]}};
            group.to_orders(nans);
#pragma unroll
            for (int i = 0; i < kDecodeGroup / 2; ++i) words[i] = group.words[i];
        }
    }

    // The first `keys` of this CTA's keys, eight of a thread at a time.
    template <DataType kType, bool kPaged>
    __device__ void load_vectors(int keys) {
        constexpr int kInFlight = 4;
        uint32_t nans = 0;
        int at = threadIdx.x * kDecodeGroup;
#pragma unroll 1
        for (; at + (kInFlight - 1) * kStep < keys; at += kInFlight * kStep)
            load_groups<kType, kPaged, kInFlight>(at, nans);
#pragma unroll 1
        for (; at < keys; at += kStep) load_groups<kType, kPaged, 1>(at, nans);
        found_nan_ |= Group<kType>::has_nan(nans);
    }

    template <DataType kType, bool kPaged, int kInFlight>
    __device__ __forceinline__ void load_groups(int at, uint32_t& nans) {
        using Bits = typename FloatBits<kType>::Bits;
        constexpr int kParts = kDecodeGroup * sizeof(Bits) / 16;
        const Bits* const begin = kPaged ? nullptr : cache_.template cached_row_of<Bits>(p_.bias_cache, begin_);
        const Bits* from[kInFlight];
        uint4 parts[kInFlight][kParts];
#pragma unroll
        for (int g = 0; g < kInFlight; ++g) {
            const int key = at + g * kStep;
            from[g] = kPaged ? cache_.template cached_row_of<Bits>(p_.bias_cache, begin_ + key) : begin + key;
        }
#pragma unroll
        for (int g = 0; g < kInFlight; ++g)
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                parts[g][part] = load_global_16(reinterpret_cast<const uint4*>(from[g]) + part);
#pragma unroll
        for (int g = 0; g < kInFlight; ++g) {
            uint32_t biases[kParts * 4], words[kDecodeGroup / 2];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const uint4& x = parts[g][part];
                biases[part * 4] = x.x, biases[part * 4 + 1] = x.y, biases[part * 4 + 2] = x.z,
                              biases[part * 4 + 3] = x.w;
            }
            to_high_orders<kType>(biases, words, nans);
            *reinterpret_cast<uint4*>(orders_ + at + g * kStep) = {words[0], words[1], words[2], words[3]};
#pragma unroll
            for (const uint32_t word : words) histogram_.add_high_bytes(word);
        }
    }

    // Counts the digit at bit `shift`, at most 16, of the orders that match threshold_ above it.
    __device__ void count(int shift) {
        const uint32_t limit = threshold_ >> 16;
        if (kPlain || shift == 16) {
            for_each_group([&](int, const uint32_t (&words)[kScanGroup / 2]) {
#pragma unroll
                for (const uint32_t word : words) histogram_.add_low_bytes(word, limit);
            });
            return;
        }
        for_each_group([&](int at, const uint32_t (&words)[kScanGroup / 2]) {
            for (uint32_t left = equal_to(words, limit); left != 0; left &= left - 1) {
                const uint32_t order = order_at<DataType::kFloat32>(at + __ffs(left) - 1);
                histogram_.add(min((order ^ threshold_) >> shift, uint32_t{kBins}));
            }
        });
    }

    // Calls visit(position of the first key, orders) for groups of 16 keys, by a warp in its segment.
    template <typename Visit>
    __device__ __forceinline__ void for_each_group(const Visit& visit) const {
        const int first = warp_id() * segment_ + lane_id() * kScanGroup;
#pragma unroll 1
        for (int at = first; at < first + segment_; at += 32 * kScanGroup) {
            uint32_t words[kScanGroup / 2];
#pragma unroll
            for (int i = 0; i < kScanGroup / 8; ++i) {
                const uint4 x = reinterpret_cast<const uint4*>(orders_ + at)[i];
                words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
            }
            visit(at, words);
        }
    }

    // Bit i: order i >= limit, which is not 0; order i == limit.
    __device__ __forceinline__ static uint32_t at_least(const uint32_t (&words)[kScanGroup / 2], uint32_t limit) {
        const uint32_t below = (limit - 1) * 0x10001;
        return nonzero_halves([&](int i) { return __vmaxu2(words[i], below) - below; });
    }
    __device__ __forceinline__ static uint32_t equal_to(const uint32_t (&words)[kScanGroup / 2], uint32_t limit) {
        return nonzero_halves([&](int i) { return words[i] ^ limit * 0x10001; }) ^ ((1u << kScanGroup) - 1);
    }
    template <typename Word>
    __device__ __forceinline__ static uint32_t nonzero_halves(const Word& word) {
        static_assert(kScanGroup == 16);
        uint32_t low_and_high = 0;  // bits 2 i and 2 i + 16: the halves of word i
#pragma unroll
        for (int i = 0; i < kScanGroup / 2; ++i) low_and_high |= __vminu2(word(i), 0x10001) << 2 * i;
        return (low_and_high & 0xffff) | low_and_high >> 15;
    }

    __device__ void clear_histogram() const {
        histogram_.clear(kThreads);
        __syncthreads();
    }
    __device__ uint32_t histogram_ready(int digit) const { return smem_address(&smem_.histogram_ready[digit % 2]); }
    // The histogram that a CTA has sent. No CTA is more than one digit ahead of another: the memory is reused for the
    // digit after the next.
    __device__ uint32_t* received_histogram(int digit, int cta) const {
        return received_ + kBins * (digit % 2 * cluster_ + cta);
    }
    __device__ void send_histogram(int digit) const {
        static_assert(kThreads >= kBins);
        __syncthreads();  // all have counted
        if (threadIdx.x == 0) mbarrier_arrive_and_expect_tx(histogram_ready(digit), cluster_ * kBins * 4);
        const int bin = threadIdx.x;
        if (bin >= kBins) return;
        const uint32_t sum = histogram_.sum(bin);
        const uint32_t to = smem_address(received_histogram(digit, rank_) + bin);
#pragma unroll 4
        for (int cta = 0; cta < cluster_; ++cta)
            store_dsmem_async(map_to_cta(to, cta), sum, map_to_cta(histogram_ready(digit), cta));
    }

    // Adds to threshold_ the largest digit such that at least `wanted` keys have it or a larger one, and takes those
    // with a larger one off `wanted`. Masked keys have the lowest orders.
    __device__ void choose_digit(int shift, int& wanted) {
        const int digit = shift / kDigit;
        mbarrier_wait(histogram_ready(digit), (kHighestDigit - digit) / 2);
        if (threadIdx.x < kBins) {
            uint32_t sum = 0;
#pragma unroll 4
            for (int cta = 0; cta < cluster_; ++cta) sum += received_histogram(digit, cta)[threadIdx.x];
            smem_.histogram[threadIdx.x] = sum;
        }
        __syncthreads();
        constexpr int kBinsOfLane = kBins / 32;
        const int first = (31 - lane_id()) * kBinsOfLane;  // lane 0 has the highest
        int bins[kBinsOfLane], of_lane = 0;
#pragma unroll
        for (int i = 0; i < kBinsOfLane; ++i) bins[i] = static_cast<int>(smem_.histogram[first + i]);
#pragma unroll
        for (int i = 0; i < kBinsOfLane; ++i) of_lane += bins[i];
        const int upto = warp_inclusive_sum(of_lane);
        int above = upto - of_lane, bin = first;
#pragma unroll
        for (int i = kBinsOfLane - 1; i > 0; --i) {
            if (bin == first && above + bins[i] >= wanted) bin = first + i;
            if (bin == first) above += bins[i];
        }
        const int lane = __ffs(__ballot_sync(~0u, upto >= wanted)) - 1;
        threshold_ |= static_cast<uint32_t>(__shfl_sync(~0u, bin, lane)) << shift;
        wanted -= __shfl_sync(~0u, above, lane);
    }

    // The last `wanted` of the sequence's keys that are equal to threshold_ are selected, or none where these are
    // masked. Finds how many this CTA skips. `digit`: the last one.
    __device__ void divide_equal(int digit, int wanted) {
        if (threshold_ <= masked()) {
            threshold_ = masked();
            skipped_ = share_;
            return;
        }
        int equal = 0;  // in CTA `lane`
        if (lane_id() < cluster_)
            equal = static_cast<int>(received_histogram(digit, lane_id())[threshold_ >> digit * kDigit & (kBins - 1)]);
        const int own = __shfl_sync(~0u, equal, rank_);
        const int later = __reduce_add_sync(~0u, lane_id() > rank_ ? equal : 0);
        const int selected = min(max(wanted - later, 0), own);
        skipped_ = own - selected;
        is_divided_ = selected > 0 && skipped_ > 0;
    }

    // Returns the bits of `matches`, whose high halves equal threshold_'s, of orders above threshold_ (is_above) or equal
    // to it.
    __device__ uint32_t refine(int at, uint32_t matches, bool is_above) const {
        if (!is_float()) return is_above ? 0 : matches;
        uint32_t refined = 0;
#pragma unroll 1
        for (uint32_t left = matches; left != 0; left &= left - 1) {
            const uint32_t order = order_at<DataType::kFloat32>(at + __ffs(left) - 1);
            if (is_above ? order > threshold_ : order == threshold_) refined |= left & -left;
        }
        return refined;
    }

    // The numbers of keys equal to threshold_ in this CTA's segments before the warp's, and in the warp's own.
    struct EqualKeys {
        int before = 0, own = 0;
    };
    __device__ EqualKeys count_equal() {
        EqualKeys equal;
        for_each_group([&](int at, const uint32_t (&words)[kScanGroup / 2]) {
            equal.own += __popc(refine(at, equal_to(words, threshold_ >> 16), false));
        });
        equal.own = __reduce_add_sync(~0u, equal.own);
        if (lane_id() == 0) smem_.equal_counts[warp_id()] = equal.own;
        __syncthreads();
        for (int warp = 0; warp < warp_id(); ++warp) equal.before += smem_.equal_counts[warp];
        return equal;
    }

    // Replaces the orders of a segment by the offsets of its selected keys.
    __device__ void compact() {
        const uint32_t limit = threshold_ >> 16;
        // Orders of at least `lowest` are selected; with `divides` those equal to it are tested further.
        uint32_t lowest = limit;
        bool divides = is_float();
        int skipped = skipped_;
        if (is_divided_) {
            const EqualKeys equal = count_equal();
            skipped -= equal.before;
            divides |= skipped > 0 && skipped < equal.own;
        }
        if (!divides && skipped > 0) ++lowest;
        int selected_before = 0, equal_before = 0;
        uint16_t* list = orders_ + warp_id() * segment_;
        for_each_group([&](int at, const uint32_t (&words)[kScanGroup / 2]) {
            uint32_t selected = at_least(words, lowest);
            if (divides) {
                const uint32_t matches = equal_to(words, limit), equal = refine(at, matches, false);
                selected = (selected & ~matches) | refine(at, matches, true);
                const int upto = warp_inclusive_sum(__popc(equal));
                int number = equal_before + upto - __popc(equal);
                for (uint32_t left = equal; left != 0; left &= left - 1)
                    if (number++ >= skipped) selected |= left & -left;
                equal_before += __shfl_sync(~0u, upto, 31);
            }
            const int own = __popc(selected);
            const uint32_t lanes = __ballot_sync(~0u, own != 0);  // they have read their groups
            int before = rank_in(lanes), all = __popc(lanes);
            if (__any_sync(~0u, own > 1)) {
                const int upto = warp_inclusive_sum(own);
                before = upto - own, all = __shfl_sync(~0u, upto, 31);
            }
            for (int to = selected_before + before; selected != 0; selected &= selected - 1)
                list[to++] = static_cast<uint16_t>(at - warp_id() * segment_ + __ffs(selected) - 1);
            selected_before += all;
        });
        if (lane_id() == 0) smem_.segment_counts[warp_id()] = selected_before;
    }

    // Fetches the keys of this CTA's splits from all segments. Returns the number of selected keys.
    __device__ int read_list(int* list, const DecodeSplits& splits) {
        const int segments = cluster_ * kWarps;
        if (warp_id() == 0) {
            constexpr int kOfLane = kDecodeSegments / 32;
            int counts[kOfLane], of_lane = 0;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                const int s = lane_id() * kOfLane + i;
                counts[i] = 0;
                if (s < segments)
                    counts[i] = load_dsmem(map_to_cta(smem_address(&smem_.segment_counts[s % kWarps]), s / kWarps));
            }
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) of_lane += counts[i];
            int start = warp_inclusive_sum(of_lane) - of_lane;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                smem_.segment_starts[lane_id() * kOfLane + i] = start;
                start += counts[i];
            }
            if (lane_id() == 31) smem_.segment_starts[kDecodeSegments] = start;
        }
        __syncthreads();
        const int total = smem_.segment_starts[kDecodeSegments];
        const int share = splits.share(total) * splits.per_cta;
        const int first = min(rank_ * share, total), own = min(share, total - first);
        for (int i = threadIdx.x; i < own; i += kThreads) {
            int segment = 0;  // the last one that starts at or before the key
#pragma unroll
            for (int step = kDecodeSegments / 2; step > 0; step /= 2)
                if (smem_.segment_starts[segment + step] <= first + i) segment += step;
            const int at = segment % kWarps * segment_ + first + i - smem_.segment_starts[segment];
            const int cta = segment / kWarps;
            const uint32_t offset = load_dsmem_u16(map_to_cta(smem_address(orders_ + at), cta));
            list[i] = cta * share_ + segment % kWarps * segment_ + static_cast<int>(offset);
        }
        return total;
    }

    const DecodeArgs& p_;
    const KvCache& cache_;
    DecodeSharedStorage& smem_;
    uint16_t* const orders_;
    const DigitHistogram histogram_;  // of this CTA
    uint32_t* const received_;        // the histograms of all CTAs, for even and for odd digits
    const int cluster_, rank_;
    int share_;    // keys of a CTA
    int begin_;    // this CTA's first key
    int keys_;     // and its number of keys
    int segment_;  // positions of a warp
    bool found_nan_ = false;
    uint32_t threshold_;
    int skipped_ = 0;          // of this CTA's keys equal to threshold_, the first ones
    bool is_divided_ = false;  // some, but not all of them are selected
};

}  // namespace flash_dmattn::cuda::sm90
