// Prefetch of a listed key by one producer lane: fetched early, consumed late, to hide the latency of global memory.
#pragma once

#include "key_list.cuh"
#include "cuda/softmax/scores.cuh"

namespace flash_dmattn::cuda {

struct GatheredKey {
    int place;  // position in the sequence, or no key
    uint4 rows;
    uint32_t bias;
};

// Reads the keys of one list for some rows of its m_block.
template <typename T, BiasKind kBias>
class ListReader {
public:
    __device__ ListReader(const AttentionParams& p, const Sequence& s, int head, int first_row, const KeyList& list,
                          int rows = KeyListsView::kRows)
        : p_(p), s_(s), list_(list), first_row_(first_row), end_row_(first_row + rows) {
        if (kBias == BiasKind::kKey) bias_ = bias_data(p.bias, score_offset(p.bias, s, head, p.heads));
    }

    __device__ __forceinline__ GatheredKey fetch(int at, int place) const {
        GatheredKey key{place, {}, 0};
        if (!is_key(place, s_.keys)) return key;
        key.rows = list_.fetch(at, place);
        if (kBias == BiasKind::kKey) key.bias = load_key_bias(p_.bias, bias_, place * p_.bias.col_stride);
        return key;
    }

        // Writes which rows see the key, and its bias. Returns its position, or -1 if no row sees it; such a key may
        // hold anything.
    __device__ __forceinline__ int look(const GatheredKey& key, uint32_t (&words)[KeyList::kWords], float& bias) const {
        SeeingRows seeing = list_.seeing(key.rows, key.place, s_, p_.is_causal);
        bias = kBias == BiasKind::kKey ? key_bias_of<T>(p_.bias, key.bias) : 0;
        if (!is_key(key.place, s_.keys) || bias == -kInfinity) seeing.end = 0;
        seeing.end = min(seeing.end, end_row_);
        seeing.of_tile(first_row_, words);
        const bool is_seen = (words[0] | words[1] | words[2] | words[3]) != 0;
        if (!is_seen) bias = 0;
        return is_seen ? key.place : -1;
    }

private:
    const AttentionParams& p_;
    const Sequence& s_;
    const KeyList& list_;
    const int first_row_, end_row_;
    const char* bias_ = nullptr;
};

// Row visibility, positions and biases of a gathered n_block, in shared memory.
template <int kKeys>
struct GatheredKeys {
    alignas(
        16) uint32_t rows[kKeys][KeyList::kWords];  // bit i % 32 of word i / 32: whether row i of the list sees the key
    int place[kKeys];                               // position in the sequence; -1 if no row sees the key
    float bias[kKeys];                              // times log2(e)

    __device__ __forceinline__ void store(int i, int key_place, const uint32_t (&words)[KeyList::kWords],
                                          float key_bias) {
        *reinterpret_cast<uint4*>(rows[i]) = {words[0], words[1], words[2], words[3]};
        place[i] = key_place;
        bias[i] = key_bias * kLog2E;
    }
};

}  // namespace flash_dmattn::cuda
