// Top-k selection in a decoding kernel: the `window` keys of largest bias of one sequence and KV head, among the CTAs
// of a cluster. Each CTA has a contiguous share of the keys, each of its warps a contiguous segment of that.
//
// Most calls select among candidates (candidates.cuh). Otherwise a CTA keeps the high 16 bits of the order-preserving
// integers of its biases in shared memory, and the w-th largest is found digit by digit (digit_exchange.cuh). float32
// has two more digits, for which keys that match the first two are read again from memory. Then each warp compacts its
// segment in place to the offsets of its selected keys.
//
// The selected keys of all segments in order are those of the sequence. Each CTA reads those of its splits
// (DecodeSplits) through DSMEM, wherever they are.
#pragma once

#include "candidates.cuh"
#include "cuda/arch/memory.cuh"

namespace flash_dmattn::cuda::sm90 {

// The order-preserving integer of a bias, of 32 bits: a 16-bit bias is in its high half.
template <DataType kType>
__device__ __forceinline__ uint32_t decode_order(typename FloatBits<kType>::Bits bits) {
    return uint32_t{order_of<kType>(bits)} << (32 - 8 * sizeof(bits));
}

// Stands for DecodeCandidates in kernels that count all keys.
struct NoCandidates {
    template <typename... Args>
    __device__ explicit NoCandidates(const Args&...) {}
};

// kHalf: the dtype of biases that are not float32. kPlain: DecodeArgs::is_plain.
template <DataType kHalf, int kWarps, bool kPlain>
class DecodeSelector {
    static constexpr int kThreads = kWarps * 32, kStep = kThreads * kGroup;
    static constexpr int kHighestDigit = 3;  // of orders of 32 bits
    static constexpr int kInFlight = 4;      // remote loads of a lane
    static_assert(kGroup == kVectorBiases);

public:
    __device__ DecodeSelector(const DecodeArgs& p, const KvCache& cache, DecodeSharedStorage& smem, uint16_t* orders,
                              uint16_t* candidates, uint32_t* histograms, int rank)
        : p_(p), cache_(cache), smem_(smem), orders_(orders), lists_(candidates), cluster_(p.cluster), rank_(rank),
          share_(cache.keys, cache.cached_keys(), p.cluster, kWarps, rank),
          exchange_(smem, histograms, p.cluster, rank), candidates_(p, cache, smem, share_, orders, candidates) {}

    // Initializes mbarriers. Call before start(), and before any load.
    __device__ static void init(DecodeSharedStorage& smem, uint32_t* histograms) {
        DigitExchange<kWarps>::init(smem, histograms);
        if (threadIdx.x == 0) mbarrier_init(smem_address(&smem.counts_ready), 1);
        __syncthreads();
    }

    // Starts to read the biases.
    __device__ void start() {
        if constexpr (kPlain) {
            if (candidates_.is_enabled()) return candidates_.load();
        }
        if (threadIdx.x != 0 || !reads_vectors() || p_.block_table != nullptr) return;
        is_float() ? prefetch_biases<DataType::kFloat32>() : prefetch_biases<kHalf>();
    }

    // Selects, and writes the keys of this CTA's splits to `list`. Returns the number of selected keys in all CTAs. All
    // threads of the cluster call.
    __device__ int run(int* list, const DecodeSplits& splits) {
        exchange_.signal_ready();
        int selected = 0, stride = p_.candidate_capacity;
        bool has_selected = false;
        if constexpr (kPlain) has_selected = candidates_.is_enabled() && candidates_.select(exchange_, selected);
        if (!has_selected) {
            select_among_all();
            refuse_nan(found_nan_);
            selected = compact();
            lists_ = orders_, stride = share_.segment;
        }
        send_count(selected);
        cluster_sync_shared(cluster_);
        return read_list(list, splits, stride);
    }

    // Waits until the list is complete, and until other CTAs have read what the tiles of K and V overwrite.
    __device__ void finish(const DecodeSmemLayout& layout) const {
        const bool reuses_lists =
            p_.overlays && (!kPlain || lists_ == orders_ || layout.tiles + layout.tile_bytes > layout.candidates);
        reuses_lists ? cluster_sync_shared(cluster_) : __syncthreads();  // what this CTA has read is in its list
    }

private:
    // Sends the number of this warp's selected keys to all CTAs.
    __device__ void send_count(uint32_t selected) const {
        uint32_t* const count = &smem_.segment_counts[rank_ * kWarps + warp_id()];
        if (cluster_ == 1) {
            *count = selected;
            return;
        }
        const uint32_t ready = smem_address(&smem_.counts_ready);
        if (threadIdx.x == 0) mbarrier_arrive_and_expect_tx(ready, cluster_ * kWarps * 4);
        if (lane_id() < cluster_)
            store_dsmem_async(map_to_cta(smem_address(count), lane_id()), selected, map_to_cta(ready, lane_id()));
    }

    // The order of the largest bias that masks its key.
    __device__ uint32_t masked_order() const {
        return is_float() ? kMaskedOrder<DataType::kFloat32> : uint32_t{kMaskedOrder<kHalf>} << 16;
    }
    __device__ bool is_float() const { return !kPlain && p_.bias_cache.dtype == DataType::kFloat32; }

    // Whether neighbouring biases are read 16 bytes at a time.
    __device__ bool reads_vectors() const { return kPlain || p_.has_vector_bias; }

    template <DataType kType>
    __device__ void prefetch_biases() const {
        using Bits = typename FloatBits<kType>::Bits;
        const int keys = share_.cached / kGroup * kGroup;
        if (keys > 0)
            prefetch_l2(cache_.template cached_row_of<Bits>(p_.bias_cache, share_.begin), keys * sizeof(Bits));
    }

    template <DataType kType>
    __device__ uint32_t order_at(int at) const {
        using Bits = typename FloatBits<kType>::Bits;
        return decode_order<kType>(__ldcg(cache_.template row_of<Bits>(p_.bias_cache, p_.bias, share_.begin + at)));
    }

    // Reads the biases of this CTA, stores the high halves of their orders and counts the first digit.
    template <DataType kType>
    __device__ void load(const DigitHistogram& histogram) {
        using Bits = typename FloatBits<kType>::Bits;
        const int cached = share_.cached;
        const int done = reads_vectors() ? cached / kGroup * kGroup : cached;
        const bool is_paged = p_.block_table != nullptr;
        bool is_loaded = false;
        if constexpr (kPlain) is_loaded = candidates_.is_enabled();  // the biases are in orders_
        if (is_loaded) {
            convert_orders(done, histogram);
        } else if (reads_vectors()) {
            is_paged ? load_vectors<kType, true>(done, histogram) : load_vectors<kType, false>(done, histogram);
        } else {
            is_paged ? load_rows<kType, true>(done, histogram) : load_rows<kType, false>(done, histogram);
        }
#pragma unroll 1
        for (int at = done + threadIdx.x; at < share_.keys; at += kThreads) {
            const Bits bits = __ldcg(cache_.template row_of<Bits>(p_.bias_cache, p_.bias, share_.begin + at));
            found_nan_ |= is_nan<kType>(bits);
            const uint32_t order = decode_order<kType>(bits);
            orders_[at] = static_cast<uint16_t>(order >> 16);
            histogram.add(order >> 24);
        }
        // Positions without a key are below all visible ones: whether they are counted makes no difference.
#pragma unroll 1
        for (int at = share_.keys + threadIdx.x; at < share_.segment * kWarps; at += kThreads) orders_[at] = 0;
    }

    // The first `keys` of this CTA's keys with any strides. Neighbouring lanes read neighbouring keys: where the heads
    // of a key are contiguous, a warp reads each sector once. All loads of a step are in flight together.
    template <DataType kType, bool kPaged>
    __device__ __forceinline__ void load_rows(int keys, const DigitHistogram& histogram) {
        using Bits = typename FloatBits<kType>::Bits;
        constexpr int kGroups = 2, kPerWord = 4 / sizeof(Bits);
        const int64_t stride = p_.bias_cache.row_stride;
        const Bits* const begin = kPaged ? nullptr : cache_.template cached_row_of<Bits>(p_.bias_cache, share_.begin);
        uint32_t nans = 0;
#pragma unroll 1
        for (int first = threadIdx.x; first < keys; first += kGroups * kStep) {
            uint32_t biases[kGroups][kGroup / kPerWord] = {};
#pragma unroll
            for (int i = 0; i < kGroups * kGroup; ++i) {
                const int at = min(first + i * kThreads, keys - 1);
                const Bits* from = kPaged ? cache_.template cached_row_of<Bits>(p_.bias_cache, share_.begin + at)
                                          : begin + at * stride;
                biases[i / kGroup][i % kGroup / kPerWord] |= uint32_t{__ldcg(from)} << i % kPerWord * 16;
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                uint32_t words[kGroup / 2];
                to_high_orders<kType>(biases[g], words, nans);
#pragma unroll
                for (int i = 0; i < kGroup; ++i) {
                    const int at = first + (g * kGroup + i) * kThreads;
                    const uint32_t order = words[i / 2] >> i % 2 * 16;
                    if (at < keys) orders_[at] = static_cast<uint16_t>(order);
                    histogram.add(at < keys ? order >> 8 & (kBins - 1) : kBins);
                }
            }
        }
        found_nan_ |= Group<kType>::has_nan(nans);
    }

    // The high halves of the orders of eight biases, two in a word.
    template <DataType kType, int kWords>
    __device__ static void to_high_orders(const uint32_t (&biases)[kWords], uint32_t (&words)[kGroup / 2],
                                          uint32_t& nans) {
        if constexpr (kType == DataType::kFloat32) {
#pragma unroll
            for (int i = 0; i < kGroup / 2; ++i) {
                const uint32_t low = biases[2 * i], high = biases[2 * i + 1];
                Group<kType>::propagate_nan(low, nans);
                Group<kType>::propagate_nan(high, nans);
                words[i] = __byte_perm(decode_order<kType>(low), decode_order<kType>(high), 0x7632);
            }
        } else {
            Group<kType> group{{biases[0], biases[1], biases[2], biases[3]}};
            group.to_orders(nans);
#pragma unroll
            for (int i = 0; i < kGroup / 2; ++i) words[i] = group.words[i];
        }
    }

    // The first `keys` of this CTA's keys, eight of a thread at a time.
    template <DataType kType, bool kPaged>
    __device__ void load_vectors(int keys, const DigitHistogram& histogram) {
        constexpr int kInFlight = 4;
        uint32_t nans = 0;
        int at = threadIdx.x * kGroup;
#pragma unroll 1
        for (; at + (kInFlight - 1) * kStep < keys; at += kInFlight * kStep)
            load_groups<kType, kPaged, kInFlight>(at, nans, histogram);
#pragma unroll 1
        for (; at < keys; at += kStep) load_groups<kType, kPaged, 1>(at, nans, histogram);
        found_nan_ |= Group<kType>::has_nan(nans);
    }

    template <DataType kType, bool kPaged, int kInFlight>
    __device__ __forceinline__ void load_groups(int at, uint32_t& nans, const DigitHistogram& histogram) {
        using Bits = typename FloatBits<kType>::Bits;
        constexpr int kParts = kGroup * sizeof(Bits) / 16;
        const Bits* const begin = kPaged ? nullptr : cache_.template cached_row_of<Bits>(p_.bias_cache, share_.begin);
        const Bits* from[kInFlight];
        uint4 parts[kInFlight][kParts];
#pragma unroll
        for (int g = 0; g < kInFlight; ++g) {
            const int key = at + g * kStep;
            from[g] = kPaged ? cache_.template cached_row_of<Bits>(p_.bias_cache, share_.begin + key) : begin + key;
        }
#pragma unroll
        for (int g = 0; g < kInFlight; ++g)
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                parts[g][part] = load_global_16(reinterpret_cast<const uint4*>(from[g]) + part);
#pragma unroll
        for (int g = 0; g < kInFlight; ++g) {
            uint32_t biases[kParts * 4];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const uint4& x = parts[g][part];
                biases[part * 4] = x.x, biases[part * 4 + 1] = x.y, biases[part * 4 + 2] = x.z,
                              biases[part * 4 + 3] = x.w;
            }
            store_orders<kType>(biases, at + g * kStep, nans, histogram);
        }
    }

    // The first `keys` of this CTA's keys, whose biases are in orders_.
    __device__ void convert_orders(int keys, const DigitHistogram& histogram) {
        uint32_t nans = 0;
#pragma unroll 1
        for (int at = threadIdx.x * kGroup; at < keys; at += kStep) {
            const uint4 x = *reinterpret_cast<const uint4*>(orders_ + at);
            const uint32_t biases[] = {x.x, x.y, x.z, x.w};
            store_orders<kHalf>(biases, at, nans, histogram);
        }
        found_nan_ |= Group<kHalf>::has_nan(nans);
    }

    // Stores and counts the orders of eight keys from `at` on.
    template <DataType kType, int kWords>
    __device__ __forceinline__ void store_orders(const uint32_t (&biases)[kWords], int at, uint32_t& nans,
                                                 const DigitHistogram& histogram) const {
        uint32_t words[kGroup / 2];
        to_high_orders<kType>(biases, words, nans);
        *reinterpret_cast<uint4*>(orders_ + at) = {words[0], words[1], words[2], words[3]};
#pragma unroll
        for (const uint32_t word : words) histogram.add_high_bytes(word);
    }

    // Counts the digit at bit `shift`, at most 16, of the orders that match threshold_ above it.
    __device__ void count(const DigitHistogram& histogram, int shift) {
        const uint32_t limit = threshold_ >> 16;
        if (kPlain || shift == 16) {
            for_each_group([&](int, const uint32_t (&words)[kScanGroup / 2]) {
#pragma unroll
                for (const uint32_t word : words) histogram.add_low_bytes(word, limit);
            });
            return;
        }
        for_each_group([&](int at, const uint32_t (&words)[kScanGroup / 2]) {
            for (uint32_t left = equal_to(words, limit); left != 0; left &= left - 1) {
                const uint32_t order = order_at<DataType::kFloat32>(at + __ffs(left) - 1);
                histogram.add(min((order ^ threshold_) >> shift, uint32_t{kBins}));
            }
        });
    }

    // Calls visit(position of the first key, orders) for groups of 16 keys, by a warp in its segment.
    template <typename Visit>
    __device__ __forceinline__ void for_each_group(const Visit& visit) const {
        const int first = warp_id() * share_.segment + lane_id() * kScanGroup;
#pragma unroll 1
        for (int at = first; at < first + share_.segment; at += 32 * kScanGroup) {
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

    // Finds the threshold among all keys.
    __device__ void select_among_all() {
        const DigitHistogram histogram = exchange_.begin_round();
        is_float() ? load<DataType::kFloat32>(histogram) : load<kHalf>(histogram);
        int wanted = static_cast<int>(p_.window_size), shift = kHighestDigit * kDigit;
        threshold_ = 0;
        ChosenDigit chosen;
#pragma unroll 1
        while (true) {
            exchange_.all_reduce();
            chosen = exchange_.choose_digit(wanted);
            threshold_ |= static_cast<uint32_t>(chosen.digit) << shift;
            wanted -= chosen.above;
            if (shift == 0 || (shift == 16 && (!is_float() || (threshold_ | 0xffff) <= masked_order()))) break;
            shift -= kDigit;
            count(exchange_.begin_round(), shift);
        }
        // Masked keys have the lowest orders, and are not selected.
        if (threshold_ <= masked_order()) {
            threshold_ = masked_order();
            equal_ = {share_.per_cta, share_.per_cta};
        } else {
            equal_ = exchange_.equal_keys(chosen.digit, wanted);
        }
    }

    // Returns the bits of `matches`, whose high halves equal threshold_'s, of orders above threshold_ (is_above) or
    // equal to it.
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

    // The keys of the warp that are equal to threshold_.
    __device__ int count_equal() const {
        int equal = 0;
        for_each_group([&](int at, const uint32_t (&words)[kScanGroup / 2]) {
            equal += __popc(refine(at, equal_to(words, threshold_ >> 16), false));
        });
        return __reduce_add_sync(~0u, equal);
    }

    // Replaces the orders of a segment by the offsets of its selected keys. Returns their number.
    __device__ int compact() {
        const uint32_t limit = threshold_ >> 16;
        // Orders of at least `lowest` are selected. If tests_equal, those equal to it are tested one by one.
        uint32_t lowest = limit;
        bool tests_equal = is_float();
        int skipped = equal_.skipped;
        if (skipped > 0 && skipped < equal_.all) {
            const int equal = count_equal();
            skipped -= equal_before_warp<kWarps>(smem_, equal);
            tests_equal |= skipped > 0 && skipped < equal;
        }
        if (!tests_equal && skipped > 0) ++lowest;
        int selected_before = 0, equal_before = 0;
        uint16_t* list = orders_ + warp_id() * share_.segment;
        for_each_group([&](int at, const uint32_t (&words)[kScanGroup / 2]) {
            uint32_t selected = at_least(words, lowest);
            if (tests_equal) {
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
                list[to++] = static_cast<uint16_t>(at - warp_id() * share_.segment + __ffs(selected) - 1);
            selected_before += all;
        });
        return selected_before;
    }

    // Fetches the keys of this CTA's splits from the lists of all segments, `stride` apart. Returns the number of
    // selected keys.
    __device__ int read_list(int* list, const DecodeSplits& splits, int stride) {
        if (cluster_ > 1) mbarrier_wait(smem_address(&smem_.counts_ready), 0);
        // Lane c has the segment of this warp in CTA c.
        int of_cta = 0, before = 0, own = 0;
        if (lane_id() < cluster_) {
            const auto* counts = reinterpret_cast<const uint4*>(smem_.segment_counts + lane_id() * kWarps);
#pragma unroll
            for (int i = 0; i < kWarps; i += 4) {
                const uint4 x = counts[i / 4];
                const int keys[] = {int(x.x), int(x.y), int(x.z), int(x.w)};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    before += i + j < warp_id() ? keys[j] : 0;
                    own = i + j == warp_id() ? keys[j] : own;
                    of_cta += keys[j];
                }
            }
        }
        const int upto = warp_inclusive_sum(of_cta), start = upto - of_cta + before;
        // More if float32 biases changed while they were read again.
        const int total = min(__shfl_sync(~0u, upto, 31), static_cast<int>(p_.window_size));
        const int share = splits.share(total) * splits.per_cta, first = rank_ * share;
        const int begin = max(start, first), end = min(start + own, min(first + share, total));
        for (uint32_t left = __ballot_sync(~0u, begin < end); left != 0; left &= left - 1) {
            const int cta = __ffs(left) - 1, to = __shfl_sync(~0u, end, cta);
            const int segment = cta * share_.per_cta + warp_id() * share_.segment;
            const uint32_t from = map_to_cta(smem_address(lists_ + warp_id() * stride), cta);
            const int skipped = __shfl_sync(~0u, start, cta);
#pragma unroll 1
            for (int i = __shfl_sync(~0u, begin, cta) + lane_id(); i < to; i += 32 * kInFlight) {
                uint32_t offsets[kInFlight];
#pragma unroll
                for (int j = 0; j < kInFlight; ++j) {
                    const int at = min(i + 32 * j, to - 1);
                    offsets[j] = load_dsmem_u16(from + 2 * (at - skipped));
                }
#pragma unroll
                for (int j = 0; j < kInFlight; ++j)
                    if (i + 32 * j < to) list[i + 32 * j - first] = segment + static_cast<int>(offsets[j]);
            }
        }
        return total;
    }

    const DecodeArgs& p_;
    const KvCache& cache_;
    DecodeSharedStorage& smem_;
    uint16_t* const orders_;
    uint16_t* lists_;  // of selected keys, one for each warp: in the memory of the candidates or of the orders
    const int cluster_, rank_;
    const SelectionShare share_;
    DigitExchange<kWarps> exchange_;
    std::conditional_t<kPlain, DecodeCandidates<kHalf, kWarps>, NoCandidates> candidates_;
    bool found_nan_ = false;
    uint32_t threshold_ = 0;
    typename DigitExchange<kWarps>::EqualKeys equal_;  // to threshold_, in this CTA
};

}  // namespace flash_dmattn::cuda::sm90
