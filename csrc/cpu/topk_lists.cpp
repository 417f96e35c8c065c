#include "topk_lists.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include "linalg.h"
#include "parallel.h"
#include "tile.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kWords = KeyListsView::kRows / 32;
constexpr int64_t kChunk = 1024;            // biases that are converted at once
constexpr int64_t kGroup = 32;              // biases that are compared at once
constexpr int64_t kSerialBiases = 1 << 15;  // biases that one thread reads sooner than others start

int64_t used_keys(const SelectParams& p, int64_t batch) {
    return p.seqused_k != nullptr ? std::clamp<int64_t>(p.seqused_k[batch], 0, p.keys) : p.keys;
}

// The biases of one batch element and head, by chunks: -inf where the key is no candidate. Owns its scratch memory.
template <typename acc_t>
class BiasChunks {
public:
    // candidates: [batches, heads, keys], or null for all keys.
    explicit BiasChunks(const SelectParams& params, const uint8_t* candidates = nullptr)
        : bias_(params.bias), keys_(params.keys), candidates_(candidates), chunk_(kChunk) {}

    void select(int64_t batch, int64_t head) {
        at_ = (bias_.batches > 1 ? batch * bias_.batch_stride : 0) + head * bias_.head_stride;
        first_candidate_ = (batch * bias_.heads + head) * keys_;
    }

    const acc_t* load(int64_t first, int64_t count) {
        const acc_t* x = convert(first, count);
        if (candidates_ == nullptr) return x;
        const uint8_t* is_candidate = candidates_ + first_candidate_ + first;  // of bool no loop is vectorized
        acc_t* to = chunk_.data();                                             // may be x
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
            const acc_t bias = x[j];
            to[j] = is_candidate[j] != 0 ? bias : -std::numeric_limits<acc_t>::infinity();
        }
        return to;
    }

    // Whether a bias of the keys [0, end) is NaN.
    bool has_nan(int64_t end) {
        int some = 0;
        for (int64_t first = 0; first < end; first += kChunk) {
            const int64_t count = std::min(end - first, kChunk);
            const acc_t* x = load(first, count);
            for (int64_t j = 0; j < count; ++j) some |= x[j] != x[j];
        }
        return some != 0;
    }

private:
    const acc_t* convert(int64_t first, int64_t count) {
        const int64_t at = at_ + first * bias_.col_stride;
        const auto read = [&](int64_t stride, int64_t rows, int64_t cols) {
            return flash_dmattn::load<acc_t>(bias_.data, bias_.dtype, at, stride, rows, cols, chunk_.data());
        };
        if (bias_.col_stride == 1) return read(count, 1, count).data;
        const auto column = read(bias_.col_stride, count, 1);
        for (int64_t j = 0; j < count; ++j) chunk_[j] = *column.row(j);
        return chunk_.data();
    }

    const BiasView& bias_;
    int64_t keys_, at_ = 0, first_candidate_ = 0;
    const uint8_t* candidates_;
    Buffer<acc_t> chunk_;
};

template <typename acc_t>
struct RankedKey {
    acc_t bias;
    int32_t key;

    // The better key comes first. One branch for a comparison, not two.
    bool operator<(const RankedKey& other) const {
        return (bias > other.bias) | ((bias == other.bias) & (key > other.key));
    }
};

// Selects one list at a time. Owns its scratch memory: one object per thread.
template <typename acc_t>
class TopkSelector {
public:
    explicit TopkSelector(const SelectParams& params, const uint8_t* candidates = nullptr)
        : p_(params), lowest_(lowest<acc_t>(params.bias.dtype)), biases_(params, candidates),
          listed_(ceil_div(params.keys, 64)) {}

    // Selects the keys of a list, for a write. Returns whether no bias is NaN.
    bool select(int64_t batch, int64_t head) {
        const int64_t used = used_keys(p_, batch);
        biases_.select(batch, head);
        lead_ = used - p_.rows;
        const int64_t first_later = std::max<int64_t>(lead_ + 1, 0);  // the first key that row 0 does not see
        best_.clear();
        partly_seen_.clear();
        if (p_.window == 0) return !biases_.has_nan(used);
        if (!find_best(first_later) || !add_later(first_later, used)) return false;
        for (const auto& ranked : best_) list(ranked.key, p_.rows);
        return true;
    }

    // Writes the listed keys from `begin` on and clears the list. Returns its end.
    int64_t write_list(int64_t begin, int32_t* keys, uint32_t* rows) {
        int64_t at = begin;
        for (size_t word = 0; word < listed_.size(); ++word) {
            for (uint64_t bits = listed_[word]; bits != 0; bits &= bits - 1)
                keys[at++] = static_cast<int32_t>(word * 64 + __builtin_ctzll(bits));
            listed_[word] = 0;
        }
        const int64_t size = at - begin, end = begin + KeyListsView::padded(size);
        std::fill(keys + at, keys + end, -1);
        if (rows == nullptr) return end;
        std::fill(rows + begin * kWords, rows + end * kWords, 0);
        for (int64_t i = begin; i < at; ++i) rows[i * kWords] = row_bits(0, p_.rows);
        for (const auto& [key, bits] : partly_seen_)
            rows[(std::lower_bound(keys + begin, keys + at, key) - keys) * kWords] = bits;
        return end;
    }

    // Writes whether each key is listed and clears the list.
    void write_mask(uint8_t* mask) {
        for (int64_t first = 0; first < p_.keys; first += 64) {
            const uint64_t bits = std::exchange(listed_[first / 64], 0);
            for (int64_t j = 0; j < std::min<int64_t>(p_.keys - first, 64); ++j) mask[first + j] = bits >> j & 1;
        }
    }

private:
    // best_ = the best of the keys [0, end). The last key comes first: a key that ties with a later one is not better.
    // Returns whether no bias is NaN.
    bool find_best(int64_t end) {
        threshold_ = lowest_;
        for (; end > 0; end -= std::min(end, kChunk)) {
            const int64_t first = std::max<int64_t>(end - kChunk, 0);
            const acc_t* x = biases_.load(first, end - first);
            for (int64_t group_end = end - first; group_end > 0; group_end -= std::min(group_end, kGroup)) {
                const int64_t group = std::max<int64_t>(group_end - kGroup, 0);
                const int64_t count = group_end - group;
                if (any_better(x + group, count) && !add_better(x + group, count, first + group)) return false;
            }
        }
        keep_best();
        return true;
    }

    // NaN is better than any threshold.
    bool any_better(const acc_t* x, int64_t n) const {
        const acc_t threshold = threshold_;
        int some = 0;
        for (int64_t j = 0; j < n; ++j) some |= !(x[j] <= threshold);
        return some != 0;
    }

    // Adds the keys of a group that are better than the threshold, without a branch for each. Returns whether no bias
    // is NaN.
    bool add_better(const acc_t* x, int64_t n, int64_t first) {
        const size_t before = best_.size();
        best_.resize(before + n);
        RankedKey<acc_t>* to = best_.data() + before;
        const acc_t threshold = threshold_;
        for (int64_t j = 0; j < n; ++j) {
            *to = {x[j], static_cast<int32_t>(first + j)};
            to += !(x[j] <= threshold);
        }
        best_.resize(to - best_.data());
        int some_nan = 0;
        for (size_t i = before; i < best_.size(); ++i) some_nan |= best_[i].bias != best_[i].bias;
        // Keeping w of 2 w candidates takes a constant time per candidate.
        if (static_cast<int64_t>(best_.size()) >= 2 * std::max(p_.window, kGroup)) keep_best();
        return some_nan == 0;
    }

    void keep_best() {
        if (static_cast<int64_t>(best_.size()) <= p_.window) return;
        const auto worst = best_.begin() + (p_.window - 1);
        std::nth_element(best_.begin(), worst, best_.end());
        threshold_ = worst->bias;
        best_.resize(p_.window);
    }

    // Adds the keys [first, end), each of which is new to a row and may evict one. Returns whether no bias is NaN.
    bool add_later(int64_t first, int64_t end) {
        if (first == end) return true;
        const acc_t* x = biases_.load(first, end - first);  // fewer than rows
        std::make_heap(best_.begin(), best_.end());         // the worst is at the front
        for (int64_t key = first; key < end; ++key) {
            const RankedKey<acc_t> ranked{x[key - first], static_cast<int32_t>(key)};
            if (ranked.bias != ranked.bias) return false;
            if (ranked.bias <= lowest_) continue;
            if (static_cast<int64_t>(best_.size()) == p_.window) {
                if (best_.front() < ranked) continue;
                std::pop_heap(best_.begin(), best_.end());
                list(best_.back().key, key - lead_);
                best_.pop_back();
            }
            best_.push_back(ranked);
            std::push_heap(best_.begin(), best_.end());
        }
        return true;
    }

    // Lists a key that the rows before `end_row` see, from its own row on.
    void list(int64_t key, int64_t end_row) {
        const int64_t first_row = std::max<int64_t>(key - lead_, 0);
        listed_[key / 64] |= uint64_t{1} << key % 64;
        if (end_row - first_row < p_.rows) partly_seen_.push_back({key, row_bits(first_row, end_row)});
    }

    static uint32_t row_bits(int64_t first, int64_t end) { return (uint32_t{1} << end) - (uint32_t{1} << first); }

    struct PartlySeen {
        int64_t key;
        uint32_t rows;
    };

    const SelectParams& p_;
    acc_t lowest_, threshold_ = 0;  // a key whose bias is not above the threshold is not among the best
    int64_t lead_ = 0;
    BiasChunks<acc_t> biases_;
    std::vector<RankedKey<acc_t>> best_;
    std::vector<uint64_t> listed_;  // one bit for each key
    std::vector<PartlySeen> partly_seen_;
};

template <typename acc_t>
bool select_all(const SelectParams& params, const SelectedListsPlan& plan, int32_t* keys, int64_t* begins,
                int64_t* ends, uint32_t* rows) {
    std::atomic<bool> has_order{true};
    parallel_for_tasks(plan.lists, [&] {
        return [&, selector = TopkSelector<acc_t>(params)](int64_t list) mutable {
            begins[list] = list * plan.stride;
            const int64_t batch = list / params.bias.heads, head = list % params.bias.heads;
            if (!selector.select(batch, head)) has_order = false;
            ends[list] = selector.write_list(begins[list], keys, plan.has_rows ? rows : nullptr);
        };
    });
    return has_order;
}

template <typename acc_t>
void mask_all(const SelectParams& params, const uint8_t* candidates, uint8_t* mask) {
    parallel_for_tasks(params.bias.heads, [&] {
        return [&, selector = TopkSelector<acc_t>(params, candidates)](int64_t head) mutable {
            selector.select(0, head);
            selector.write_mask(mask + head * params.keys);
        };
    });
}

template <typename acc_t>
bool has_order(const SelectParams& p) {
    std::atomic<bool> any_nan{false};
    const int64_t grain = std::max<int64_t>(kSerialBiases / std::max<int64_t>(p.keys, 1), 1);
    at::parallel_for(0, p.batches * p.bias.heads, grain, [&](int64_t begin, int64_t end) {
        BiasChunks<acc_t> biases(p);
        for (int64_t list = begin; list < end; ++list) {
            const int64_t batch = list / p.bias.heads;
            biases.select(batch, list % p.bias.heads);
            if (biases.has_nan(used_keys(p, batch))) any_nan = true;
        }
    });
    return !any_nan;
}

}  // namespace

bool has_order_cpu(const SelectParams& params) {
    return params.bias.dtype == DataType::kFloat64 ? has_order<double>(params) : has_order<float>(params);
}

void topk_mask_cpu(const SelectParams& params, const uint8_t* candidates, uint8_t* mask) {
    params.bias.dtype == DataType::kFloat64 ? mask_all<double>(params, candidates, mask)
                                            : mask_all<float>(params, candidates, mask);
}

bool topk_lists_cpu(const SelectParams& params, const SelectedListsPlan& plan, int32_t* keys, int64_t* begins,
                    int64_t* ends, uint32_t* rows) {
    return params.bias.dtype == DataType::kFloat64 ? select_all<double>(params, plan, keys, begins, ends, rows)
                                                   : select_all<float>(params, plan, keys, begins, ends, rows);
}

}  // namespace flash_dmattn
