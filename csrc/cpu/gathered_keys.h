// The keys of a key list, gathered from K and V for the kernels over lists.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg.h"
#include "params.h"
#include "tile.h"

namespace flash_dmattn {

// One key list, or consecutive keys of it, sorted, without the padding.
struct KeyList {
    const int32_t* keys;   // [size] positions
    const uint32_t* rows;  // [size, KeyListsView::kRows / 32], or null
    int64_t size;

    KeyList from(int64_t first, int64_t count) const {
        constexpr int64_t kWords = KeyListsView::kRows / 32;
        return {keys + first, rows != nullptr ? rows + first * kWords : nullptr, count};
    }
};

// The keys that any of the rows [row, row + rows) sees. The rows belong to one m_block of the lists.
KeyList find_list(const AttentionParams& params, const Sequence& sequence, int64_t head, int64_t row, int64_t rows);

// An n_block of gathered keys.
template <typename acc_t>
struct GatheredKvBlock {
    KeyList list;
    Matrix<acc_t> key{}, value{};      // [keys, D]
    Matrix<acc_t> key_transposed{};    // [D, keys]; empty where the rows are few
    Matrix<acc_t> value_transposed{};  // [D, keys]; backward only

    Tile tile(const Sequence& sequence, int64_t head, int64_t row, int64_t rows) const {
        return {sequence, head, row, rows, 0, list.size, list.keys, list.rows};
    }
};

// The keys of a list, gathered and converted, in n_blocks of at most `tile_keys` keys. They stay valid until the next
// `load`, which does nothing where the list and the KV head are the same, as for query heads of a GQA group.
template <typename acc_t>
class GatheredKvBlocks {
public:
    GatheredKvBlocks(const AttentionParams& params, int64_t tile_keys, bool backward = false)
        : p_(params), tile_keys_(tile_keys), backward_(backward) {}

    void load(const Sequence& sequence, int64_t head, int64_t row, int64_t rows);

    const std::vector<GatheredKvBlock<acc_t>>& tiles() const { return tiles_; }
    int64_t size() const { return list_.size; }

private:
    const AttentionParams& p_;
    int64_t tile_keys_;
    bool backward_;
    KeyList list_{};
    int64_t batch_ = -1, kv_head_ = -1;
    Buffer<acc_t> key_, value_, key_transposed_, value_transposed_;
    std::vector<GatheredKvBlock<acc_t>> tiles_;
};

}  // namespace flash_dmattn
