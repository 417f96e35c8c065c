// The keys that a list names, as the kernels of lists walk over them.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg.h"
#include "params.h"
#include "work.h"

namespace flash_dmattn {

// The keys of one list, or some that follow each other in it, in rising order, without the padding.
struct KeyList {
    const int32_t* keys;
    const uint32_t* rows;  // as in KeyListsView, or null
    int64_t size;

    KeyList from(int64_t first, int64_t count) const {
        constexpr int64_t kWords = KeyListsView::kRows / 32;
        return {keys + first, rows != nullptr ? rows + first * kWords : nullptr, count};
    }
};

// The keys that some of the rows [row, row + rows) sees, which lie in one tile of KeyListsView::kRows.
KeyList list_of(const AttentionParams& params, const Sequence& sequence, int64_t head, int64_t row, int64_t rows);

// Some keys of a list, with their rows of key and value side by side.
template <typename acc_t>
struct GatheredTile {
    KeyList list;
    Matrix<acc_t> key{}, value{};                        // [keys, D]
    Matrix<acc_t> key_transposed{}, value_transposed{};  // [D, keys]; as score_products asks, and in the backward

    Tile tile(const Sequence& sequence, int64_t head, int64_t row, int64_t rows) const {
        return {sequence, head, row, rows, 0, list.size, list.keys, list.rows};
    }
};

// The list of some rows, gathered and widened, in tiles of at most `tile_keys` keys. It holds until the next `load`;
// query heads that share the list and the key/value head find it there already.
template <typename acc_t>
class GatheredKeys {
public:
    GatheredKeys(const AttentionParams& params, int64_t tile_keys, bool backward = false)
        : p_(params), tile_keys_(tile_keys), backward_(backward) {}

    void load(const Sequence& sequence, int64_t head, int64_t row, int64_t rows);

    const std::vector<GatheredTile<acc_t>>& tiles() const { return tiles_; }
    int64_t size() const { return list_.size; }

private:
    const AttentionParams& p_;
    int64_t tile_keys_;
    bool backward_;
    KeyList list_{};
    int64_t batch_ = -1, kv_head_ = -1;
    Buffer<acc_t> key_, value_, key_transposed_, value_transposed_;
    std::vector<GatheredTile<acc_t>> tiles_;
};

}  // namespace flash_dmattn
