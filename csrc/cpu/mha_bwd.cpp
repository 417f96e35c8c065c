#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "gather_bwd.h"
#include "gradient.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kRows = kGradientRows;
constexpr int64_t kKeys = 512;

// The parts of dquery in the accumulation type, one [H, rows of all sequences, D] for each run of key tiles; nothing is in
// it at first. Where all keys are one tile there are none: each tile of pairs then makes its rows of dquery whole.
template <typename acc_t>
class DqueryParts {
public:
    DqueryParts(const BwdParams& p, const GradientUnits& units)
        : p_(p),
          runs_(p.seqlen_k <= kKeys ? 0 : units.runs),
          total_(p.cu_seqlens_q != nullptr ? p.cu_seqlens_q[p.batch] : p.batch * p.seqlen_q),
          data_(AlignedAllocator<acc_t>().allocate(runs_ * p.heads * total_ * p.head_dim)) {}

    bool present() const { return runs_ > 0; }

    Matrix<acc_t> part(int64_t run, const Sequence& s, int64_t head, int64_t row, int64_t rows) {
        const int64_t first = p_.cu_seqlens_q != nullptr ? s.first_row : s.batch * p_.seqlen_q;
        const int64_t at = (run * p_.heads + head) * total_ + first + row;
        return {data_.get() + at * p_.head_dim, rows, p_.head_dim, p_.head_dim};
    }

    // Sums the parts into dquery, in the order of the runs.
    void reduce() {
        const int64_t num_m_blocks = ceil_div(p_.seqlen_q, kRows);
        for_each_unit(p_.batch * p_.heads * num_m_blocks, [&] {
            return [this, num_m_blocks](int64_t index) {
                const Sequence s(p_, index / num_m_blocks / p_.heads);
                const int64_t head = index / num_m_blocks % p_.heads;
                const int64_t row = index % num_m_blocks * kRows;
                if (row >= s.rows) return;
                const int64_t rows = std::min(kRows, s.rows - row);
                const auto sum = part(0, s, head, row, rows);
                for (int64_t run = 1; run < runs_; ++run) {
                    row_add(sum.data, part(run, s, head, row, rows).data, rows * p_.head_dim);
                }
                store_rows(p_, sum, p_.dquery, s, row, head);
            };
        });
    }

private:
    const BwdParams& p_;
    int64_t runs_, total_;
    std::unique_ptr<acc_t, AlignedDelete> data_;  // uninitialized: every unit starts its part
};

// One unit of work, over a run of key tiles: it makes dkey, dvalue and dbias of those keys whole; of dquery it makes a
// part, summed over the runs afterwards.
template <typename acc_t>
class BackwardUnit {
public:
    BackwardUnit(const BwdParams& params, const GradientUnits& units, DqueryParts<acc_t>& dquery)
        : p_(params),
          units_(units),
          dquery_(dquery),
          group_(params.heads / params.kv_heads),
          kv_heads_each_(units.heads_each / group_),
          dense_dbias_(has_dense_dbias(params)),
          key_dbias_(params.dbias.present() && params.dbias.per_key),
          max_rows_(std::min(kRows, params.seqlen_q)),
          max_keys_(std::min(kKeys, params.seqlen_k)),
          tile_(params, kKeys),
          query_(max_rows_ * p_.head_dim),
          query_transposed_(padded(max_rows_) * p_.head_dim),
          dout_(query_.size()),
          dout_transposed_(query_transposed_.size()),
          dquery_rows_(dquery.present() ? 0 : query_.size()),
          deltas_(params),
          // Where one tile of one query head has all rows, a member is done before the next is begun.
          members_(params.seqlen_q <= kRows && group_ == 1 ? 1 : units.batches_each * kv_heads_each_,
                   Member(padded(max_keys_) * p_.head_dim)),
          key_scratch_(max_keys_ * p_.head_dim),
          dense_tile_(dense_dbias_ ? max_rows_ * max_keys_ : 0),
          column_sums_(key_dbias_ ? units.heads_each * max_keys_ : 0) {}

    void operator()(int64_t index) {
        const int64_t run = units_.run(index), head = units_.first_head(index), batch = units_.first_batch(index);
        // Zero times what stands in an invisible row may have been NaN.
        if (!differentiate(run, batch, head, /*exact=*/false)) differentiate(run, batch, head, /*exact=*/true);
    }

private:
    // One key/value head of one batch element: the tile of keys under way, and the gradients that grow with it, transposed
    // [D, keys] as the BLAS likes them.
    struct Member {
        explicit Member(int64_t size)
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
    bool differentiate(int64_t run, int64_t first_batch, int64_t first_head, bool exact) {
        bool finite = true;
        const auto for_each_dquery = [&](auto&& f) {
            if (!dquery_.present()) return;
            units_.for_each_query_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
                f(dquery_.part(run, s, head, 0, s.rows));
            });
        };
        for_each_dquery([](const Matrix<acc_t>& rows) { std::fill_n(rows.data, rows.rows * rows.cols, acc_t(0)); });
        const int64_t longest = Sequence(p_, first_batch).keys;
        if (longest == 0 && !dquery_.present()) store_no_dquery(first_batch, first_head);
        const int64_t end = std::min((run + 1) * units_.tiles_each * kKeys, longest);
        for (int64_t key = run * units_.tiles_each * kKeys; key < end; key += kKeys) {
            finite &= differentiate_keys(run, first_batch, first_head, key, std::min(kKeys, end - key), exact);
        }
        for_each_dquery([&](const Matrix<acc_t>& rows) { finite &= all_finite(rows); });
        return finite;
    }

    // One key tile against all rows. The batch elements of a group have one length: a group spans them only where the
    // length is fixed.
    bool differentiate_keys(int64_t run, int64_t first_batch, int64_t first_head, int64_t key, int64_t keys,
                            bool exact) {
        std::fill(column_sums_.begin(), column_sums_.end(), 0.0);
        bool finite = true;
        const Sequence first(p_, first_batch);
        const int64_t visible_begin = p_.is_causal ? first.causal_begin(key) / kRows * kRows : 0;
        const int64_t last_row = std::max<int64_t>(ceil_div(first.rows, kRows) - 1, 0) * kRows;
        const int64_t first_row = dense_dbias_ || !dquery_.present() ? 0 : std::min(visible_begin, last_row);
        for (int64_t row = first_row; row <= last_row; row += kRows) {
            const int64_t rows = std::min(kRows, first.rows - row);
            for (int64_t head = first_head; head < first_head + units_.heads_each; ++head) {
                const bool starts = row == first_row && head % group_ == 0;
                const bool ends = row == last_row && (head + 1) % group_ == 0;
                for (int64_t b = first_batch; b < first_batch + units_.batches_each; ++b) {
                    const Sequence s(p_, b);
                    Member& m = member(b - first_batch, head - first_head);
                    if (starts) m.start(p_, s, key, keys, head / group_, key_scratch_.data());
                    const int64_t seen = p_.is_causal ? std::min(s.causal_end(row + rows - 1) - key, keys) : keys;
                    const Tile tile{s, head, row, rows, key, seen};
                    const auto dquery = rows_of_dquery(run, tile);
                    if (row >= visible_begin && rows > 0 && !mask_hides(p_, tile)) {
                        add_tile(tile, m, dquery, head - first_head, exact);
                    }
                    if (!dquery_.present()) {
                        finite &= all_finite(dquery);
                        store_rows(p_, dquery, p_.dquery, s, row, head);
                    }
                    if (ends) {
                        finite &= store_transposed(m.dkey, p_.dkey, s, key, head / group_);
                        finite &= store_transposed(m.dvalue, p_.dvalue, s, key, head / group_);
                    }
                }
                if (dense_dbias_ && units_.last_of_bias_head(head))
                    store_dense_dbias({first, head, row, rows, key, keys});
            }
        }
        units_.for_each_query_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
            if (key_dbias_ && units_.last_of_bias_head(head))
                store_key_dbias({s, head, 0, 1, key, keys}, head - first_head);
        });
        return finite;
    }

    // Where a tile's gradient of the query is summed; nothing is in it where the tile makes it whole.
    Matrix<acc_t> rows_of_dquery(int64_t run, const Tile& tile) {
        if (dquery_.present()) return dquery_.part(run, tile.sequence, tile.head, tile.row, tile.rows);
        std::fill_n(dquery_rows_.data(), tile.rows * p_.head_dim, acc_t(0));
        return {dquery_rows_.data(), tile.rows, p_.head_dim, p_.head_dim};
    }

    // Where there are no keys there is no tile either.
    void store_no_dquery(int64_t first_batch, int64_t first_head) {
        units_.for_each_query_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
            for (int64_t row = 0; row < s.rows; row += kRows) {
                const Tile tile{s, head, row, std::min(kRows, s.rows - row), 0, 0};
                store_rows(p_, rows_of_dquery(0, tile), p_.dquery, s, row, head);
            }
        });
    }

    void add_tile(const Tile& tile, Member& m, const Matrix<acc_t>& dquery, int64_t head_in_group, bool exact) {
        const Sequence& s = tile.sequence;
        if (!dquery_.present()) deltas_(s, tile.head, tile.row, tile.rows);
        const auto query = load_rows(p_, p_.query, s, tile.row, tile.rows, tile.head, query_.data());
        const auto dout = load_rows(p_, p_.dout, s, tile.row, tile.rows, tile.head, dout_.data());
        const auto query_transposed = transpose(query, query_transposed_.data(), padded(tile.rows));
        const auto dout_transposed = transpose(dout, dout_transposed_.data(), padded(tile.rows));

        const auto key = m.key.first_rows(tile.keys);
        tile_.compute(tile, query, dout, key, m.key_transposed.first_cols(tile.keys),
                      m.value_transposed.first_cols(tile.keys));
        add_product_right<acc_t>(dout_transposed, tile_.probs, 1, exact, m.dvalue.first_cols(tile.keys));
        for (int64_t i = 0; i < tile.rows && dense_dbias_; ++i) {
            row_add(dense_tile_.data() + i * max_keys_, tile_.dx.row(i), tile.keys);
        }
        if (key_dbias_) add_column_sums(head_in_group);
        const auto& ds = tile_.to_ds();
        add_product_right<acc_t>(query_transposed, ds, p_.softmax_scale, exact, m.dkey.first_cols(tile.keys));
        add_product_left<acc_t>(ds, key, p_.softmax_scale, exact, dquery);
    }

    Member& member(int64_t batch_in_group, int64_t head_in_group) {
        return members_[members_.size() == 1 ? 0 : batch_in_group * kv_heads_each_ + head_in_group / group_];
    }

    // Returns whether it is finite.
    bool store_transposed(const Matrix<acc_t>& transposed, const RowsView& to, const Sequence& s, int64_t key,
                          int64_t kv_head) {
        const auto rows = transpose(transposed, key_scratch_.data());
        store_keys(p_, rows, to, s, key, kv_head);
        return all_finite(rows);
    }

    void add_column_sums(int64_t head_in_group) {
        const int64_t bias_head = head_in_group / (p_.heads / p_.dbias.heads);
        tile_.add_column_sums(column_sums_.data() + bias_head * max_keys_);
    }

    void store_key_dbias(const Tile& tile, int64_t head_in_group) {
        const int64_t bias_head = head_in_group / (p_.heads / p_.dbias.heads);
        acc_t* to = static_cast<acc_t*>(p_.dbias.data) + offset_of(p_.dbias, tile, p_.heads);
        std::copy_n(column_sums_.data() + bias_head * max_keys_, tile.keys, to);
    }

    void store_dense_dbias(const Tile& tile) {
        const Matrix<acc_t> sums{dense_tile_.data(), tile.rows, tile.keys, max_keys_};
        store(sums, p_.dbias.data, p_.bias.dtype, offset_of(p_.dbias, tile, p_.heads), p_.dbias.row_stride);
        std::fill(dense_tile_.begin(), dense_tile_.end(), acc_t(0));
    }

    const BwdParams& p_;
    const GradientUnits& units_;
    DqueryParts<acc_t>& dquery_;
    int64_t group_, kv_heads_each_;
    bool dense_dbias_, key_dbias_;
    int64_t max_rows_, max_keys_;
    GradientTile<acc_t> tile_;
    Buffer<acc_t> query_, query_transposed_, dout_, dout_transposed_, dquery_rows_;
    RowDeltas<acc_t> deltas_;
    std::vector<Member> members_;
    Buffer<acc_t> key_scratch_, dense_tile_;
    std::vector<double> column_sums_;  // of thousands of rows
};

template <typename acc_t>
void run(const BwdParams& params) {
    const GradientUnits units(params, ceil_div(params.seqlen_k, kKeys));
    DqueryParts<acc_t> dquery(params, units);
    if (params.lists.present() || dquery.present()) row_deltas<acc_t>(params);  // else each tile does
    if (params.lists.present()) return gathered_backward<acc_t>(params);
    for_each_unit(units.count(), [&] { return BackwardUnit<acc_t>(params, units, dquery); });
    if (dquery.present()) dquery.reduce();
}

}  // namespace

void mha_bwd_cpu(const BwdParams& params) {
    params.dtype == DataType::kFloat64 ? run<double>(params) : run<float>(params);
}

}  // namespace flash_dmattn
