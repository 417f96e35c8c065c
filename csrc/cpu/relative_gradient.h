// The gradient of a relative position bias: the sum of dx over the scores that read an entry.
#pragma once

#include <cstdint>
#include <vector>

#include "bwd_tasks.h"
#include "relative_rows.h"

namespace flash_dmattn {

// Every task of BwdTasks has partial sums, in float64. They are added in the order of the tasks, so that the gradient
// does not depend on the number of threads.
template <typename acc_t>
class RelativeGradient {
public:
    RelativeGradient(const BwdParams& params, const BwdTasks& tasks);

    bool present() const { return p_.drelative_bias != nullptr; }
    // Zeroes the partial sums of a task, if there are any.
    void start(int64_t task);
    // Adds a tile of a task. dx: the gradient of its biased scores, [rows, keys].
    void add(int64_t task, const Tile& tile, const Matrix<acc_t>& dx, RelativeScratch<acc_t>& scratch);
    void reduce() const;

private:
    // The partial sums of a task for a batch element and query head, [num_entries_].
    int64_t offset_of(int64_t task, int64_t batch, int64_t head) const;
    void reduce_table(int64_t table_batch, int64_t table_head) const;

    const BwdParams& p_;
    const BwdTasks& tasks_;
    int64_t batches_per_task_, heads_per_task_;  // of relative_bias
    int64_t first_entry_, num_entries_;          // the entries that a score may read
    std::vector<std::vector<double>> partials_;
};

}  // namespace flash_dmattn
