#include "relative_gradient.h"

#include <algorithm>

#include "parallel.h"

namespace flash_dmattn {
namespace {

template <typename acc_t>
void add_to(double* to, const acc_t* from, int64_t n) {
    for (int64_t t = 0; t < n; ++t) to[t] += from[t];
}

template <typename acc_t>
double sum_of(const acc_t* x, int64_t n) {
    double sum = 0;
    for (int64_t t = 0; t < n; ++t) sum += x[t];
    return sum;
}

}  // namespace

template <typename acc_t>
RelativeGradient<acc_t>::RelativeGradient(const BwdParams& params, const BwdTasks& tasks)
    : p_(params), tasks_(tasks), batches_per_task_(1), heads_per_task_(1), first_entry_(0), num_entries_(0) {
    if (!present()) return;
    const RelativeBiasView& view = p_.relative_bias;
    if (view.batches > 1) batches_per_task_ = tasks.batches_per_task;
    heads_per_task_ = std::max<int64_t>(tasks.heads_per_task / (p_.heads / view.heads), 1);
    num_entries_ = view.size();
    if (!view.has_grid()) {
        const int64_t farthest = std::min(view.radius, std::max(p_.seqlen_q, p_.seqlen_k));
        first_entry_ = view.radius - farthest;
        num_entries_ = 2 * farthest + 1;
    }
    partials_.resize(tasks.count());
}

template <typename acc_t>
void RelativeGradient<acc_t>::start(int64_t task) {
    if (present()) partials_[task].assign(batches_per_task_ * heads_per_task_ * num_entries_, 0.0);
}

template <typename acc_t>
int64_t RelativeGradient<acc_t>::offset_of(int64_t task, int64_t batch, int64_t head) const {
    const RelativeBiasView& view = p_.relative_bias;
    const int64_t b = view.batch_of(batch) - view.batch_of(tasks_.first_batch(task));
    const int64_t h = view.head_of(head, p_.heads) - view.head_of(tasks_.first_head(task), p_.heads);
    return (b * heads_per_task_ + h) * num_entries_;
}

template <typename acc_t>
void RelativeGradient<acc_t>::add(int64_t task, const Tile& tile, const Matrix<acc_t>& dx,
                                  RelativeScratch<acc_t>& scratch) {
    const RelativeBiasView& view = p_.relative_bias;
    double* sums = partials_[task].data() + offset_of(task, tile.sequence.batch, tile.head) - first_entry_;
    const int64_t last = view.size() - 1;
    scratch.resize(view, tile);
    if (!reads_line(view, tile)) {
        set_offsets(view, tile, scratch.offsets);
        for (int64_t i = 0; i < dx.rows; ++i) {
            const int64_t base = entry_base(view, tile, i);
            for (int64_t j = 0; j < dx.cols; ++j)
                sums[std::clamp<int64_t>(base - scratch.offsets[j], 0, last)] += dx.row(i)[j];
        }
        return;
    }
    const DistanceLine line(view, tile);
    acc_t* values = scratch.values.data();
    std::fill_n(values, line.size, acc_t(0));
    for (int64_t i = 0; i < dx.rows; ++i) row_add(values + dx.rows - 1 - i, dx.row(i), dx.cols);
    if (line.below > 0) sums[0] += sum_of(values, line.below);
    add_to(sums + line.entry, values + line.below, line.above - line.below);
    if (line.above < line.size) sums[last] += sum_of(values + line.above, line.size - line.above);
}

template <typename acc_t>
void RelativeGradient<acc_t>::reduce() const {
    const RelativeBiasView& view = p_.relative_bias;
    parallel_for_tasks(view.batches * view.heads,
                       [&] { return [&](int64_t table) { reduce_table(table / view.heads, table % view.heads); }; });
}

template <typename acc_t>
void RelativeGradient<acc_t>::reduce_table(int64_t table_batch, int64_t table_head) const {
    const RelativeBiasView& view = p_.relative_bias;
    const int64_t first_batch = view.batches > 1 ? table_batch : 0, batches = view.batches > 1 ? 1 : p_.batch;
    const int64_t heads = p_.heads / view.heads, first_head = table_head * heads;
    std::vector<double> sums(num_entries_);
    for (int64_t b = first_batch; b < first_batch + batches; b += tasks_.groups_per_task * tasks_.batches_per_task) {
        for (int64_t h = first_head; h < first_head + heads; h += tasks_.heads_per_task) {
            for (int64_t split = 0; split < tasks_.num_splits; ++split) {
                const int64_t task = tasks_.task_of(b, h, split);
                add_to(sums.data(), partials_[task].data() + offset_of(task, b, h), num_entries_);
            }
        }
    }
    acc_t* to = static_cast<acc_t*>(p_.drelative_bias) + (table_batch * view.heads + table_head) * view.size();
    for (int64_t e = 0; e < num_entries_; ++e) to[first_entry_ + e] += static_cast<acc_t>(sums[e]);
}

template class RelativeGradient<float>;
template class RelativeGradient<double>;

}  // namespace flash_dmattn
