#include "gather_bwd.h"

#include <algorithm>
#include <vector>

#include "gather.h"
#include "gradient.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kKeys = 256;

// What one run of row tiles gives to the gradients of one key/value head, for the keys from the first to the last that
// its lists name.
template <typename acc_t>
struct KeyPart {
    int64_t first = 0, keys = 0;
    Buffer<acc_t> dkey, dvalue;       // [keys, D]
    std::vector<double> column_sums;  // [heads of dbias that share the key/value head, keys]

    void start(int64_t first_key, int64_t key_count, int64_t dim, int64_t dbias_heads) {
        first = first_key;
        keys = key_count;
        dkey.assign(keys * dim, acc_t(0));
        dvalue.assign(keys * dim, acc_t(0));
        column_sums.assign(dbias_heads * keys, 0.0);
    }
};

template <typename acc_t>
class KeyParts {
public:
    KeyParts(const BwdParams& p, const GradientUnits& units)
        : p_(p),
          runs_(units.runs),
          dbias_heads_(p.dbias.present() && p.dbias.per_key ? p.dbias.heads / p.kv_heads : 0),
          parts_(runs_ * p.batch * p.kv_heads) {}

    KeyPart<acc_t>& part(int64_t run, int64_t batch, int64_t kv_head) {
        return parts_[(run * p_.batch + batch) * p_.kv_heads + kv_head];
    }

    int64_t dbias_heads() const { return dbias_heads_; }

    // Sums the parts into dkey, dvalue and dbias, in the order of the runs.
    void reduce() {
        const int64_t num_n_blocks = ceil_div(p_.seqlen_k, kKeys);
        for_each_unit(p_.batch * p_.kv_heads * num_n_blocks, [&] {
            Buffer<acc_t> sums(kKeys * p_.head_dim);
            return [this, num_n_blocks, sums = std::move(sums)](int64_t index) mutable {
                const Sequence s(p_, index / num_n_blocks / p_.kv_heads);
                const int64_t kv_head = index / num_n_blocks % p_.kv_heads;
                const int64_t key = index % num_n_blocks * kKeys;
                if (key >= s.keys) return;
                const int64_t keys = std::min(kKeys, s.keys - key);
                const Matrix<acc_t> room{sums.data(), keys, p_.head_dim, p_.head_dim};
                reduce_rows(s, kv_head, key, room, &KeyPart<acc_t>::dkey, p_.dkey);
                reduce_rows(s, kv_head, key, room, &KeyPart<acc_t>::dvalue, p_.dvalue);
                for (int64_t h = 0; h < dbias_heads_; ++h) reduce_column_sums(s, kv_head, h, key, keys);
            };
        });
    }

private:
    // Calls f(part, begin, end) for every run's part, with those of the keys that it holds.
    template <typename F>
    void for_each_part(const Sequence& s, int64_t kv_head, int64_t key, int64_t keys, F&& f) {
        for (int64_t run = 0; run < runs_; ++run) {
            const auto& from = part(run, s.batch, kv_head);
            const int64_t begin = std::max(key, from.first), end = std::min(key + keys, from.first + from.keys);
            if (begin < end) f(from, begin, end);
        }
    }

    void reduce_rows(const Sequence& s, int64_t kv_head, int64_t key, const Matrix<acc_t>& sums,
                     Buffer<acc_t> KeyPart<acc_t>::* rows, const RowsView& to) {
        std::fill_n(sums.data, sums.rows * sums.cols, acc_t(0));
        for_each_part(s, kv_head, key, sums.rows, [&](const KeyPart<acc_t>& from, int64_t begin, int64_t end) {
            const acc_t* x = (from.*rows).data() + (begin - from.first) * sums.cols;
            row_add(sums.row(begin - key), x, (end - begin) * sums.cols);
        });
        store_keys(p_, sums, to, s, key, kv_head);
    }

    void reduce_column_sums(const Sequence& s, int64_t kv_head, int64_t dbias_head, int64_t key, int64_t keys) {
        const int64_t head = (kv_head * dbias_heads_ + dbias_head) * (p_.heads / p_.dbias.heads);
        acc_t* to = static_cast<acc_t*>(p_.dbias.data) + offset_of(p_.dbias, Tile{s, head, 0, 1, key, keys}, p_.heads);
        double sums[kKeys] = {};
        for_each_part(s, kv_head, key, keys, [&](const KeyPart<acc_t>& from, int64_t begin, int64_t end) {
            const double* x = from.column_sums.data() + dbias_head * from.keys;
            for (int64_t j = begin; j < end; ++j) sums[j - key] += x[j - from.first];
        });
        std::copy_n(sums, keys, to);
    }

    const BwdParams& p_;
    int64_t runs_, dbias_heads_;
    std::vector<KeyPart<acc_t>> parts_;
};

// One unit of work, over a run of row tiles: it makes dquery and a dense dbias of those rows whole; of dkey, dvalue and
// the column sums of a key bias it makes a part, summed over the runs afterwards.
template <typename acc_t>
class BackwardUnit {
public:
    BackwardUnit(const BwdParams& params, const GradientUnits& units, KeyParts<acc_t>& parts)
        : p_(params),
          units_(units),
          parts_(parts),
          group_(params.heads / params.kv_heads),
          sharing_(params.lists.heads == params.heads ? 1 : group_),
          rows_each_(params.lists.tile_rows),
          max_rows_(std::min(rows_each_, params.seqlen_q)),
          tile_(params, kKeys),
          gathered_(params, kKeys, /*backward=*/true),
          query_(max_rows_ * p_.head_dim),
          query_transposed_(query_.size()),
          dout_(query_.size()),
          dout_transposed_(query_.size()),
          dquery_(query_.size()),
          column_sums_(parts.dbias_heads() > 0 ? kKeys : 0),
          dense_slots_(!has_dense_dbias(params)             ? 0
                       : params.dbias.heads == params.heads ? sharing_
                                                            : 1),
          dense_rows_(dense_slots_ * max_rows_ * params.seqlen_k),
          transposed_(kKeys * p_.head_dim) {}

    void operator()(int64_t index) {
        // The last rows come first: under causality they are the longest.
        const int64_t run = units_.runs - 1 - units_.run(index);
        const int64_t head = units_.first_head(index), batch = units_.first_batch(index);
        // Zero times what stands in an invisible row may have been NaN.
        if (!differentiate(run, batch, head, /*exact=*/false)) differentiate(run, batch, head, /*exact=*/true);
    }

private:
    // Returns whether every gradient is finite.
    bool differentiate(int64_t run, int64_t first_batch, int64_t first_head, bool exact) {
        const Sequence first(p_, first_batch);
        const int64_t begin = run * units_.tiles_each * rows_each_;
        const int64_t end = std::min(begin + units_.tiles_each * rows_each_, first.rows);
        units_.for_each_kv_head(first_batch, first_head,
                                [&](const Sequence& s, int64_t head) { start_part(run, s, head, begin, end); });
        bool finite = true;
        for (int64_t row = begin; row < end; row += rows_each_) {
            finite &= differentiate_rows(run, first_batch, first_head, row, std::min(rows_each_, end - row), exact);
        }
        units_.for_each_kv_head(first_batch, first_head, [&](const Sequence& s, int64_t head) {
            finite &= is_finite(parts_.part(run, s.batch, head / group_));
        });
        return finite;
    }

    void start_part(int64_t run, const Sequence& s, int64_t first_head, int64_t begin, int64_t end) {
        int64_t first = s.keys, last = -1;
        for (int64_t row = begin; row < end; row += rows_each_) {
            for (int64_t head = first_head; head < first_head + group_; head += sharing_) {
                const KeyList list = list_of(p_, s, head, row, std::min(rows_each_, end - row));
                if (list.size == 0) continue;
                first = std::min<int64_t>(first, list.keys[0]);
                last = std::max<int64_t>(last, list.keys[list.size - 1]);
            }
        }
        parts_.part(run, s.batch, first_head / group_)
            .start(first, std::max<int64_t>(last + 1 - first, 0), p_.head_dim, parts_.dbias_heads());
    }

    // One row tile against the keys of its lists. The batch elements of a group have one length: a group spans them
    // only where the length is fixed.
    bool differentiate_rows(int64_t run, int64_t first_batch, int64_t first_head, int64_t row, int64_t rows,
                            bool exact) {
        bool finite = true;
        for (int64_t head = first_head; head < first_head + units_.heads_each; head += sharing_) {
            for (int64_t b = first_batch; b < first_batch + units_.batches_each; ++b) {
                const Sequence s(p_, b);
                auto& part = parts_.part(run, b, head / group_);
                gathered_.load(s, head, row, rows);
                dkey_.assign(gathered_.size() * p_.head_dim, acc_t(0));
                dvalue_.assign(dkey_.size(), acc_t(0));
                for (int64_t h = head; h < head + sharing_; ++h) finite &= add_head(s, h, row, rows, part, exact);
                scatter(dkey_, part, part.dkey);
                scatter(dvalue_, part, part.dvalue);
            }
            const Sequence s(p_, first_batch);
            for (int64_t h = head; h < head + sharing_ && dense_slots_ > 0; ++h) {
                if (units_.last_of_bias_head(h)) store_dense_dbias({s, h, row, rows, 0, s.keys});
            }
        }
        return finite;
    }

    // One query head's rows: makes its dquery, and adds to what the keys of the list get. Returns whether dquery is
    // finite.
    bool add_head(const Sequence& s, int64_t head, int64_t row, int64_t rows, KeyPart<acc_t>& part, bool exact) {
        const auto query = load_rows(p_, p_.query, s, row, rows, head, query_.data());
        const auto dout = load_rows(p_, p_.dout, s, row, rows, head, dout_.data());
        const auto query_transposed = transpose(query, query_transposed_.data());
        const auto dout_transposed = transpose(dout, dout_transposed_.data());
        const Matrix<acc_t> dquery{dquery_.data(), rows, p_.head_dim, p_.head_dim};
        std::fill_n(dquery.data, rows * p_.head_dim, acc_t(0));
        int64_t at = 0;
        for (const auto& keys : gathered_.tiles()) {
            const int64_t n = keys.list.size;
            tile_.compute(keys.tile(s, head, row, rows), query, dout, keys.key, keys.key_transposed,
                          keys.value_transposed);
            const Matrix<acc_t> dkey{dkey_.data() + at, p_.head_dim, n, n};
            const Matrix<acc_t> dvalue{dvalue_.data() + at, p_.head_dim, n, n};
            add_product_right<acc_t>(dout_transposed, tile_.probs, 1, exact, dvalue);
            if (dense_slots_ > 0) add_dense_rows(head, keys.list);
            if (!column_sums_.empty()) add_column_sums(head, keys.list, part);
            const auto& ds = tile_.to_ds();
            add_product_right<acc_t>(query_transposed, ds, p_.softmax_scale, exact, dkey);
            add_product_left<acc_t>(ds, keys.key, p_.softmax_scale, exact, dquery);
            at += n * p_.head_dim;
        }
        store_rows(p_, dquery, p_.dquery, s, row, head);
        return all_finite(dquery);
    }

    // The gradients of the gathered keys, transposed [D, keys] a tile after the other, home to their places.
    void scatter(Buffer<acc_t>& transposed, KeyPart<acc_t>& part, Buffer<acc_t>& to) {
        acc_t* from = transposed.data();
        for (const auto& keys : gathered_.tiles()) {
            const int64_t n = keys.list.size;
            const auto rows = transpose<acc_t>({from, p_.head_dim, n, n}, transposed_.data());
            for (int64_t j = 0; j < n; ++j) {
                row_add(to.data() + (keys.list.keys[j] - part.first) * p_.head_dim, rows.row(j), p_.head_dim);
            }
            from += n * p_.head_dim;
        }
    }

    void add_column_sums(int64_t head, const KeyList& keys, KeyPart<acc_t>& part) {
        std::fill_n(column_sums_.begin(), keys.size, 0.0);
        tile_.add_column_sums(column_sums_.data());
        const int64_t dbias_head = head / (p_.heads / p_.dbias.heads) % parts_.dbias_heads();
        double* to = part.column_sums.data() + dbias_head * part.keys;
        for (int64_t j = 0; j < keys.size; ++j) to[keys.keys[j] - part.first] += column_sums_[j];
    }

    // The rows of dbias that grow with the tile of rows, [rows, Sk]; zero at first.
    acc_t* dense_rows(int64_t head) { return dense_rows_.data() + head % dense_slots_ * max_rows_ * p_.seqlen_k; }

    void add_dense_rows(int64_t head, const KeyList& keys) {
        for (int64_t i = 0; i < tile_.dx.rows; ++i) {
            acc_t* to = dense_rows(head) + i * p_.seqlen_k;
            const acc_t* dx = tile_.dx.row(i);
            for (int64_t j = 0; j < keys.size; ++j) to[keys.keys[j]] += dx[j];
        }
    }

    void store_dense_dbias(const Tile& tile) {
        const Matrix<acc_t> rows{dense_rows(tile.head), tile.rows, tile.keys, p_.seqlen_k};
        store(rows, p_.dbias.data, p_.bias.dtype, offset_of(p_.dbias, tile, p_.heads), p_.dbias.row_stride);
        std::fill_n(rows.data, max_rows_ * p_.seqlen_k, acc_t(0));
    }

    bool is_finite(const KeyPart<acc_t>& part) const {
        const auto finite = [&](const Buffer<acc_t>& x) {
            return all_finite<acc_t>({const_cast<acc_t*>(x.data()), part.keys, p_.head_dim, p_.head_dim});
        };
        return finite(part.dkey) && finite(part.dvalue);
    }

    const BwdParams& p_;
    const GradientUnits& units_;
    KeyParts<acc_t>& parts_;
    int64_t group_;
    int64_t sharing_;    // how many query heads have one list and one key/value head
    int64_t rows_each_;  // of a tile
    int64_t max_rows_;
    GradientTile<acc_t> tile_;
    GatheredKeys<acc_t> gathered_;
    Buffer<acc_t> query_, query_transposed_, dout_, dout_transposed_, dquery_;
    Buffer<acc_t> dkey_, dvalue_;  // of the gathered keys
    std::vector<double> column_sums_;
    int64_t dense_slots_;  // how many heads of dbias grow at once
    Buffer<acc_t> dense_rows_, transposed_;
};

}  // namespace

template <typename acc_t>
void gathered_backward(const BwdParams& params) {
    const GradientUnits units(params, ceil_div(params.seqlen_q, params.lists.tile_rows));
    KeyParts<acc_t> parts(params, units);
    for_each_unit(units.count(), [&] { return BackwardUnit<acc_t>(params, units, parts); });
    parts.reduce();
}

template void gathered_backward<float>(const BwdParams&);
template void gathered_backward<double>(const BwdParams&);

}  // namespace flash_dmattn
