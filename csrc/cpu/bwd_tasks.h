// What the dense backward and the backward over key lists share: tasks, the gradients of a tile's scores, and D_i.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "linalg.h"
#include "params.h"
#include "scores.h"
#include "tile.h"
#include "parallel.h"

namespace flash_dmattn {

constexpr int64_t kGradientRows = KeyListsView::kRows;

inline bool has_dense_dbias(const BwdParams& p) { return p.dbias.present() && !p.dbias.per_key; }

// How a backward is divided into tasks. A task owns a group of batch elements and query heads that share entries of
// dbias or a KV head, and a split of their `tiles` (n_blocks, or m_blocks over key lists), that is, consecutive tiles.
// Where all batch elements share a relative bias with a gradient, a task owns several such groups of batch elements, one
// after the other, to limit the memory of partial sums (relative_gradient.h). The division does not depend on the number
// of threads.
struct BwdTasks {
    static constexpr int64_t kMinTasks = 16;  // tiles are split where groups alone are fewer tasks
    // Tasks with partial sums of a relative bias, unless there are more groups of heads.
    static constexpr int64_t kMaxRelativeSums = 64;

    const BwdParams& p;
    int64_t batches_per_task, heads_per_task, batch_groups, head_groups, tiles_per_split, num_splits;
    int64_t groups_per_task = 1;  // of batch elements

    BwdTasks(const BwdParams& params, int64_t tiles)
        : p(params), batches_per_task(1), heads_per_task(p.heads / p.kv_heads) {
        if (has_dense_dbias(p)) {
            if (p.cu_seqlens_q == nullptr) batches_per_task = p.batch / p.dbias.batches;
            heads_per_task = std::max(heads_per_task, p.heads / p.dbias.heads);
        }
        batch_groups = p.batch / batches_per_task;
        head_groups = p.heads / heads_per_task;
        const int64_t wanted_splits = ceil_div(kMinTasks, batch_groups * head_groups);
        tiles_per_split = std::max<int64_t>(ceil_div(tiles, wanted_splits), 1);
        num_splits = std::max<int64_t>(ceil_div(tiles, tiles_per_split), 1);
        if (p.drelative_bias != nullptr && p.relative_bias.batches == 1)
            groups_per_task = ceil_div(batch_groups, ceil_div(kMaxRelativeSums, head_groups * num_splits));
    }

    int64_t count() const { return ceil_div(batch_groups, groups_per_task) * head_groups * num_splits; }
    int64_t split(int64_t task) const { return task % num_splits; }
    int64_t first_head(int64_t task) const { return task / num_splits % head_groups * heads_per_task; }
    int64_t first_batch(int64_t task) const {
        return task / num_splits / head_groups * groups_per_task * batches_per_task;
    }
    // Calls f(first batch element) for each group of batch elements of a task.
    template <typename F>
    void for_each_group(int64_t task, F&& f) const {
        const int64_t first = first_batch(task), end = first + groups_per_task * batches_per_task;
        for (int64_t b = first; b < std::min(end, p.batch); b += batches_per_task) f(b);
    }
    // The tasks of a batch element, query head and split.
    int64_t task_of(int64_t batch, int64_t head, int64_t split) const {
        const int64_t groups = batch / batches_per_task / groups_per_task;
        return (groups * head_groups + head / heads_per_task) * num_splits + split;
    }

    // Calls f(sequence, query head) for each batch element and query head of a task.
    template <typename F>
    void for_each_query_head(int64_t first_batch, int64_t first_head, F&& f) const {
        for (int64_t b = first_batch; b < first_batch + batches_per_task; ++b) {
            const Sequence sequence(p, b);
            for (int64_t head = first_head; head < first_head + heads_per_task; ++head) f(sequence, head);
        }
    }
    // Calls f(sequence, query head) for the first query head of each KV head only.
    template <typename F>
    void for_each_kv_head(int64_t first_batch, int64_t first_head, F&& f) const {
        for_each_query_head(first_batch, first_head, [&](const Sequence& sequence, int64_t head) {
            if (head % (p.heads / p.kv_heads) == 0) f(sequence, head);
        });
    }

    // Whether `head` is the last of the query heads that share a head of dbias; it stores the sum.
    bool is_last_of_bias_head(int64_t head) const { return (head + 1) % (p.heads / p.dbias.heads) == 0; }
};

// Computes D_i = <do_i, o_i> - dlse_i of an m_block. Owns its scratch memory: one object per thread.
template <typename acc_t>
class RowDeltas {
public:
    explicit RowDeltas(const BwdParams& params)
        : p_(params), out_(std::min(kGradientRows, p_.seqlen_q) * p_.head_dim), dout_(out_.size()) {}

    void operator()(const Sequence& s, int64_t head, int64_t row, int64_t rows) {
        const auto out = load_rows(p_, p_.out, s, row, rows, head, out_.data());
        const auto dout = load_rows(p_, p_.dout, s, row, rows, head, dout_.data());
        const acc_t* dlse = row_stats<acc_t>(p_.dlse, s, head, row);
        acc_t* delta = row_stats<acc_t>(p_.delta, s, head, row);
        for (int64_t i = 0; i < rows; ++i) delta[i] = row_dot(dout.row(i), out.row(i), p_.head_dim) - dlse[i];
    }

private:
    const BwdParams& p_;
    Buffer<acc_t> out_, dout_;
};

// p_ij and dx_ij = p_ij (<do_i, v_j> - D_i) of one tile, recomputed from lse, and ds_ij.
template <typename acc_t>
class ScoreGradients {
public:
    // knows_deltas: whether p.delta holds D_i already.
    ScoreGradients(const BwdParams& params, int64_t tile_keys, bool knows_deltas)
        : p_(params), knows_deltas_(knows_deltas), deltas_(params), max_rows_(std::min(kGradientRows, params.seqlen_q)),
          max_keys_(std::min(tile_keys, params.seqlen_k)), score_scratch_(max_keys_),
          probs_(max_rows_ * padded(max_keys_)), dx_(probs_.size()), slope_(params.softcap > 0 ? probs_.size() : 0) {}

    // has_all_keys: whether the tile has every key that its rows see. Then D_i is summed from p, which is normalized
    // again. Otherwise D_i has the rounding error of `out`, and p that of lse, which are large for the half types and
    // for large scores.
    void compute(const Tile& tile, bool has_all_keys, const Matrix<acc_t>& query, const Matrix<acc_t>& dout,
                 const Matrix<acc_t>& key, const Matrix<acc_t>& key_transposed, const Matrix<acc_t>& value_transposed) {
        probs = {probs_.data(), tile.rows, tile.keys, padded(tile.keys)};
        dx = {dx_.data(), tile.rows, tile.keys, padded(tile.keys)};
        score_products<acc_t>(p_, tile, query, key, key_transposed, probs);
        precise_product<acc_t>(dout, value_transposed, dx);

        const acc_t* lse = row_stats<acc_t>(p_.lse, tile.sequence, tile.head, tile.row);
        const acc_t* delta = row_stats<acc_t>(p_.delta, tile.sequence, tile.head, tile.row);
        const acc_t* dlse = row_stats<acc_t>(p_.dlse, tile.sequence, tile.head, tile.row);
        ScoreRows<acc_t> scores(p_, tile, score_scratch_);
        for (int64_t i = 0; i < tile.rows; ++i) {
            acc_t* p = probs.row(i);
            acc_t* d = dx.row(i);
            scores.finish(i, p, slope_.empty() ? nullptr : slope_.data() + i * dx.stride);
            const acc_t sum = probabilities(p, lse[i], tile.keys);
            if (has_all_keys && is_whole_softmax(sum, lse[i])) {
                row_scale(p, 1 / sum, tile.keys);
                row_dx(d, p, row_mean(p, d, tile.keys) - dlse[i], tile.keys);
            } else {
                if (!knows_deltas_) deltas_(tile.sequence, tile.head, tile.row + i, 1);
                row_dx(d, p, delta[i], tile.keys);
            }
        }
    }

    // Converts dx, the gradient of the biased scores, to ds, the gradient before the softcap, in place. The slope of a
    // masked score may be NaN.
    const Matrix<acc_t>& to_ds() {
        for (int64_t i = 0; i < dx.rows && !slope_.empty(); ++i) {
            const acc_t* slope = slope_.data() + i * dx.stride;
            for (int64_t j = 0; j < dx.cols; ++j) {
                const acc_t d = dx.row(i)[j], ds = d * slope[j];
                dx.row(i)[j] = d == 0 ? acc_t(0) : ds;
            }
        }
        return dx;
    }

    // Adds the column sums of dx, for the gradient of a key bias. float64, because there may be thousands of rows.
    void add_column_sums(double* sums) const {
        int64_t i = 0;
        for (; i + 4 <= dx.rows; i += 4) {  // one conversion to float64 for four rows
            const acc_t *a = dx.row(i), *b = dx.row(i + 1), *c = dx.row(i + 2), *d = dx.row(i + 3);
            for (int64_t j = 0; j < dx.cols; ++j) sums[j] += (a[j] + b[j]) + (c[j] + d[j]);
        }
        for (; i < dx.rows; ++i) {
            for (int64_t j = 0; j < dx.cols; ++j) sums[j] += dx.row(i)[j];
        }
    }

    Matrix<acc_t> probs, dx;

private:
    // x = exp(x - lse). Returns the sum. A NaN lse makes the visible scores NaN, and only those.
    static acc_t probabilities(acc_t* x, acc_t lse, int64_t n) {
        constexpr acc_t infinity = std::numeric_limits<acc_t>::infinity();
        if (!std::isnan(lse)) return row_exp(x, lse == -infinity ? infinity : lse, n);
        for (int64_t j = 0; j < n; ++j) x[j] = x[j] == -infinity ? acc_t(0) : lse;
        return lse;
    }

    // Whether a row's p sum to 1 up to the rounding of lse. If not, lse is of more keys than those of this call.
    static bool is_whole_softmax(acc_t sum, acc_t lse) {
        constexpr acc_t rounding = 8 * std::numeric_limits<acc_t>::epsilon();
        if (std::abs(sum - 1) <= rounding) return true;
        const acc_t size = std::abs(lse), ulp = std::nextafter(size, std::numeric_limits<acc_t>::infinity()) - size;
        return std::abs(std::log(sum)) <= ulp / 2 + rounding;
    }

    const BwdParams& p_;
    bool knows_deltas_;
    RowDeltas<acc_t> deltas_;
    int64_t max_rows_, max_keys_;
    ScoreScratch<acc_t> score_scratch_;
    Buffer<acc_t> probs_, dx_, slope_;
};

template <typename acc_t>
void row_deltas(const BwdParams& p) {
    const int64_t num_m_blocks = ceil_div(p.seqlen_q, kGradientRows);
    parallel_for_tasks(p.batch * p.heads * num_m_blocks, [&] {
        return [=, &p, deltas = RowDeltas<acc_t>(p)](int64_t index) mutable {
            const Sequence s(p, index / num_m_blocks / p.heads);
            const int64_t row = index % num_m_blocks * kGradientRows;
            if (row < s.rows) deltas(s, index / num_m_blocks % p.heads, row, std::min(kGradientRows, s.rows - row));
        };
    });
}

}  // namespace flash_dmattn
