#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention.h"
#include "scores.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kRows = 128;
constexpr int64_t kKeys = 256;

// p_ij and dx_ij = p_ij (<do_i, v_j> - D_i) of one tile, recomputed from lse; and how dx becomes ds.
template <typename acc_t>
class GradientTile {
public:
    explicit GradientTile(const BwdParams& params)
        : p_(params),
          max_rows_(std::min(kRows, params.seqlen_q)),
          max_keys_(std::min(kKeys, params.seqlen_k)),
          probs_(max_rows_ * max_keys_),
          dx_(max_rows_ * max_keys_),
          slope_(params.softcap > 0 ? max_rows_ * max_keys_ : 0),
          bias_row_(max_keys_) {}

    void compute(const Tile& tile, const Matrix<acc_t>& query, const Matrix<acc_t>& key, const Matrix<acc_t>& value,
                 const Matrix<acc_t>& dout) {
        probs = {probs_.data(), tile.rows, tile.keys, tile.keys};
        dx = {dx_.data(), tile.rows, tile.keys, tile.keys};
        score_tile<acc_t>(p_, tile, query, key, bias_row_.data(), probs, slope_.empty() ? nullptr : slope_.data());
        product_nt<acc_t>(dout, value, 1, dx);

        const acc_t* lse = row_stats<acc_t>(p_.lse, tile.sequence, tile.head, tile.row);
        const acc_t* delta = row_stats<acc_t>(p_.delta, tile.sequence, tile.head, tile.row);
        for (int64_t i = 0; i < tile.rows; ++i) {
            acc_t* p = probs.row(i);
            acc_t* d = dx.row(i);
            const bool empty = lse[i] == -std::numeric_limits<acc_t>::infinity();
            row_exp(p, empty ? std::numeric_limits<acc_t>::infinity() : lse[i], tile.keys);
            row_dx(d, p, delta[i], tile.keys);
        }
    }

    // dx, which the bias's gradient is made of, becomes ds, which query's and key's are.
    const Matrix<acc_t>& to_ds() {
        if (!slope_.empty()) {
            for (int64_t i = 0; i < dx.rows * dx.cols; ++i) dx_[i] *= slope_[i];
        }
        return dx;
    }

    Matrix<acc_t> probs, dx;

private:
    const BwdParams& p_;
    int64_t max_rows_, max_keys_;
    std::vector<acc_t> probs_, dx_, slope_, bias_row_;
};

// The query heads of which batch elements share one entry of a dense bias's gradient. Without such a gradient to make
// every (batch element, head) stands alone.
struct BiasGroups {
    int64_t batches, heads, batches_each, heads_each;

    explicit BiasGroups(const BwdParams& p) : batches(p.batch), heads(p.heads), batches_each(1), heads_each(1) {
        if (p.dbias.present() && !p.dbias.per_key) {
            batches = p.cu_seqlens_q != nullptr ? p.batch : p.dbias.batches;
            heads = p.dbias.heads;
            batches_each = p.batch / batches;
            heads_each = p.heads / heads;
        }
    }
};

// dquery of one tile of query rows for all the batch elements and heads of a bias group, and their tiles of dbias.
template <typename acc_t>
class RowUnit {
public:
    RowUnit(const BwdParams& params, const BiasGroups& groups)
        : p_(params),
          groups_(groups),
          writes_dbias_(params.dbias.present() && !params.dbias.per_key),
          max_rows_(std::min(kRows, params.seqlen_q)),
          tile_(params),
          query_(max_rows_ * p_.head_dim),
          dout_(max_rows_ * p_.head_dim),
          key_(kKeys * p_.head_dim),
          value_(kKeys * p_.head_dim),
          dquery_(groups.batches_each * groups.heads_each * max_rows_ * p_.head_dim),
          dbias_(writes_dbias_ ? max_rows_ * kKeys : 0) {}

    void operator()(int64_t batch, int64_t head, int64_t row) {
        differentiate(batch, head, row, /*exact=*/false);
        if (!all_finite<acc_t>({dquery_.data(), 1, int64_t(dquery_.size()), int64_t(dquery_.size())})) {
            differentiate(batch, head, row, /*exact=*/true);
        }
        finish(batch, head, row);
    }

private:
    int64_t members() const { return groups_.batches_each * groups_.heads_each; }
    // Member m of the group that starts at (batch, head).
    Sequence sequence_of(int64_t batch, int64_t m) const { return Sequence(p_, batch + m / groups_.heads_each); }
    int64_t head_of(int64_t head, int64_t m) const { return head + m % groups_.heads_each; }
    Matrix<acc_t> dquery_of(int64_t m, int64_t rows) {
        return {dquery_.data() + m * max_rows_ * p_.head_dim, rows, p_.head_dim, p_.head_dim};
    }

    // All members have sequences of one length: a group spans batch elements only where the length is fixed.
    void differentiate(int64_t batch, int64_t head, int64_t row, bool exact) {
        const Sequence sequence(p_, batch);
        const int64_t rows = std::min(kRows, sequence.rows - row);
        const int64_t visible_end = p_.is_causal ? sequence.causal_end(row + rows - 1) : sequence.keys;
        const int64_t end = writes_dbias_ ? sequence.keys : visible_end;
        std::fill(dquery_.begin(), dquery_.end(), acc_t(0));

        for (int64_t j = 0; j < end; j += kKeys) {
            const int64_t keys = std::min(kKeys, end - j);
            std::fill(dbias_.begin(), dbias_.end(), acc_t(0));
            for (int64_t m = 0; m < members() && j < visible_end; ++m) {
                const Sequence member = sequence_of(batch, m);
                add_member({member, head_of(head, m), row, rows, j, keys}, dquery_of(m, rows), exact);
            }
            if (writes_dbias_) {
                const Matrix<acc_t> dbias{dbias_.data(), rows, keys, keys};
                const int64_t at = offset_of(p_.dbias, {sequence, head, row, rows, j, keys}, p_.heads);
                store(dbias, p_.dbias.data, p_.bias.dtype, at, p_.dbias.row_stride);
            }
        }
    }

    void add_member(const Tile& tile, const Matrix<acc_t>& dquery, bool exact) {
        if (mask_hides(p_, tile)) return;
        const Sequence& s = tile.sequence;
        const int64_t kv_head = tile.head / (p_.heads / p_.kv_heads);
        const auto query = load_rows(p_, p_.query, s, tile.row, tile.rows, tile.head, query_.data());
        const auto dout = load_rows(p_, p_.dout, s, tile.row, tile.rows, tile.head, dout_.data());
        const auto key = load_keys(p_, p_.key, s, tile.key, tile.keys, kv_head, key_.data());
        const auto value = load_keys(p_, p_.value, s, tile.key, tile.keys, kv_head, value_.data());
        tile_.compute(tile, query, key, value, dout);
        if (writes_dbias_) row_add(dbias_.data(), tile_.dx.data, tile.rows * tile.keys);
        add_product<acc_t>(tile_.to_ds(), false, key, p_.softmax_scale, exact, dquery);
    }

    void finish(int64_t batch, int64_t head, int64_t row) {
        for (int64_t m = 0; m < members(); ++m) {
            const Sequence sequence = sequence_of(batch, m);
            const int64_t rows = std::min(kRows, sequence.rows - row);
            store_rows(p_, dquery_of(m, rows), p_.dquery, sequence, row, head_of(head, m));
        }
    }

    const BwdParams& p_;
    const BiasGroups& groups_;
    bool writes_dbias_;
    int64_t max_rows_;
    GradientTile<acc_t> tile_;
    std::vector<acc_t> query_, dout_, key_, value_, dquery_, dbias_;
};

// dkey and dvalue of one tile of keys, summed over the query heads that share them, and the key bias's column sums.
template <typename acc_t>
class KeyUnit {
public:
    explicit KeyUnit(const BwdParams& params)
        : p_(params),
          group_(params.heads / params.kv_heads),
          writes_dbias_(params.dbias.present() && params.dbias.per_key),
          tile_(params),
          query_(kRows * p_.head_dim),
          dout_(kRows * p_.head_dim),
          key_(kKeys * p_.head_dim),
          value_(kKeys * p_.head_dim),
          dkey_(kKeys * p_.head_dim),
          dvalue_(kKeys * p_.head_dim),
          dbias_(kKeys) {}

    void operator()(const Sequence& sequence, int64_t kv_head, int64_t key) {
        const int64_t keys = std::min(kKeys, sequence.keys - key);
        const Matrix<acc_t> dkey{dkey_.data(), keys, p_.head_dim, p_.head_dim};
        const Matrix<acc_t> dvalue{dvalue_.data(), keys, p_.head_dim, p_.head_dim};
        differentiate(sequence, kv_head, key, dkey, dvalue, /*exact=*/false);
        if (!all_finite(dkey) || !all_finite(dvalue)) differentiate(sequence, kv_head, key, dkey, dvalue, /*exact=*/true);
        store_keys(p_, dkey, p_.dkey, sequence, key, kv_head);
        store_keys(p_, dvalue, p_.dvalue, sequence, key, kv_head);
    }

private:
    void differentiate(const Sequence& s, int64_t kv_head, int64_t first, const Matrix<acc_t>& dkey,
                       const Matrix<acc_t>& dvalue, bool exact) {
        const int64_t keys = dkey.rows;
        std::fill(dkey_.begin(), dkey_.end(), acc_t(0));
        std::fill(dvalue_.begin(), dvalue_.end(), acc_t(0));
        std::fill(dbias_.begin(), dbias_.end(), 0.0);
        const auto key = load_keys(p_, p_.key, s, first, keys, kv_head, key_.data());
        const auto value = load_keys(p_, p_.value, s, first, keys, kv_head, value_.data());
        const bool sum_per_head = p_.dbias.heads == p_.heads;

        for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
            for (int64_t i = p_.is_causal ? s.causal_begin(first) : 0; i < s.rows; i += kRows) {
                const Tile tile{s, head, i, std::min(kRows, s.rows - i), first, keys};
                if (mask_hides(p_, tile)) continue;
                const auto query = load_rows(p_, p_.query, s, i, tile.rows, head, query_.data());
                const auto dout = load_rows(p_, p_.dout, s, i, tile.rows, head, dout_.data());
                tile_.compute(tile, query, key, value, dout);
                if (writes_dbias_) {
                    for (int64_t r = 0; r < tile.rows; ++r) {
                        for (int64_t j = 0; j < keys; ++j) dbias_[j] += tile_.dx.row(r)[j];
                    }
                }
                add_product<acc_t>(tile_.probs, true, dout, 1, exact, dvalue);
                add_product<acc_t>(tile_.to_ds(), true, query, p_.softmax_scale, exact, dkey);
            }
            if (writes_dbias_ && (sum_per_head || head == (kv_head + 1) * group_ - 1)) {
                const int64_t at = offset_of(p_.dbias, {s, head, 0, 1, first, keys}, p_.heads);
                std::copy_n(dbias_.data(), keys, static_cast<acc_t*>(p_.dbias.data) + at);
                std::fill(dbias_.begin(), dbias_.end(), 0.0);
            }
        }
    }

    const BwdParams& p_;
    int64_t group_;
    bool writes_dbias_;
    GradientTile<acc_t> tile_;
    std::vector<acc_t> query_, dout_, key_, value_, dkey_, dvalue_;
    std::vector<double> dbias_;  // sums over thousands of rows
};

// D_i = <do_i, o_i> - dlse_i
template <typename acc_t>
void row_deltas(const BwdParams& p) {
    const int64_t row_tiles = ceil_div(p.seqlen_q, kRows);
    for_each_unit(p.batch * p.heads * row_tiles, [&] {
        std::vector<acc_t> out_scratch(kRows * p.head_dim), dout_scratch(kRows * p.head_dim);
        return [=, &p, out_scratch = std::move(out_scratch), dout_scratch = std::move(dout_scratch)](int64_t index) mutable {
            const Sequence s(p, index / row_tiles / p.heads);
            const int64_t head = index / row_tiles % p.heads;
            const int64_t row = index % row_tiles * kRows;
            if (row >= s.rows) return;
            const int64_t rows = std::min(kRows, s.rows - row);
            const auto out = load_rows(p, p.out, s, row, rows, head, out_scratch.data());
            const auto dout = load_rows(p, p.dout, s, row, rows, head, dout_scratch.data());
            const acc_t* dlse = row_stats<acc_t>(p.dlse, s, head, row);
            acc_t* delta = row_stats<acc_t>(p.delta, s, head, row);
            for (int64_t i = 0; i < rows; ++i) delta[i] = row_dot(dout.row(i), out.row(i), p.head_dim) - dlse[i];
        };
    });
}

template <typename acc_t>
void row_gradients(const BwdParams& p) {
    const BiasGroups groups(p);
    const int64_t row_tiles = ceil_div(p.seqlen_q, kRows);
    for_each_unit(groups.batches * groups.heads * row_tiles, [&] {
        return [&p, &groups, row_tiles, unit = RowUnit<acc_t>(p, groups)](int64_t index) mutable {
            // The last rows come first: under causality they are the longest.
            const int64_t row = (row_tiles - 1 - index % row_tiles) * kRows;
            const int64_t head = index / row_tiles % groups.heads * groups.heads_each;
            const int64_t batch = index / row_tiles / groups.heads * groups.batches_each;
            if (row < Sequence(p, batch).rows) unit(batch, head, row);
        };
    });
}

template <typename acc_t>
void key_gradients(const BwdParams& p) {
    const int64_t key_tiles = ceil_div(p.seqlen_k, kKeys);
    for_each_unit(p.batch * p.kv_heads * key_tiles, [&] {
        return [&p, key_tiles, unit = KeyUnit<acc_t>(p)](int64_t index) mutable {
            const int64_t key = index % key_tiles * kKeys;
            const int64_t kv_head = index / key_tiles % p.kv_heads;
            const Sequence sequence(p, index / key_tiles / p.kv_heads);
            if (key < sequence.keys) unit(sequence, kv_head, key);
        };
    });
}

template <typename acc_t>
void run(const BwdParams& params) {
    row_deltas<acc_t>(params);
    row_gradients<acc_t>(params);
    key_gradients<acc_t>(params);
}

}  // namespace

void mha_bwd_cpu(const BwdParams& params) {
    params.dtype == DataType::kFloat64 ? run<double>(params) : run<float>(params);
}

}  // namespace flash_dmattn
