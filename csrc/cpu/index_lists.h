// The key lists of what an indexer has chosen.
#pragma once

#include <optional>

#include "index_params.h"

namespace flash_dmattn {

// An index that is neither -1 nor a key of its sequence.
struct WrongIndex {
    int32_t index;
    int64_t keys;  // of the sequence
};
// The first, if there is one.
std::optional<WrongIndex> find_wrong_index_cpu(const IndexListsParams& params);

// keys [capacity], begins and ends [lists], rows [capacity, KeyListsView::kRows / 32] where the plan has them, as
// KeyListsView has them.
void index_lists_cpu(const IndexListsParams& params, const IndexListsPlan& plan, int32_t* keys, int64_t* begins,
                     int64_t* ends, uint32_t* rows);

}  // namespace flash_dmattn
