// Selects key lists from a key bias for 1 to 16 rows, as in decoding. See csrc/select_params.h.
#pragma once

#include "select_params.h"

namespace flash_dmattn {

// Fills keys [capacity], begins and ends [lists], and where plan.has_rows, rows [capacity, KeyListsView::kRows / 32], as
// in KeyListsView. The rows' bits include causality; a single row sees its whole list. Reads the biases of used keys once
// (none for w = 0), and no others. Returns false where a bias is NaN; the lists are then undefined.
bool topk_lists_cpu(const SelectParams& params, const SelectedListsPlan& plan, int32_t* keys, int64_t* begins,
                    int64_t* ends, uint32_t* rows);

// Fills mask [heads, keys] with the keys that one row of each head sees, of its candidates [heads, keys], none of which
// has a bias that is NaN. params.batches is 1.
void topk_mask_cpu(const SelectParams& params, const uint8_t* candidates, uint8_t* mask);

// Returns whether no bias of a used key is NaN.
bool has_order_cpu(const SelectParams& params);

}  // namespace flash_dmattn
