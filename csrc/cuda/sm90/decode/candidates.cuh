// The selection of a decoding kernel among candidates: keys whose biases reach a bound that a sample of the biases puts
// below the threshold. A few percent of the keys are candidates of a window of one percent, so only the comparison with
// the bound reads all of them. The bound may be wrong: then all keys are counted (selector.cuh).
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/kvcache/cache.cuh"
#include "cuda/mask/bits.cuh"
#include "digit_exchange.cuh"

namespace flash_dmattn::cuda::sm90 {

// For 16-bit biases that are read 16 bytes at a time. A warp has a segment of its CTA's keys, and a list of the
// candidates in it, by increasing position.
template <DataType kType, int kWarps>
class DecodeCandidates {
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kLaneKeys = 32;  // neighbouring keys that a lane compares at a time, bits of a word
    static constexpr int kStep = 2 * 32 * kLaneKeys;  // keys that a warp compares in a step
    static constexpr int kUnroll = 4;                 // loads of a lane in flight: candidates, groups of biases

public:
    // `biases`: shared memory for the biases of the CTA. `lists`: for candidate_capacity keys of each warp.
    __device__ DecodeCandidates(const DecodeArgs& p, const KvCache& cache, DecodeSharedStorage& smem,
                                const SelectionShare& share, uint16_t* biases, uint16_t* lists)
        : p_(p), cache_(cache), smem_(smem), share_(share), biases_(biases + warp_id() * share.segment),
          list_(lists + warp_id() * p.candidate_capacity) {
        const int cached = cache.cached_keys();
        if (p.candidate_capacity == 0 || cached < kThreads) return;
        // `expected` samples are at or above the threshold. bound_rank_ or more are less than one time in 50,000, if
        // samples are independent.
        const float expected =
            __fdividef(static_cast<float>(static_cast<int>(p.window_size)) * kThreads, static_cast<float>(cached));
        bound_rank_ = static_cast<int>(expected + 4 * fast_sqrt(expected) + 4);
        far_samples_ = static_cast<int>(expected / 4);
        // A quarter of a list is left for segments with more candidates than the average.
        if (bound_rank_ * share.segment > p.candidate_capacity * (kThreads * 3 / 4)) bound_rank_ = 0;
    }

    // Whether candidates are used: the lists have room for the expected number.
    __device__ bool is_enabled() const { return bound_rank_ > 0; }

    // Starts to load the sample, and the first biases of this warp's segment: a group of cp.async. The next one is Q's.
    __device__ void load() {
        // Runs of four neighbouring keys: fewer sectors are read than with single keys.
        constexpr int kRun = 4, kRuns = kThreads / kRun;
        sample_ = __ldcg(bias_of(threadIdx.x / kRun * (cache_.cached_keys() / kRuns) + threadIdx.x % kRun));
        const int before = warp_id() * share_.segment, grouped = share_.cached / kGroup * kGroup - before;
        vector_keys_ = max(min(grouped, share_.segment), 0);
        copy_biases(0, min(vector_keys_, kStep));
        // The keys after the last group: the last ones of the cache, and a new one.
        if (grouped >= 0 && grouped < share_.segment) {
            last_keys_ = min(share_.keys - before - grouped, kGroup);
            if (lane_id() < last_keys_)
                last_bias_ = __ldcg(cache_.template row_of<uint16_t>(p_.bias_cache, p_.bias,
                                                                     share_.begin + before + grouped + lane_id()));
        }
    }

    // Selects: this warp's list begins with the offsets of its `selected` keys, in their order. Returns false in all
    // CTAs if the bound is too high or too low. All threads of the cluster call.
    __device__ bool select(DigitExchange<kWarps>& exchange, int& selected) {
        int shift = 0, wanted = static_cast<int>(p_.window_size);
        uint32_t base = find_bound(shift);
        const bool fits = base > kMaskedOrder<kType> && find_candidates(base);
        if (!fits) count_ = 0;
        ChosenDigit chosen;
        for (bool is_first = true;; is_first = false) {
            const DigitHistogram histogram = exchange.begin_round();
            // In the first round the last bin also counts all larger orders. A warp without a bound or with a full list
            // adds `wanted` to it, so that all CTAs choose it and fall back.
            const uint32_t last = is_first ? kBins - 1 : kBins;
            if (is_first && !fits && lane_id() == 0) histogram.add_many(kBins - 1, wanted);
            for_each_candidates([&](const int (&offsets)[kUnroll], const uint32_t (&orders)[kUnroll]) {
#pragma unroll
                for (int i = 0; i < kUnroll; ++i)
                    histogram.add(offsets[i] < 0 ? kBins : min((orders[i] - base) >> shift, last));
            });
            // Another sequence may write its new token to a sampled slot: then the CTAs may have different bounds.
            exchange.all_reduce(base << 4 | shift);
            chosen = exchange.choose_digit(wanted);
            if (is_first && (chosen.digit < 0 || chosen.digit == kBins - 1 || !exchange.agree())) return fall_back();
            base += chosen.digit << shift;
            wanted -= chosen.above;
            if (shift == 0) break;
            shift = 0;
        }
        refuse_nan(found_nan_);
        selected = compact(base, exchange.equal_keys(chosen.digit, wanted));
        return true;
    }

private:
    // Waits until the biases of all warps are in shared memory, where the selection among all keys reads them. Returns
    // false.
    __device__ bool fall_back() const {
        cp_async_wait<0>();
        __syncthreads();
        return false;
    }

    // Starts to copy the biases [begin, end) of the warp's segment to shared memory: a group of cp.async.
    __device__ void copy_biases(int begin, int end) const {
        p_.block_table == nullptr ? copy_biases_of<false>(begin, end) : copy_biases_of<true>(begin, end);
        cp_async_commit();
    }
    template <bool kPaged>
    __device__ __forceinline__ void copy_biases_of(int begin, int end) const {
        const int segment = share_.begin + warp_id() * share_.segment;
        const uint16_t* const contiguous = kPaged ? nullptr : bias_of(segment);
#pragma unroll 1
        for (int first = begin + lane_id() * kGroup; first < end; first += kUnroll * 32 * kGroup) {
            const uint16_t* from[kUnroll];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {  // entries of the block table are loaded together
                const int at = min(first + i * 32 * kGroup, end - kGroup);
                from[i] = kPaged ? bias_of(segment + at) : contiguous + at;
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (const int at = first + i * 32 * kGroup; at < end) cp_async_16(smem_address(biases_ + at), from[i]);
        }
    }
    __device__ const uint16_t* bias_of(int cached_key) const {
        return cache_.template cached_row_of<uint16_t>(p_.bias_cache, cached_key);
    }

    // Returns the order that bound_rank_ samples reach, with its low 4 bits cleared, or 0 if the lists would be too
    // long. `shift`: of the first digit; 0 if nearly all samples are fewer than kBins - 1 orders above the bound, else
    // kDigit.
    __device__ uint32_t find_bound(int& shift) const {
        constexpr int kBits = 4, kLowBits = 4, kTests = (1 << kBits) / kWarps, kWords = kThreads / 64;
        static_assert(kTests == 1 || kTests == 2);
        smem_.samples[threadIdx.x] = order_of<kType>(sample_);
        copy_biases(kStep, vector_keys_);  // not before: the sample would wait for them
        __syncthreads();
        uint32_t words[kWords];
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4 x = reinterpret_cast<const uint4*>(smem_.samples)[lane_id() * (kWords / 4) + i / 4];
            words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
        }
        // A round finds kBits bits: the warps test their 16 values, and the largest that bound_rank_ samples reach is
        // kept.
        uint32_t bound = 0;
#pragma unroll 1
        for (int bit = 16 - kBits, buffer = 0; bit >= kLowBits; bit -= kBits, buffer ^= 1) {
            // Value 0 needs no test: it is the bound so far, and its count is not used.
            uint32_t counts = 0;
#pragma unroll
            for (int i = 0; i < kTests; ++i) {
                const uint32_t above = samples_above(words, (bound | (warp_id() * kTests + i) << bit) - 1);
                counts |= above << 16 * i;
            }
            counts = __reduce_add_sync(~0u, counts);
            if (lane_id() < kTests)
                smem_.sample_counts[buffer][warp_id() * kTests + lane_id()] = counts >> 16 * lane_id() & 0xffff;
            __syncthreads();
            const int test = lane_id() % (1 << kBits);
            const bool is_reached = lane_id() == test && test > 0 && smem_.sample_counts[buffer][test] >= bound_rank_;
            bound |= __popc(__ballot_sync(~0u, is_reached)) << bit;
        }
        const uint32_t far = samples_above(words, min(bound + kBins - 2, 0xffffu)),
                       reached = samples_above(words, max(bound, 1u) - 1),
                       counts = __reduce_add_sync(~0u, far | reached << 16);
        shift = static_cast<int>(counts & 0xffff) > far_samples_ ? kDigit : 0;
        if (static_cast<int>(counts >> 16) * share_.segment > p_.candidate_capacity * kThreads) return 0;
        return bound;
    }
    // This lane's samples above `limit`.
    template <int kWords>
    __device__ static uint32_t samples_above(const uint32_t (&words)[kWords], uint32_t limit) {
        const uint32_t limits = limit * 0x10001;
        uint32_t above = 0;  // in each half
#pragma unroll
        for (const uint32_t word : words) above += __vminu2(__vmaxu2(word, limits) - limits, 0x10001);
        return (above & 0xffff) + (above >> 16);
    }

    // Lists the keys of at least the order `bound`. Returns false if there are too many of them.
    __device__ bool find_candidates(uint32_t bound) {
        const uint32_t least = bias_of_order<kType>(bound) * 0x10001;  // in both halves
        uint32_t nans = 0;
        count_ = 0;
#pragma unroll 1
        for (int begin = 0; begin < vector_keys_; begin += kStep) {
            if (begin == 0) cp_async_wait<2>();  // of three groups: these biases, Q, the biases after this step
            if (begin == kStep) cp_async_wait<0>();
            __syncwarp();
            // In two halves, whose numbers of candidates are in the halves of a word.
            const int first = begin + lane_id() * kLaneKeys, second = first + kStep / 2;
            uint32_t found[2] = {compare(first, least, nans)};
            if (begin + kStep / 2 < vector_keys_) found[1] = compare(second, least, nans);
            const uint32_t own = __popc(found[0]) | __popc(found[1]) << 16, upto = warp_inclusive_sum(own),
                           all = __shfl_sync(~0u, upto, 31), before = upto - own;
            const int middle = count_ + static_cast<int>(all & 0xffff), end = middle + static_cast<int>(all >> 16);
            if (end > p_.candidate_capacity) return false;
            list_keys(found[0], first, count_ + static_cast<int>(before & 0xffff));
            list_keys(found[1], second, middle + static_cast<int>(before >> 16));
            count_ = end;
        }
        found_nan_ |= Group<kType>::has_nan(nans);
        return add_last_keys(bound);
    }

    // Bit i: the bias of key first + i is at least those in `least`. `nans`: see Group::to_orders.
    __device__ __forceinline__ uint32_t compare(int first, uint32_t least, uint32_t& nans) const {
        constexpr int kGroups = kLaneKeys / kGroup;
        const int rotation = lane_id() / 2 % kGroups;  // of the groups, against bank conflicts
        uint32_t bits[kGroups / 2] = {};  // for two groups: even keys in the low half, odd keys in the high one
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            constexpr uint32_t kMinusInfinity = (FloatBits<kType>::kMinusZero | FloatBits<kType>::kInfinity) * 0x10001u;
            const int at = first + (g + rotation) % kGroups * kGroup;
            uint4 x = {kMinusInfinity, kMinusInfinity, kMinusInfinity, kMinusInfinity};
            if (at < vector_keys_) x = *reinterpret_cast<const uint4*>(biases_ + at);
            const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < kGroup / 2; ++i) {
                Group<kType>::propagate_nan(words[i], nans);
                bits[g / 2] |= halves_at_least(words[i], least) & 0x20001 << (g % 2 * kGroup + 2 * i);
            }
        }
        const uint32_t rotated = ((bits[0] | bits[0] >> 16) & 0xffff) | (bits[1] & 0xffff0000) | bits[1] << 16;
        return __funnelshift_l(rotated, rotated, rotation * kGroup);
    }

    // Lists a lane's keys from index `to` on. Writes from both ends: half as many iterations.
    __device__ __forceinline__ void list_keys(uint32_t found, int first, int to) const {
        for (int end = to + __popc(found); found != 0; ++to) {
            const int low = __ffs(found) - 1, high = 31 - __clz(found);
            list_[to] = static_cast<uint16_t>(first + low);
            list_[--end] = static_cast<uint16_t>(first + high);
            found &= ~(1u << low | 1u << high);
        }
    }

    // The keys after the last group of eight. Returns false if there are too many candidates.
    __device__ bool add_last_keys(uint32_t bound) {
        const int at = vector_keys_ + lane_id();
        bool is_candidate = false;
        if (lane_id() < last_keys_) {
            found_nan_ |= is_nan<kType>(last_bias_);
            biases_[at] = last_bias_;
            is_candidate = order_of<kType>(last_bias_) >= bound;
        }
        const uint32_t lanes = __ballot_sync(~0u, is_candidate);
        const int end = count_ + __popc(lanes);
        if (end > p_.candidate_capacity) return false;
        if (is_candidate) list_[count_ + rank_in(lanes)] = static_cast<uint16_t>(at);
        count_ = end;
        __syncwarp();
        return true;
    }

    // Calls visit(offsets, orders) with kUnroll candidates per lane, candidate first + 32 i at index i. Without a
    // candidate the offset is -1 and the order 0.
    template <typename Visit>
    __device__ __forceinline__ void for_each_candidates(const Visit& visit) const {
#pragma unroll 1
        for (int first = lane_id(); first - lane_id() < count_; first += kUnroll * 32) {
            int offsets[kUnroll];
            uint32_t orders[kUnroll];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) offsets[i] = first + i * 32 < count_ ? list_[first + i * 32] : -1;
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) orders[i] = offsets[i] < 0 ? 0 : order_of<kType>(biases_[offsets[i]]);
            visit(offsets, orders);
        }
    }

    // Lists the selected candidates, in their order: those above `threshold`, and those equal to it that are not
    // skipped. Returns their number.
    __device__ int compact(uint32_t threshold, const typename DigitExchange<kWarps>::EqualKeys& of_cta) {
        int skipped = of_cta.skipped;  // of the warp's candidates that are equal to the threshold
        if (skipped > 0 && skipped < of_cta.all) {
            int equal = 0;
            for_each_candidates([&](const int (&)[kUnroll], const uint32_t (&orders)[kUnroll]) {
#pragma unroll
                for (const uint32_t order : orders) equal += order == threshold;
            });
            skipped -= equal_before_warp<kWarps>(smem_, __reduce_add_sync(~0u, equal));
        }
        int selected = 0, equal = 0;
        for_each_candidates([&](const int (&offsets)[kUnroll], const uint32_t (&orders)[kUnroll]) {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const uint32_t equals = __ballot_sync(~0u, orders[i] == threshold);
                const bool is_selected =
                    orders[i] > threshold || (orders[i] == threshold && equal + rank_in(equals) >= skipped);
                const uint32_t lanes = __ballot_sync(~0u, is_selected);  // all have read their candidates
                if (is_selected) list_[selected + rank_in(lanes)] = static_cast<uint16_t>(offsets[i]);
                selected += __popc(lanes), equal += __popc(equals);
            }
        });
        return selected;
    }

    // All bits of those halves of `word` that are at least the halves of `least`.
    __device__ __forceinline__ static uint32_t halves_at_least(uint32_t word, uint32_t least) {
        uint32_t mask;
        if constexpr (kType == DataType::kFloat16) {
            asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(least));
        } else {
            asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(least));
        }
        return mask;
    }

    const DecodeArgs& p_;
    const KvCache& cache_;
    DecodeSharedStorage& smem_;
    const SelectionShare share_;
    uint16_t* const biases_;  // of this warp's keys
    uint16_t* const list_;
    int bound_rank_ = 0;   // the bound is the sample of this rank; 0: candidates are not used
    int far_samples_;      // if more samples are above the bins of the first round, it counts a higher digit
    uint16_t sample_;      // a bias
    int vector_keys_ = 0;  // of the warp's cached keys, those in whole groups of eight
    int last_keys_ = 0;    // the keys after them, which a lane each has
    uint16_t last_bias_;
    int count_ = 0;  // candidates
    bool found_nan_ = false;
};

}  // namespace flash_dmattn::cuda::sm90
