// Builds key lists from the indices of an indexer. See csrc/index_params.h.
#pragma once

#include <optional>

#include "index_params.h"

namespace flash_dmattn {

// An index that is neither -1 nor a key of its sequence.
struct WrongIndex {
    int32_t index;
    int64_t keys;  // of the sequence
};
// The first invalid index, if any.
std::optional<WrongIndex> find_wrong_index_cpu(const IndexListsParams& params);

// Fills keys [capacity], begins and ends [lists], and where plan.has_rows, rows [capacity, KeyListsView::kRows / 32].
// See KeyListsView.
void index_lists_cpu(const IndexListsParams& params, const IndexListsPlan& plan, int32_t* keys, int64_t* begins,
                     int64_t* ends, uint32_t* rows);

}  // namespace flash_dmattn
