#include <algorithm>
#include <memory>
#include <vector>

#include "mha_cpu.h"
#include "gather_bwd.h"
#include "bwd_tasks.h"
#include "parallel.h"
#include "relative_gradient.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kRows = kGradientRows;
constexpr int64_t kKeys = 512;

// Partial sums of dquery in the accumulation type, [num_splits, H, rows of all sequences, D], uninitialized. Absent
// where all keys are one n_block: then each tile stores its rows of dquery.
template <typename acc_t>
class DqueryPartials {
public:
    DqueryPartials(const BwdParams& p, const BwdTasks& tasks)
        : p_(p), num_splits_(p.seqlen_k <= kKeys ? 0 : tasks.num_splits),
          total_(p.cu_seqlens_q != nullptr ? p.cu_seqlens_q[p.batch] : p.batch * p.seqlen_q),
          data_(AlignedAllocator<acc_t>().allocate(num_splits_ * p.heads * total_ * p.head_dim)) {}

    bool present() const { return num_splits_ > 0; }

    Matrix<acc_t> partial(int64_t split, const Sequence& s, int64_t head, int64_t row, int64_t rows) {
        const int64_t first = p_.cu_seqlens_q != nullptr ? s.first_row : s.batch * p_.seqlen_q;
        const int64_t at = (split * p_.heads + head) * total_ + first + row;
        return {data_.get() + at * p_.head_dim, rows, p_.head_dim, p_.head_dim};
    }

    // Sums the partial sums into dquery, in the order of the splits.
    void reduce() {
        const int64_t num_m_blocks = ceil_div(p_.seqlen_q, kRows);
        parallel_for_tasks(p_.batch * p_.heads * num_m_blocks, [&] {
            return [this, num_m_blocks](int64_t index) {
                const Sequence s(p_, index / num_m_blocks / p_.heads);
                const int64_t head = index / num_m_blocks % p_.heads;
                const int64_t row = index % num_m_blocks * kRows;
                if (row >= s.rows) return;
                const int64_t rows = std::min(kRows, s.rows - row);
                const auto sum = partial(0, s, head, row, rows);
                for (int64_t split = 1; split < num_splits_; ++split) {
                    row_add(sum.data, partial(split, s, head, row, rows).data, rows * p_.head_dim);
                }
                store_rows(p_, sum, p_.dquery, s, row, head);
            };
        });
    }

private:
    const BwdParams& p_;
    int64_t num_splits_, total_;
    std::unique_ptr<acc_t, AlignedDelete> data_;  // uninitialized: each task zeroes its own
};

// A task over a split of the n_blocks. It stores dkey, dvalue and dbias of these keys, and partial sums of dquery
// and of the gradient of a relative bias, which DqueryPartials and RelativeGradient reduce.
template <typename acc_t>
class BwdTask {
public:
    BwdTask(const BwdParams& params, const BwdTasks& tasks, DqueryPartials<acc_t>& dquery,
            RelativeGradient<acc_t>& relative)
        : p_(params), tasks_(tasks), dquery_(dquery), relative_(relative),
          qheads_per_kv_(params.heads / params.kv_heads), kv_heads_per_task_(tasks.heads_per_task / qheads_per_kv_),
          dense_dbias_(has_dense_dbias(params)), key_dbias_(params.dbias.present() && params.dbias.per_key),
          max_rows_(std::min(kRows, params.seqlen_q)), max_keys_(std::min(kKeys, params.seqlen_k)),
          gradients_(params, kKeys, /*knows_deltas=*/dquery.present()), query_(max_rows_ * p_.head_dim),
          query_transposed_(padded(max_rows_) * p_.head_dim), dout_(query_.size()),
          dout_transposed_(query_transposed_.size()), dquery_rows_(dquery.present() ? 0 : query_.size()),
          // Where one m_block of one query head has all rows, a block is finished before the next begins.
          kv_blocks_(params.seqlen_q <= kRows && qheads_per_kv_ == 1 ? 1 : tasks.batches_per_task * kv_heads_per_task_,
                     KvBlock(padded(max_keys_) * p_.head_dim)),
          key_scratch_(max_keys_ * p_.head_dim), dense_sums_(dense_dbias_ ? max_rows_ * max_keys_ : 0),
          column_sums_(key_dbias_ ? tasks.heads_per_task * max_keys_ : 0) {}

    void operator()(int64_t index) {
        const int64_t split = tasks_.split(index), head = tasks_.first_head(index);
        task_ = index;
        relative_.start(index);
        tasks_.for_each_group(index, [&](int64_t batch) {
            // A masked row may hold NaN, and 0 * NaN is NaN.
            if (!compute(split, batch, head, /*exact=*/false)) compute(split, batch, head, /*exact=*/true);
        });
    }

private:
    // The current n_block of one KV head and batch element, and its gradients. Gradients are [D, keys], which is faster
    // in the BLAS.
    struct KvBlock {
        explicit KvBlock(int64_t size)
            : key_(size), key_transposed_(size), value_transposed_(size), dkey_(size), dvalue_(size) {}

        void start(const BwdParams& p, const Sequence& s, int64_t first, int64_t keys, int64_t kv_head,
                   acc_t* scratch) {
            key = load_keys(p, p.key, s, first, keys, kv_head, key_.data());
            const auto value = load_keys(p, p.value, s, first, keys, kv_head, scratch);
            if (!has_few_rows(s)) key_transposed = transpose(key, key_transposed_.data(), padded(keys));
            value_transposed = transpose(value, value_transposed_.data(), padded(keys));
            dkey = {dkey_.data(), p.head_dim, keys, padded(keys)};
            dvalue = {dvalue_.data(), p.head_dim, keys, padded(keys)};
            std::fill(dkey_.begin(), dkey_.end(), acc_t(0));
            std::fill(dvalue_.begin(), dvalue_.end(), acc_t(0));
        }

        Matrix<acc_t> key{}, key_transposed{}, value_transposed{}, dkey{}, dvalue{};

    private:
        Buffer<acc_t> key_, key_transposed_, value_transposed_, dkey_, dvalue_;
    };

    // Returns whether every gradient is finite.
    bool compute(int64_t split, int64_t first_batch, int64_t first_head, bool exact) {
        bool finite = true;
        const auto for_each_dquery = [&](auto&& f) {
            if (!dquery_.present()) return;
            tasks_.for_each_query_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
                f(dquery_.partial(split, s, head, 0, s.rows));
            });
        };
        for_each_dquery([](const Matrix<acc_t>& rows) { std::fill_n(rows.data, rows.rows * rows.cols, acc_t(0)); });
        const int64_t num_keys = Sequence(p_, first_batch).keys;
        if (num_keys == 0 && !dquery_.present()) store_zero_dquery(first_batch, first_head);
        const int64_t end = std::min((split + 1) * tasks_.tiles_per_split * kKeys, num_keys);
        for (int64_t key = split * tasks_.tiles_per_split * kKeys; key < end; key += kKeys) {
            finite &= compute_n_block(split, first_batch, first_head, key, std::min(kKeys, end - key), exact);
        }
        for_each_dquery([&](const Matrix<acc_t>& rows) { finite &= all_finite(rows); });
        return finite;
    }

    // One n_block by all rows. A group spans batch elements only with fixed length, so they have the same length.
    bool compute_n_block(int64_t split, int64_t first_batch, int64_t first_head, int64_t key, int64_t keys,
                         bool exact) {
        std::fill(column_sums_.begin(), column_sums_.end(), 0.0);
        bool finite = true;
        const Sequence first(p_, first_batch);
        const int64_t visible_begin = p_.is_causal ? first.causal_begin(key) / kRows * kRows : 0;
        const int64_t last_row = std::max<int64_t>(ceil_div(first.rows, kRows) - 1, 0) * kRows;
        const int64_t first_row = dense_dbias_ || !dquery_.present() ? 0 : std::min(visible_begin, last_row);
        for (int64_t row = first_row; row <= last_row; row += kRows) {
            const int64_t rows = std::min(kRows, first.rows - row);
            for (int64_t head = first_head; head < first_head + tasks_.heads_per_task; ++head) {
                const bool starts = row == first_row && head % qheads_per_kv_ == 0;
                const bool ends = row == last_row && (head + 1) % qheads_per_kv_ == 0;
                for (int64_t b = first_batch; b < first_batch + tasks_.batches_per_task; ++b) {
                    const Sequence s(p_, b);
                    KvBlock& block = kv_block(b - first_batch, head - first_head);
                    if (starts) block.start(p_, s, key, keys, head / qheads_per_kv_, key_scratch_.data());
                    const int64_t seen_end = p_.is_causal ? s.causal_end(row + rows - 1) : s.keys;
                    const int64_t seen = std::min(seen_end - key, keys);
                    const Tile tile{s, head, row, rows, key, seen};
                    const auto dquery = rows_of_dquery(split, tile);
                    if (row >= visible_begin && rows > 0 && !is_fully_masked(p_, tile)) {
                        add_tile(tile, seen == seen_end, block, dquery, head - first_head, exact);
                    }
                    if (!dquery_.present()) {
                        finite &= all_finite(dquery);
                        store_rows(p_, dquery, p_.dquery, s, row, head);
                    }
                    if (ends) {
                        finite &= store_transposed(block.dkey, p_.dkey, s, key, head / qheads_per_kv_);
                        finite &= store_transposed(block.dvalue, p_.dvalue, s, key, head / qheads_per_kv_);
                    }
                }
                if (dense_dbias_ && tasks_.is_last_of_bias_head(head))
                    store_dense_dbias({first, head, row, rows, key, keys});
            }
        }
        tasks_.for_each_query_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
            if (key_dbias_ && tasks_.is_last_of_bias_head(head))
                store_key_dbias({s, head, 0, 1, key, keys}, head - first_head);
        });
        return finite;
    }

    // Where dquery of a tile is summed; zeroed here where the tile stores it.
    Matrix<acc_t> rows_of_dquery(int64_t split, const Tile& tile) {
        if (dquery_.present()) return dquery_.partial(split, tile.sequence, tile.head, tile.row, tile.rows);
        std::fill_n(dquery_rows_.data(), tile.rows * p_.head_dim, acc_t(0));
        return {dquery_rows_.data(), tile.rows, p_.head_dim, p_.head_dim};
    }

    // Without keys there is no tile that would store dquery.
    void store_zero_dquery(int64_t first_batch, int64_t first_head) {
        tasks_.for_each_query_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
            for (int64_t row = 0; row < s.rows; row += kRows) {
                const Tile tile{s, head, row, std::min(kRows, s.rows - row), 0, 0};
                store_rows(p_, rows_of_dquery(0, tile), p_.dquery, s, row, head);
            }
        });
    }

    void add_tile(const Tile& tile, bool has_all_keys, KvBlock& block, const Matrix<acc_t>& dquery,
                  int64_t head_in_group, bool exact) {
        const Sequence& s = tile.sequence;
        const auto query = load_rows(p_, p_.query, s, tile.row, tile.rows, tile.head, query_.data());
        const auto dout = load_rows(p_, p_.dout, s, tile.row, tile.rows, tile.head, dout_.data());
        const auto query_transposed = transpose(query, query_transposed_.data(), padded(tile.rows));
        const auto dout_transposed = transpose(dout, dout_transposed_.data(), padded(tile.rows));

        const auto key = block.key.first_rows(tile.keys);
        gradients_.compute(tile, has_all_keys, query, dout, key, block.key_transposed.first_cols(tile.keys),
                           block.value_transposed.first_cols(tile.keys));
        add_product_right<acc_t>(dout_transposed, gradients_.probs, 1, exact, block.dvalue.first_cols(tile.keys));
        for (int64_t i = 0; i < tile.rows && dense_dbias_; ++i) {
            row_add(dense_sums_.data() + i * max_keys_, gradients_.dx.row(i), tile.keys);
        }
        if (key_dbias_) add_column_sums(head_in_group);
        // The second computation of a task has the same dx.
        if (relative_.present() && !exact) relative_.add(task_, tile, gradients_.dx, relative_scratch_);
        const auto& ds = gradients_.to_ds();
        add_product_right<acc_t>(query_transposed, ds, p_.softmax_scale, exact, block.dkey.first_cols(tile.keys));
        add_product_left<acc_t>(ds, key, p_.softmax_scale, exact, dquery);
    }

    KvBlock& kv_block(int64_t batch_in_group, int64_t head_in_group) {
        return kv_blocks_[kv_blocks_.size() == 1
                              ? 0
                              : batch_in_group * kv_heads_per_task_ + head_in_group / qheads_per_kv_];
    }

    // Returns whether the gradient is finite.
    bool store_transposed(const Matrix<acc_t>& transposed, const RowsView& to, const Sequence& s, int64_t key,
                          int64_t kv_head) {
        const auto rows = transpose(transposed, key_scratch_.data());
        store_keys(p_, rows, to, s, key, kv_head);
        return all_finite(rows);
    }

    void add_column_sums(int64_t head_in_group) {
        const int64_t bias_head = head_in_group / (p_.heads / p_.dbias.heads);
        gradients_.add_column_sums(column_sums_.data() + bias_head * max_keys_);
    }

    void store_key_dbias(const Tile& tile, int64_t head_in_group) {
        const int64_t bias_head = head_in_group / (p_.heads / p_.dbias.heads);
        acc_t* to = static_cast<acc_t*>(p_.dbias.data) + offset_of(p_.dbias, tile, p_.heads);
        std::copy_n(column_sums_.data() + bias_head * max_keys_, tile.keys, to);
    }

    void store_dense_dbias(const Tile& tile) {
        const Matrix<acc_t> sums{dense_sums_.data(), tile.rows, tile.keys, max_keys_};
        store(sums, p_.dbias.data, p_.bias.dtype, offset_of(p_.dbias, tile, p_.heads), p_.dbias.row_stride);
        std::fill(dense_sums_.begin(), dense_sums_.end(), acc_t(0));
    }

    const BwdParams& p_;
    const BwdTasks& tasks_;
    DqueryPartials<acc_t>& dquery_;
    RelativeGradient<acc_t>& relative_;
    int64_t task_ = 0;
    int64_t qheads_per_kv_, kv_heads_per_task_;
    bool dense_dbias_, key_dbias_;
    int64_t max_rows_, max_keys_;
    ScoreGradients<acc_t> gradients_;
    Buffer<acc_t> query_, query_transposed_, dout_, dout_transposed_, dquery_rows_;
    std::vector<KvBlock> kv_blocks_;
    Buffer<acc_t> key_scratch_, dense_sums_;
    std::vector<double> column_sums_;  // float64, because there may be thousands of rows
    RelativeScratch<acc_t> relative_scratch_;
};

template <typename acc_t>
void run(const BwdParams& params) {
    const BwdTasks tasks(params, ceil_div(params.seqlen_k, kKeys));
    DqueryPartials<acc_t> dquery(params, tasks);
    if (params.lists.present() || dquery.present()) row_deltas<acc_t>(params);  // else each tile computes D_i
    if (params.lists.present()) return gather_bwd<acc_t>(params);
    RelativeGradient<acc_t> relative(params, tasks);
    parallel_for_tasks(tasks.count(), [&] { return BwdTask<acc_t>(params, tasks, dquery, relative); });
    if (dquery.present()) dquery.reduce();
    if (relative.present()) relative.reduce();
}

}  // namespace

void mha_bwd_cpu(const BwdParams& params) {
    params.dtype == DataType::kFloat64 ? run<double>(params) : run<float>(params);
}

}  // namespace flash_dmattn
