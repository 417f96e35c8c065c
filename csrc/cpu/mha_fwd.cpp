#include <cmath>
#include <limits>
#include <vector>

#include "attention.h"
#include "gather.h"
#include "scores.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kRows = 256;
constexpr int64_t kKeys = 256;

// out and lse of one tile of query rows; owns its scratch memory, one object a thread.
template <typename acc_t>
class ForwardUnit {
public:
    explicit ForwardUnit(const FwdParams& params)
        : p_(params),
          max_rows_(std::min(kRows, params.seqlen_q)),
          max_keys_(std::min(kKeys, params.seqlen_k)),
          pairs_(max_keys_),
          gathered_(params, kKeys),
          query_(max_rows_ * p_.head_dim),
          key_(params.lists.present() ? 0 : max_keys_ * p_.head_dim),
          key_transposed_(params.lists.present() ? 0 : padded(max_keys_) * p_.head_dim),
          probs_(max_rows_ * padded(max_keys_)),
          out_(max_rows_ * p_.head_dim),
          max_(max_rows_),
          sum_(max_rows_) {}

    void operator()(const Sequence& sequence, int64_t head, int64_t row, int64_t rows) {
        const Matrix<acc_t> out{out_.data(), rows, p_.head_dim, p_.head_dim};
        attend(sequence, head, row, out, /*exact=*/false);
        // Zero times what stands in an invisible value may have been NaN.
        if (!all_finite(out)) attend(sequence, head, row, out, /*exact=*/true);
        finish(sequence, head, row, out);
    }

private:
    void attend(const Sequence& sequence, int64_t head, int64_t row, const Matrix<acc_t>& out, bool exact) {
        std::fill(out.data, out.row(out.rows), acc_t(0));
        std::fill(max_.begin(), max_.end(), -std::numeric_limits<acc_t>::infinity());
        std::fill(sum_.begin(), sum_.end(), 0.0);
        const auto query = load_rows(p_, p_.query, sequence, row, out.rows, head, query_.data());
        p_.lists.present() ? walk_list(sequence, head, row, query, out, exact)
                           : walk_keys(sequence, head, row, query, out, exact);
    }

    // All keys up to the last that causality shows, a tile after the other.
    void walk_keys(const Sequence& sequence, int64_t head, int64_t row, const Matrix<acc_t>& query,
                   const Matrix<acc_t>& out, bool exact) {
        const int64_t kv_head = head / (p_.heads / p_.kv_heads);
        const int64_t end = p_.is_causal ? sequence.causal_end(row + out.rows - 1) : sequence.keys;
        for (int64_t j = 0; j < end; j += kKeys) {
            const Tile tile{sequence, head, row, out.rows, j, std::min(kKeys, end - j)};
            if (mask_hides(p_, tile)) continue;
            const Matrix<acc_t> probs{probs_.data(), tile.rows, tile.keys, padded(tile.keys)};
            const auto key = load_keys(p_, p_.key, sequence, j, tile.keys, kv_head, key_.data());
            const auto key_transposed = transpose(key, key_transposed_.data(), padded(tile.keys));
            score_products<acc_t>(p_, tile, query, key_transposed, probs);
            online_softmax(tile, probs, out);
            const auto value = load_keys(p_, p_.value, sequence, j, tile.keys, kv_head, key_.data());
            add_product_left<acc_t>(probs, value, 1, exact, out);
        }
    }

    // The keys that the rows' list names.
    void walk_list(const Sequence& sequence, int64_t head, int64_t row, const Matrix<acc_t>& query,
                   const Matrix<acc_t>& out, bool exact) {
        gathered_.load(sequence, head, row, out.rows);
        for (const auto& keys : gathered_.tiles()) {
            const Tile tile = keys.tile(sequence, head, row, out.rows);
            const Matrix<acc_t> probs{probs_.data(), tile.rows, tile.keys, padded(tile.keys)};
            score_products<acc_t>(p_, tile, query, keys.key_transposed, probs);
            online_softmax(tile, probs, out);
            add_product_left<acc_t>(probs, keys.value, 1, exact, out);
        }
    }

    // Products to exp(score - the row's largest so far); what was summed before is brought to the new largest.
    void online_softmax(const Tile& tile, const Matrix<acc_t>& products, const Matrix<acc_t>& out) {
        ScoreRows<acc_t> scores(p_, tile, pairs_);
        for (int64_t i = 0; i < tile.rows; ++i) {
            acc_t* x = products.row(i);
            scores.finish(i, x, nullptr);
            const acc_t before = max_[i];
            const acc_t largest = row_max(x, tile.keys);
            const acc_t now = largest <= before ? before : largest;  // NaN wins
            if (now == -std::numeric_limits<acc_t>::infinity()) {
                std::fill_n(x, tile.keys, acc_t(0));
                continue;
            }
            const acc_t correction = std::exp(before - now);
            sum_[i] = sum_[i] * correction + row_exp(x, now, tile.keys);
            if (correction != 1) row_scale(out.row(i), correction, out.cols);
            max_[i] = now;
        }
    }

    void finish(const Sequence& sequence, int64_t head, int64_t row, const Matrix<acc_t>& out) {
        acc_t* lse = row_stats<acc_t>(p_.lse, sequence, head, row);
        for (int64_t i = 0; i < out.rows; ++i) {
            const bool empty = max_[i] == -std::numeric_limits<acc_t>::infinity();
            lse[i] = empty ? max_[i] : static_cast<acc_t>(max_[i] + std::log(sum_[i]));
            if (!empty) row_scale(out.row(i), static_cast<acc_t>(1 / sum_[i]), out.cols);
        }
        store_rows(p_, out, p_.out, sequence, row, head);
    }

    const FwdParams& p_;
    int64_t max_rows_, max_keys_;
    PairScratch<acc_t> pairs_;
    GatheredKeys<acc_t> gathered_;
    Buffer<acc_t> query_, key_, key_transposed_, probs_, out_, max_;
    std::vector<double> sum_;
};

template <typename acc_t>
void run(const FwdParams& params) {
    // Where there are lists, the query heads that share a key/value head follow each other: they share what is
    // gathered.
    const int64_t rows_each = params.lists.present() ? KeyListsView::kRows : kRows;
    const int64_t heads_each = params.lists.present() ? params.heads / params.kv_heads : 1;
    const int64_t row_tiles = ceil_div(params.seqlen_q, rows_each), head_groups = params.heads / heads_each;
    for_each_unit(params.batch * head_groups * row_tiles, [&] {
        return [=, &params, unit = ForwardUnit<acc_t>(params)](int64_t index) mutable {
            // The last rows come first: under causality they are the longest.
            const int64_t row = (row_tiles - 1 - index % row_tiles) * rows_each;
            const int64_t first_head = index / row_tiles % head_groups * heads_each;
            const Sequence sequence(params, index / row_tiles / head_groups);
            if (row >= sequence.rows) return;
            for (int64_t head = first_head; head < first_head + heads_each; ++head) {
                unit(sequence, head, row, std::min(rows_each, sequence.rows - row));
            }
        };
    });
}

}  // namespace

void mha_fwd_cpu(const FwdParams& params) {
    params.dtype == DataType::kFloat64 ? run<double>(params) : run<float>(params);
}

}  // namespace flash_dmattn
