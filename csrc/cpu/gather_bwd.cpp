#include "gather_bwd.h"

#include <algorithm>
#include <vector>

#include "gathered_keys.h"
#include "bwd_tasks.h"
#include "relative_gradient.h"
#include "parallel.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kKeys = 256;

// The partial gradients of one KV head from one split of the m_blocks, for the keys from the first to the last in its
// lists.
template <typename acc_t>
struct DkvPartial {
    int64_t first = 0, keys = 0;
    Buffer<acc_t> dkey, dvalue;       // [keys, D]
    std::vector<double> column_sums;  // [heads of dbias that share the KV head, keys]

    void start(int64_t first_key, int64_t key_count, int64_t dim, int64_t dbias_heads) {
        first = first_key;
        keys = key_count;
        dkey.assign(keys * dim, acc_t(0));
        dvalue.assign(keys * dim, acc_t(0));
        column_sums.assign(dbias_heads * keys, 0.0);
    }
};

template <typename acc_t>
class DkvPartials {
public:
    DkvPartials(const BwdParams& p, const BwdTasks& tasks)
        : p_(p), num_splits_(tasks.num_splits),
          dbias_heads_(p.dbias.present() && p.dbias.per_key ? p.dbias.heads / p.kv_heads : 0),
          partials_(num_splits_ * p.batch * p.kv_heads) {}

    DkvPartial<acc_t>& partial(int64_t split, int64_t batch, int64_t kv_head) {
        return partials_[(split * p_.batch + batch) * p_.kv_heads + kv_head];
    }

    int64_t dbias_heads() const { return dbias_heads_; }

    // Sums the partial gradients into dkey, dvalue and dbias, in the order of the splits.
    void reduce() {
        const int64_t num_n_blocks = ceil_div(p_.seqlen_k, kKeys);
        parallel_for_tasks(p_.batch * p_.kv_heads * num_n_blocks, [&] {
            Buffer<acc_t> sums(kKeys * p_.head_dim);
            return [this, num_n_blocks, sums = std::move(sums)](int64_t index) mutable {
                const Sequence s(p_, index / num_n_blocks / p_.kv_heads);
                const int64_t kv_head = index / num_n_blocks % p_.kv_heads;
                const int64_t key = index % num_n_blocks * kKeys;
                if (key >= s.keys) return;
                const int64_t keys = std::min(kKeys, s.keys - key);
                const Matrix<acc_t> buffer{sums.data(), keys, p_.head_dim, p_.head_dim};
                reduce_rows(s, kv_head, key, buffer, &DkvPartial<acc_t>::dkey, p_.dkey);
                reduce_rows(s, kv_head, key, buffer, &DkvPartial<acc_t>::dvalue, p_.dvalue);
                for (int64_t h = 0; h < dbias_heads_; ++h) reduce_column_sums(s, kv_head, h, key, keys);
            };
        });
    }

private:
    // Calls f(partial, begin, end) for each split that has any of the keys, with the range that it has.
    template <typename F>
    void for_each_partial(const Sequence& s, int64_t kv_head, int64_t key, int64_t keys, F&& f) {
        for (int64_t split = 0; split < num_splits_; ++split) {
            const auto& from = partial(split, s.batch, kv_head);
            const int64_t begin = std::max(key, from.first), end = std::min(key + keys, from.first + from.keys);
            if (begin < end) f(from, begin, end);
        }
    }

    void reduce_rows(const Sequence& s, int64_t kv_head, int64_t key, const Matrix<acc_t>& sums,
                     Buffer<acc_t> DkvPartial<acc_t>::* rows, const RowsView& to) {
        std::fill_n(sums.data, sums.rows * sums.cols, acc_t(0));
        for_each_partial(s, kv_head, key, sums.rows, [&](const DkvPartial<acc_t>& from, int64_t begin, int64_t end) {
            const acc_t* x = (from.*rows).data() + (begin - from.first) * sums.cols;
            row_add(sums.row(begin - key), x, (end - begin) * sums.cols);
        });
        store_keys(p_, sums, to, s, key, kv_head);
    }

    void reduce_column_sums(const Sequence& s, int64_t kv_head, int64_t dbias_head, int64_t key, int64_t keys) {
        const int64_t head = (kv_head * dbias_heads_ + dbias_head) * (p_.heads / p_.dbias.heads);
        acc_t* to = static_cast<acc_t*>(p_.dbias.data) + offset_of(p_.dbias, Tile{s, head, 0, 1, key, keys}, p_.heads);
        double sums[kKeys] = {};
        for_each_partial(s, kv_head, key, keys, [&](const DkvPartial<acc_t>& from, int64_t begin, int64_t end) {
            const double* x = from.column_sums.data() + dbias_head * from.keys;
            for (int64_t j = begin; j < end; ++j) sums[j - key] += x[j - from.first];
        });
        std::copy_n(sums, keys, to);
    }

    const BwdParams& p_;
    int64_t num_splits_, dbias_heads_;
    std::vector<DkvPartial<acc_t>> partials_;
};

// A task over a split of the m_blocks. It stores dquery and a dense dbias of these rows, and partial sums of dkey,
// dvalue and the gradient of a key bias, which DkvPartials::reduce sums.
template <typename acc_t>
class GatherBwdTask {
public:
    GatherBwdTask(const BwdParams& params, const BwdTasks& tasks, DkvPartials<acc_t>& partials,
                  RelativeGradient<acc_t>& relative)
        : p_(params), tasks_(tasks), partials_(partials), relative_(relative),
          qheads_per_kv_(params.heads / params.kv_heads),
          qheads_per_list_(params.lists.heads == params.heads ? 1 : qheads_per_kv_),
          m_block_rows_(params.lists.m_block_rows), max_rows_(std::min(m_block_rows_, params.seqlen_q)),
          gradients_(params, kKeys, /*knows_deltas=*/true), gathered_(params, kKeys, /*backward=*/true),
          query_(max_rows_ * p_.head_dim), query_transposed_(query_.size()), dout_(query_.size()),
          dout_transposed_(query_.size()), dquery_(query_.size()), column_sums_(partials.dbias_heads() > 0 ? kKeys : 0),
          dense_heads_(!has_dense_dbias(params)             ? 0
                       : params.dbias.heads == params.heads ? qheads_per_list_
                                                            : 1),
          dense_rows_(dense_heads_ * max_rows_ * params.seqlen_k), transposed_(kKeys * p_.head_dim) {}

    void operator()(int64_t index) {
        // The last rows come first: with causality their lists are the longest.
        const int64_t split = tasks_.num_splits - 1 - tasks_.split(index);
        const int64_t head = tasks_.first_head(index);
        task_ = index;
        relative_.start(index);
        tasks_.for_each_group(index, [&](int64_t batch) {
            // A masked key may hold NaN, and 0 * NaN is NaN.
            if (!compute(split, batch, head, /*exact=*/false)) compute(split, batch, head, /*exact=*/true);
        });
    }

private:
    // Returns whether every gradient is finite.
    bool compute(int64_t split, int64_t first_batch, int64_t first_head, bool exact) {
        const Sequence first(p_, first_batch);
        const int64_t begin = split * tasks_.tiles_per_split * m_block_rows_;
        const int64_t end = std::min(begin + tasks_.tiles_per_split * m_block_rows_, first.rows);
        tasks_.for_each_kv_head(first_batch, first_head,
                                [&](const Sequence& s, int64_t head) { start_partial(split, s, head, begin, end); });
        bool finite = true;
        for (int64_t row = begin; row < end; row += m_block_rows_) {
            finite &= compute_m_block(split, first_batch, first_head, row, std::min(m_block_rows_, end - row), exact);
        }
        tasks_.for_each_kv_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
            finite &= is_finite(partials_.partial(split, s.batch, head / qheads_per_kv_));
        });
        return finite;
    }

    void start_partial(int64_t split, const Sequence& s, int64_t first_head, int64_t begin, int64_t end) {
        int64_t first = s.keys, last = -1;
        for (int64_t row = begin; row < end; row += m_block_rows_) {
            for (int64_t head = first_head; head < first_head + qheads_per_kv_; head += qheads_per_list_) {
                const KeyList list = find_list(p_, s, head, row, std::min(m_block_rows_, end - row));
                if (list.size == 0) continue;
                first = std::min<int64_t>(first, list.keys[0]);
                last = std::max<int64_t>(last, list.keys[list.size - 1]);
            }
        }
        partials_.partial(split, s.batch, first_head / qheads_per_kv_)
            .start(first, std::max<int64_t>(last + 1 - first, 0), p_.head_dim, partials_.dbias_heads());
    }

    // One m_block by the keys of its lists. A group spans batch elements only with fixed length, so they have the same
    // length.
    bool compute_m_block(int64_t split, int64_t first_batch, int64_t first_head, int64_t row, int64_t rows,
                         bool exact) {
        bool finite = true;
        for (int64_t head = first_head; head < first_head + tasks_.heads_per_task; head += qheads_per_list_) {
            for (int64_t b = first_batch; b < first_batch + tasks_.batches_per_task; ++b) {
                const Sequence s(p_, b);
                auto& partial = partials_.partial(split, b, head / qheads_per_kv_);
                gathered_.load(s, head, row, rows);
                const int64_t size = gathered_.size() * p_.head_dim;
                dkey_sum_.assign(size, acc_t(0));
                dvalue_sum_.assign(size, acc_t(0));
                // Each head is summed on its own first: one long chain of additions over all heads rounds more.
                for (int64_t h = head; h < head + qheads_per_list_; ++h) {
                    dkey_.assign(size, acc_t(0));
                    dvalue_.assign(size, acc_t(0));
                    finite &= add_head(s, h, row, rows, partial, exact);
                    row_add(dkey_sum_.data(), dkey_.data(), size);
                    row_add(dvalue_sum_.data(), dvalue_.data(), size);
                }
                scatter(dkey_sum_, partial, partial.dkey);
                scatter(dvalue_sum_, partial, partial.dvalue);
            }
            const Sequence s(p_, first_batch);
            for (int64_t h = head; h < head + qheads_per_list_ && dense_heads_ > 0; ++h) {
                if (tasks_.is_last_of_bias_head(h)) store_dense_dbias({s, h, row, rows, 0, s.keys});
            }
        }
        return finite;
    }

    // One query head: stores its dquery, and adds to dkey and dvalue of the list's keys. Returns whether dquery is
    // finite.
    bool add_head(const Sequence& s, int64_t head, int64_t row, int64_t rows, DkvPartial<acc_t>& partial, bool exact) {
        const auto query = load_rows(p_, p_.query, s, row, rows, head, query_.data());
        const auto dout = load_rows(p_, p_.dout, s, row, rows, head, dout_.data());
        const auto query_transposed = transpose(query, query_transposed_.data());
        const auto dout_transposed = transpose(dout, dout_transposed_.data());
        const Matrix<acc_t> dquery{dquery_.data(), rows, p_.head_dim, p_.head_dim};
        std::fill_n(dquery.data, rows * p_.head_dim, acc_t(0));
        int64_t at = 0;
        for (const auto& keys : gathered_.tiles()) {
            const int64_t n = keys.list.size;
            gradients_.compute(keys.tile(s, head, row, rows), gathered_.tiles().size() == 1, query, dout, keys.key,
                               keys.key_transposed, keys.value_transposed);
            const Matrix<acc_t> dkey{dkey_.data() + at, p_.head_dim, n, n};
            const Matrix<acc_t> dvalue{dvalue_.data() + at, p_.head_dim, n, n};
            add_product_right<acc_t>(dout_transposed, gradients_.probs, 1, exact, dvalue);
            if (dense_heads_ > 0) add_dense_rows(head, keys.list);
            if (!column_sums_.empty()) add_column_sums(head, keys.list, partial);
            if (relative_.present() && !exact) {  // the second computation of a task has the same dx
                relative_.add(task_, keys.tile(s, head, row, rows), gradients_.dx, relative_scratch_);
            }
            const auto& ds = gradients_.to_ds();
            add_product_right<acc_t>(query_transposed, ds, p_.softmax_scale, exact, dkey);
            add_product_left<acc_t>(ds, keys.key, p_.softmax_scale, exact, dquery);
            at += n * p_.head_dim;
        }
        store_rows(p_, dquery, p_.dquery, s, row, head);
        return all_finite(dquery);
    }

    // Adds the gradients of the gathered keys, [D, keys] for each n_block, to the rows of their positions.
    void scatter(Buffer<acc_t>& transposed, DkvPartial<acc_t>& partial, Buffer<acc_t>& to) {
        acc_t* from = transposed.data();
        for (const auto& keys : gathered_.tiles()) {
            const int64_t n = keys.list.size;
            const auto rows = transpose<acc_t>({from, p_.head_dim, n, n}, transposed_.data());
            for (int64_t j = 0; j < n; ++j) {
                row_add(to.data() + (keys.list.keys[j] - partial.first) * p_.head_dim, rows.row(j), p_.head_dim);
            }
            from += n * p_.head_dim;
        }
    }

    void add_column_sums(int64_t head, const KeyList& keys, DkvPartial<acc_t>& partial) {
        std::fill_n(column_sums_.begin(), keys.size, 0.0);
        gradients_.add_column_sums(column_sums_.data());
        const int64_t dbias_head = head / (p_.heads / p_.dbias.heads) % partials_.dbias_heads();
        double* to = partial.column_sums.data() + dbias_head * partial.keys;
        for (int64_t j = 0; j < keys.size; ++j) to[keys.keys[j] - partial.first] += column_sums_[j];
    }

    // The sums of dbias of the current m_block for a head, [rows, Sk]; zero between m_blocks.
    acc_t* dense_rows(int64_t head) { return dense_rows_.data() + head % dense_heads_ * max_rows_ * p_.seqlen_k; }

    void add_dense_rows(int64_t head, const KeyList& keys) {
        for (int64_t i = 0; i < gradients_.dx.rows; ++i) {
            acc_t* to = dense_rows(head) + i * p_.seqlen_k;
            const acc_t* dx = gradients_.dx.row(i);
            for (int64_t j = 0; j < keys.size; ++j) to[keys.keys[j]] += dx[j];
        }
    }

    void store_dense_dbias(const Tile& tile) {
        const Matrix<acc_t> rows{dense_rows(tile.head), tile.rows, tile.keys, p_.seqlen_k};
        store(rows, p_.dbias.data, p_.bias.dtype, offset_of(p_.dbias, tile, p_.heads), p_.dbias.row_stride);
        std::fill_n(rows.data, max_rows_ * p_.seqlen_k, acc_t(0));
    }

    bool is_finite(const DkvPartial<acc_t>& partial) const {
        const auto finite = [&](const Buffer<acc_t>& x) {
            return all_finite<acc_t>({const_cast<acc_t*>(x.data()), partial.keys, p_.head_dim, p_.head_dim});
        };
        return finite(partial.dkey) && finite(partial.dvalue);
    }

    const BwdParams& p_;
    const BwdTasks& tasks_;
    DkvPartials<acc_t>& partials_;
    RelativeGradient<acc_t>& relative_;
    int64_t task_ = 0;
    int64_t qheads_per_kv_;
    int64_t qheads_per_list_;  // query heads that share a list and a KV head
    int64_t m_block_rows_;     // rows of an m_block
    int64_t max_rows_;
    ScoreGradients<acc_t> gradients_;
    GatheredKvBlocks<acc_t> gathered_;
    Buffer<acc_t> query_, query_transposed_, dout_, dout_transposed_, dquery_;
    // [D, keys] for each n_block of gathered keys: of one head, and summed over the heads that share the list.
    Buffer<acc_t> dkey_, dvalue_, dkey_sum_, dvalue_sum_;
    std::vector<double> column_sums_;
    int64_t dense_heads_;  // heads of dbias that are summed at once
    Buffer<acc_t> dense_rows_, transposed_;
    RelativeScratch<acc_t> relative_scratch_;
};

}  // namespace

template <typename acc_t>
void gather_bwd(const BwdParams& params) {
    const BwdTasks tasks(params, ceil_div(params.seqlen_q, params.lists.m_block_rows));
    DkvPartials<acc_t> partials(params, tasks);
    RelativeGradient<acc_t> relative(params, tasks);
    parallel_for_tasks(tasks.count(), [&] { return GatherBwdTask<acc_t>(params, tasks, partials, relative); });
    partials.reduce();
    if (relative.present()) relative.reduce();
}

template void gather_bwd<float>(const BwdParams&);
template void gather_bwd<double>(const BwdParams&);

}  // namespace flash_dmattn
