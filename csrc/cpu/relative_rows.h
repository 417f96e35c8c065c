// The entries of a relative position bias that the scores of a tile read. See RelativeBiasView.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linalg.h"
#include "params.h"
#include "tile.h"

namespace flash_dmattn {

// Whether a tile reads a DistanceLine: one dimension and consecutive keys.
inline bool reads_line(const RelativeBiasView& view, const Tile& tile) {
    return !view.has_grid() && tile.gathered == nullptr;
}

// The distances of a tile: score (i, j) has element rows - 1 - i + j of a line of rows + keys - 1 distances. Elements
// before `below` read entry 0, those from `above` on the last entry, the others consecutive entries from `entry` on.
struct DistanceLine {
    int64_t size, below, above, entry;

    DistanceLine(const RelativeBiasView& view, const Tile& tile) : size(tile.rows + tile.keys - 1) {
        const Sequence& s = tile.sequence;
        const int64_t first = tile.key - (tile.row + tile.rows - 1 + s.keys - s.rows);
        below = std::clamp<int64_t>(-view.radius - first, 0, size);
        above = std::clamp<int64_t>(view.radius + 1 - first, below, size);
        entry = std::clamp<int64_t>(view.radius + first + below, 0, view.size() - 1);
    }
};

// Other tiles: score (i, j) reads entry clamp(entry_base(i) - offsets[j], 0, size - 1).
inline int64_t entry_base(const RelativeBiasView& view, const Tile& tile, int64_t i) {
    const int64_t row = tile.row + i, width = view.grid_width;
    if (!view.has_grid()) return view.radius - (row + tile.sequence.keys - tile.sequence.rows);
    return (row / width + view.grid_height - 1) * (2 * width - 1) + row % width + width - 1;
}
inline void set_offsets(const RelativeBiasView& view, const Tile& tile, std::vector<int64_t>& offsets) {
    const int64_t width = view.grid_width;
    for (int64_t j = 0; j < tile.keys; ++j) {
        const int64_t key = tile.gathered != nullptr ? tile.gathered[j] : tile.key + j;
        offsets[j] = view.has_grid() ? key / width * (2 * width - 1) + key % width : -key;
    }
}

template <typename acc_t>
struct RelativeScratch {
    Buffer<acc_t> values;
    std::vector<int64_t> offsets;

    void resize(const RelativeBiasView& view, const Tile& tile) {
        const bool is_line = reads_line(view, tile);
        const size_t size = is_line ? DistanceLine(view, tile).size : tile.keys;
        if (values.size() < size) values.resize(size);
        if (!is_line && offsets.size() < size) offsets.resize(size);
    }
};

// The entries of a tile's batch element and query head, [size].
template <typename acc_t>
const acc_t* relative_table(const AttentionParams& p, const Tile& tile) {
    const RelativeBiasView& view = p.relative_bias;
    return static_cast<const acc_t*>(view.data) + view.batch_of(tile.sequence.batch) * view.batch_stride +
           view.head_of(tile.head, p.heads) * view.head_stride;
}

// Whether the relative bias masks every score of a tile. Searches only a DistanceLine, which is short.
bool is_masked_by_relative_bias(const AttentionParams& params, const Tile& tile);

// Applies the relative bias to the scores of a tile, row by row.
template <typename acc_t>
class RelativeRows {
public:
    RelativeRows(const AttentionParams& params, const Tile& tile, RelativeScratch<acc_t>& scratch);

    // Adds the entries of row i to x, [keys]; -inf where an entry masks the score.
    void apply(int64_t i, acc_t* x);

private:
    const acc_t* values(int64_t i);

    const RelativeBiasView& view_;
    const Tile& tile_;
    const acc_t* table_;
    bool is_line_;
    RelativeScratch<acc_t>& scratch_;
};

}  // namespace flash_dmattn
