#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "mha_cpu.h"
#include "gathered_keys.h"
#include "scores.h"
#include "parallel.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kRows = 256;
constexpr int64_t kKeys = 256;

constexpr int64_t kFewRowsKeys = 128;

// The online softmax of some rows after some of their keys: the maximum, the sum of exp(score - max), and the output
// before the division by the sum.
template <typename acc_t>
struct SoftmaxState {
    static constexpr acc_t kNone = -std::numeric_limits<acc_t>::infinity();

    Matrix<acc_t> out;
    acc_t* max;
    double* sum;

    SoftmaxState rows(int64_t first, int64_t count) const {
        return {{out.row(first), count, out.cols, out.stride}, max + first, sum + first};
    }

    void start() const {
        std::fill(out.data, out.row(out.rows), acc_t(0));
        std::fill_n(max, out.rows, kNone);
        std::fill_n(sum, out.rows, 0.0);
    }

    // Rescales row i to a new maximum. Returns whether the row has a visible score.
    bool update_max(int64_t i, acc_t largest) const {
        const acc_t now = largest <= max[i] ? max[i] : largest;  // a NaN replaces any maximum
        if (now == kNone) return false;
        if (max[i] != now && max[i] != kNone) {
            const acc_t correction = std::exp(max[i] - now);
            sum[i] *= correction;
            row_scale(out.row(i), correction, out.cols);
        }
        max[i] = now;
        return true;
    }

    // Adds the softmax of the same rows over other keys.
    void merge(const SoftmaxState& other) const {
        for (int64_t i = 0; i < out.rows; ++i) {
            if (!update_max(i, other.max[i])) continue;
            const acc_t weight = std::exp(other.max[i] - max[i]);
            sum[i] += other.sum[i] * weight;
            row_scale(other.out.row(i), weight, out.cols);
            row_add(out.row(i), other.out.row(i), out.cols);
        }
    }

    // Normalizes and stores out and lse of rows of a query head.
    void finish(const FwdParams& p, const Sequence& sequence, int64_t head, int64_t row) const {
        acc_t* lse = row_stats<acc_t>(p.lse, sequence, head, row);
        for (int64_t i = 0; i < out.rows; ++i) {
            const bool empty = max[i] == kNone;
            lse[i] = empty ? max[i] : static_cast<acc_t>(max[i] + std::log(sum[i]));
            if (!empty) row_scale(out.row(i), static_cast<acc_t>(1 / sum[i]), out.cols);
        }
        store_rows(p, out, p.out, sequence, row, head);
    }
};

// Replaces the products of a tile by exp(score - maximum so far), and updates the sums.
template <typename acc_t>
void online_softmax(const FwdParams& p, const Tile& tile, const Matrix<acc_t>& products,
                    const SoftmaxState<acc_t>& sums, ScoreScratch<acc_t>& scratch) {
    ScoreRows<acc_t> scores(p, tile, scratch);
    for (int64_t i = 0; i < tile.rows; ++i) {
        acc_t* x = products.row(i);
        scores.finish(i, x, nullptr);
        if (sums.update_max(i, row_max(x, tile.keys))) {
            sums.sum[i] += row_exp(x, sums.max[i], tile.keys);
        } else {
            std::fill_n(x, tile.keys, acc_t(0));
        }
    }
}

// Computes out and lse of one m_block. Owns its scratch memory: one object per thread.
template <typename acc_t>
class FwdTask {
public:
    explicit FwdTask(const FwdParams& params)
        : p_(params), max_rows_(std::min(kRows, params.seqlen_q)), max_keys_(std::min(kKeys, params.seqlen_k)),
          score_scratch_(max_keys_), gathered_(params, kKeys), query_(max_rows_ * p_.head_dim),
          key_(params.lists.present() ? 0 : max_keys_ * p_.head_dim),
          key_transposed_(params.lists.present() ? 0 : padded(max_keys_) * p_.head_dim),
          probs_(max_rows_ * padded(max_keys_)), out_(max_rows_ * p_.head_dim), max_(max_rows_), sum_(max_rows_) {}

    void operator()(const Sequence& sequence, int64_t head, int64_t row, int64_t rows) {
        const SoftmaxState<acc_t> sums{{out_.data(), rows, p_.head_dim, p_.head_dim}, max_.data(), sum_.data()};
        attend(sequence, head, row, sums, /*exact=*/false);
        // A masked value may hold NaN, and 0 * NaN is NaN.
        if (!all_finite(sums.out)) attend(sequence, head, row, sums, /*exact=*/true);
        sums.finish(p_, sequence, head, row);
    }

private:
    void attend(const Sequence& sequence, int64_t head, int64_t row, const SoftmaxState<acc_t>& sums, bool exact) {
        sums.start();
        const auto query = load_rows(p_, p_.query, sequence, row, sums.out.rows, head, query_.data());
        p_.lists.present() ? walk_list(sequence, head, row, query, sums, exact)
                           : walk_keys(sequence, head, row, query, sums, exact);
    }

    // The dense mainloop: all n_blocks up to the causal end.
    void walk_keys(const Sequence& sequence, int64_t head, int64_t row, const Matrix<acc_t>& query,
                   const SoftmaxState<acc_t>& sums, bool exact) {
        const int64_t kv_head = head / (p_.heads / p_.kv_heads);
        const int64_t end = p_.is_causal ? sequence.causal_end(row + query.rows - 1) : sequence.keys;
        for (int64_t j = 0; j < end; j += kKeys) {
            const Tile tile{sequence, head, row, query.rows, j, std::min(kKeys, end - j)};
            if (is_fully_masked(p_, tile)) continue;
            const auto key = load_keys(p_, p_.key, sequence, j, tile.keys, kv_head, key_.data());
            const auto key_transposed = transpose(key, key_transposed_.data(), padded(tile.keys));
            const Matrix<acc_t> probs = products(tile, query, key, key_transposed);
            online_softmax(p_, tile, probs, sums, score_scratch_);
            const auto value = load_keys(p_, p_.value, sequence, j, tile.keys, kv_head, key_.data());
            add_product_left<acc_t>(probs, value, 1, exact, sums.out);
        }
    }

    // The mainloop over the gathered keys of the m_block's list.
    void walk_list(const Sequence& sequence, int64_t head, int64_t row, const Matrix<acc_t>& query,
                   const SoftmaxState<acc_t>& sums, bool exact) {
        gathered_.load(sequence, head, row, query.rows);
        for (const auto& keys : gathered_.tiles()) {
            const Tile tile = keys.tile(sequence, head, row, query.rows);
            const Matrix<acc_t> probs = products(tile, query, keys.key, keys.key_transposed);
            online_softmax(p_, tile, probs, sums, score_scratch_);
            add_product_left<acc_t>(probs, keys.value, 1, exact, sums.out);
        }
    }

    Matrix<acc_t> products(const Tile& tile, const Matrix<acc_t>& query, const Matrix<acc_t>& key,
                           const Matrix<acc_t>& key_transposed) {
        const Matrix<acc_t> to{probs_.data(), tile.rows, tile.keys, padded(tile.keys)};
        score_products<acc_t>(p_, tile, query, key, key_transposed, to);
        return to;
    }

    const FwdParams& p_;
    int64_t max_rows_, max_keys_;
    ScoreScratch<acc_t> score_scratch_;
    GatheredKvBlocks<acc_t> gathered_;
    Buffer<acc_t> query_, key_, key_transposed_, probs_, out_, max_;
    std::vector<double> sum_;
};

// Split-KV for sequences of few rows, as in decoding, where reading the keys takes the time: each key is read once for
// all heads that share it, without key lists in memory order. The keys of a batch element are split where batch
// elements alone are few tasks. The splits do not depend on the number of threads.
template <typename acc_t>
class SplitKvFwd {
public:
    explicit SplitKvFwd(const FwdParams& params)
        : p_(params), qheads_per_kv_(p_.heads / p_.kv_heads),
          qheads_per_list_(p_.heads / std::max(p_.kv_heads, p_.lists.heads)) {
        constexpr int64_t kMinTasks = 64;
        const int64_t max_splits = ceil_div(kMinTasks, p_.batch), max_keys = longest_sequence_k();
        keys_per_split_ = std::max<int64_t>(ceil_div(ceil_div(max_keys, kFewRowsKeys), max_splits), 1) * kFewRowsKeys;
        num_splits_ = std::max<int64_t>(ceil_div(max_keys, keys_per_split_), 1);
        out_.resize(p_.batch * num_splits_ * rows_per_split() * p_.head_dim);
        max_.resize(p_.batch * num_splits_ * rows_per_split());
        sum_.resize(max_.size());
        finished_splits_ = std::vector<std::atomic<int64_t>>(p_.batch);
    }

    void run() {
        parallel_for_tasks(p_.batch * num_splits_, [&] {
            return [this, scratch = Scratch(p_)](int64_t index) mutable {
                const Sequence s(p_, index / num_splits_);
                if (s.rows == 0) return;
                attend(s, index % num_splits_, scratch);
                if (++finished_splits_[s.batch] == num_splits_) finish(s);  // the last split merges all
            };
        });
    }

private:
    // One object per thread.
    struct Scratch {
        explicit Scratch(const FwdParams& p)
            : max_keys(std::min(kFewRowsKeys, p.seqlen_k)), scores(max_keys), query(p.heads * p.seqlen_q * p.head_dim),
              key(p.lists.present() ? max_keys * p.head_dim : 0), value(max_keys * p.head_dim),
              probs(p.heads / p.kv_heads * p.seqlen_q * padded(max_keys)) {}

        int64_t max_keys;
        ScoreScratch<acc_t> scores;
        Buffer<acc_t> query, key, value, probs;
    };

    // The n_block of a tile, and what a task reads after its keys.
    struct KeyBlock {
        Tile tile;  // of the first head
        StoredRows key, value, next;
    };

    // The keys of the longest sequence or list.
    int64_t longest_sequence_k() const {
        int64_t longest = 0;
        if (const KeyListsView& lists = p_.lists; lists.present()) {
            for (int64_t i = 0; i < lists.batches * lists.heads * lists.num_m_blocks; ++i)
                longest = std::max(longest, lists.ends[i] - lists.begins[i]);
        } else {
            for (int64_t b = 0; b < p_.batch; ++b) longest = std::max(longest, Sequence(p_, b).keys);
        }
        return longest;
    }

    int64_t rows_per_split() const { return p_.heads * p_.seqlen_q; }

    // The softmax state of a split for the rows of a sequence, head by head.
    SoftmaxState<acc_t> partial(const Sequence& s, int64_t split) {
        const int64_t at = (s.batch * num_splits_ + split) * rows_per_split();
        const Matrix<acc_t> out{out_.data() + at * p_.head_dim, p_.heads * s.rows, p_.head_dim, p_.head_dim};
        return {out, max_.data() + at, sum_.data() + at};
    }

    void attend(const Sequence& s, int64_t split, Scratch& scratch) {
        const auto sums = partial(s, split);
        const Matrix<acc_t> query{scratch.query.data(), sums.out.rows, p_.head_dim, p_.head_dim};
        for (int64_t head = 0; head < p_.heads; ++head) {
            acc_t* to = query.row(head * s.rows);
            const auto rows = load_rows(p_, p_.query, s, 0, s.rows, head, to);
            for (int64_t i = 0; i < s.rows && rows.data != to; ++i)
                std::copy_n(rows.row(i), rows.cols, to + i * rows.cols);
        }
        attend(s, split, query, sums, scratch, /*exact=*/false);
        // A masked value may hold NaN, and 0 * NaN is NaN.
        if (!all_finite(sums.out)) attend(s, split, query, sums, scratch, /*exact=*/true);
    }

    void attend(const Sequence& s, int64_t split, const Matrix<acc_t>& query, const SoftmaxState<acc_t>& sums,
                Scratch& scratch, bool exact) {
        sums.start();
        const int64_t first = split * keys_per_split_;
        const auto add = [&](const KeyBlock& block) {
            const int64_t row = block.tile.head * s.rows, rows = qheads_per_list_ * s.rows;
            add_keys(block, {query.row(row), rows, query.cols, query.stride}, sums.rows(row, rows), scratch, exact);
        };
        p_.lists.present() ? walk_lists(s, first, scratch, add) : walk_keys(s, first, add);
    }

    // Calls add for the n_blocks of a split, key by key and head by head.
    template <typename F>
    void walk_keys(const Sequence& s, int64_t first, F&& add) const {
        const int64_t end = std::min(first + keys_per_split_, s.keys);
        for (int64_t j = first; j < end; j += kFewRowsKeys) {
            const int64_t keys = std::min(kFewRowsKeys, end - j);
            for (int64_t head = 0; head < p_.heads; head += qheads_per_list_) {
                const bool last = head + qheads_per_list_ == p_.heads;
                const int64_t next_key = last ? std::min(j + kFewRowsKeys, s.keys) : j;
                const int64_t next_keys = std::min(kFewRowsKeys, s.keys - next_key);
                add({{s, head, 0, s.rows, j, keys},
                     stored_keys(p_.key, s, j, keys, head),
                     stored_keys(p_.value, s, j, keys, head),
                     stored_keys(p_.key, s, next_key, next_keys, last ? 0 : head + qheads_per_list_)});
            }
        }
    }

    // Calls add for the gathered n_blocks of a split, head by head and key by key.
    template <typename F>
    void walk_lists(const Sequence& s, int64_t first, Scratch& scratch, F&& add) const {
        for (int64_t head = 0; head < p_.heads; head += qheads_per_list_) {
            const KeyList list = find_list(p_, s, head, 0, s.rows);
            const int64_t end = std::min(first + keys_per_split_, list.size);
            for (int64_t j = first; j < end; j += kFewRowsKeys) {
                const KeyList keys = list.from(j, std::min(kFewRowsKeys, end - j));
                const auto gathered = [&](const RowsView& view, acc_t* to) {
                    const StoredRows rows = stored_keys(view, s, 0, s.keys, head);
                    return stored(gather<acc_t>(rows.data, rows.dtype, rows.offset, rows.stride, keys.keys, keys.size,
                                                rows.cols, to));
                };
                add({{s, head, 0, s.rows, 0, keys.size, keys.keys, keys.rows},
                     gathered(p_.key, scratch.key.data()),
                     gathered(p_.value, scratch.value.data()),
                     StoredRows{}});
            }
        }
    }

    // Adds an n_block to the rows of the query heads that share its keys.
    void add_keys(const KeyBlock& block, const Matrix<acc_t>& query, const SoftmaxState<acc_t>& sums, Scratch& scratch,
                  bool exact) {
        const int64_t keys = block.tile.keys, rows = block.tile.rows;
        const auto tile_of = [&](int64_t i) {
            Tile tile = block.tile;
            tile.head += i;
            return tile;
        };
        int64_t i = 0;
        while (i < qheads_per_list_ && is_fully_masked(p_, tile_of(i))) ++i;
        if (i == qheads_per_list_) return;
        const Matrix<acc_t> probs{scratch.probs.data(), query.rows, keys, padded(keys)};
        row_products<acc_t>(query, block.key, p_.softmax_scale, probs, {block.value, block.next});
        for (i = 0; i < qheads_per_list_; ++i) {
            online_softmax(p_, tile_of(i), {probs.row(i * rows), rows, keys, probs.stride}, sums.rows(i * rows, rows),
                           scratch.scores);
        }
        const StoredRows& value = block.value;
        if (exact) {
            const auto widened = load<acc_t>(value.data, value.dtype, value.offset, value.stride, value.rows,
                                             value.cols, scratch.value.data());
            add_product_left<acc_t>(probs, widened, 1, exact, sums.out);
        } else {
            add_weighted_rows<acc_t>(probs, value, sums.out);
        }
    }

    StoredRows stored_keys(const RowsView& view, const Sequence& s, int64_t key, int64_t keys, int64_t head) const {
        const int64_t at = s.batch * view.batch_stride + (s.first_key + key) * view.row_stride +
                           head / qheads_per_kv_ * view.head_stride;
        return {view.data, p_.dtype, at, keys, p_.head_dim, view.row_stride};
    }

    // Merges all splits, in their order.
    void finish(const Sequence& s) {
        const auto sums = partial(s, 0);
        for (int64_t split = 1; split < num_splits_; ++split) sums.merge(partial(s, split));
        for (int64_t head = 0; head < p_.heads; ++head) sums.rows(head * s.rows, s.rows).finish(p_, s, head, 0);
    }

    const FwdParams& p_;
    int64_t qheads_per_kv_;
    int64_t qheads_per_list_;  // query heads that share keys: those of a KV head, or of a list
    int64_t keys_per_split_, num_splits_;
    Buffer<acc_t> out_, max_;
    std::vector<double> sum_;
    std::vector<std::atomic<int64_t>> finished_splits_;  // [B]
};

// Prefetches Q, K and V of the next batch element and query head: with short sequences the next task.
void prefetch_sequence(const FwdParams& p, int64_t index) {
    if (index >= p.batch * p.heads) return;
    const Sequence s(p, index / p.heads);
    const int64_t head = index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    prefetch_rows(p, p.query, s.batch, s.first_row, s.rows, head);
    prefetch_rows(p, p.key, s.batch, s.first_key, s.keys, kv_head);
    prefetch_rows(p, p.value, s.batch, s.first_key, s.keys, kv_head);
}

template <typename acc_t>
void run(const FwdParams& params) {
    if (params.seqlen_q <= kFewRows) return SplitKvFwd<acc_t>(params).run();
    // Over key lists a task has all query heads of a GQA group, which share the gathered keys.
    const int64_t m_block_rows = params.lists.present() ? params.lists.m_block_rows : kRows;
    const int64_t heads_per_task = params.lists.present() ? params.heads / params.kv_heads : 1;
    const int64_t num_m_blocks = ceil_div(params.seqlen_q, m_block_rows), head_groups = params.heads / heads_per_task;
    parallel_for_tasks(params.batch * head_groups * num_m_blocks, [&] {
        return [=, &params, task = FwdTask<acc_t>(params)](int64_t index) mutable {
            // The last rows come first: with causality they see most keys.
            const int64_t row = (num_m_blocks - 1 - index % num_m_blocks) * m_block_rows;
            const int64_t first_head = index / num_m_blocks % head_groups * heads_per_task;
            const Sequence sequence(params, index / num_m_blocks / head_groups);
            if (row >= sequence.rows) return;
            if (num_m_blocks == 1 && heads_per_task == 1) prefetch_sequence(params, index + 1);
            for (int64_t head = first_head; head < first_head + heads_per_task; ++head) {
                task(sequence, head, row, std::min(m_block_rows, sequence.rows - row));
            }
        };
    });
}

}  // namespace

void mha_fwd_cpu(const FwdParams& params) {
    params.dtype == DataType::kFloat64 ? run<double>(params) : run<float>(params);
}

}  // namespace flash_dmattn
