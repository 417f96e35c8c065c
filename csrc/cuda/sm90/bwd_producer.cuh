// The warp group that loads, of the backward.
#pragma once

#include "../common/intervals.cuh"
#include "../common/scores.cuh"
#include "../common/tile_scan.cuh"
#include "bwd_block.cuh"
#include "bwd_scratch.cuh"
#include "copy_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
class BwdProducer {
public:
    using T = typename Tile::T;
    using Smem = BwdSmem<Tile, kBias>;

    __device__ BwdProducer(const BwdArgs& p, const BwdMaps& maps, Smem& smem, const BwdWork& work)
        : p_(p), maps_(maps), smem_(smem), work_(work), query_ring_(smem.query_ring), dout_ring_(smem.dout_ring),
          bias_ring_(smem.bias_ring) {}

    __device__ void run() {
        load_keys();
        for_each_tile<false>([&](int head, int row_tile, bool is_visited, bool mask_full) {
            if (is_visited) load_rows(head, row_tile, mask_full);
        });
        query_ring_.wait_empty();
        if (threadIdx.x == 0) smem_.rows[query_ring_.stage()].header.row_tile = Smem::RowInfo::kEnd;
        mbarrier_arrive_here(query_ring_.full());
        // Tiles that nobody visits have a gradient, too: 0.
        if (kBias == BiasKind::kDense && p_.dense_dbias != DenseDbias::kNone && (p_.is_causal || has_mask(p_)))
            for_each_tile<true>([&](int head, int row_tile, bool is_visited, bool) {
                const bool is_own = !Tile::kExchanges || row_tile % p_.dbias.batch_sharers == smem_.rank;
                if (!is_visited && is_own) clear_dbias(head, row_tile);
            });
    }

private:
    static constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kWords = Tile::kWords;
    // Who starts copies, each in a warp of its own: the group's instructions are slow, and so none waits for another's.
    static constexpr int kBiasThread = 32, kQueryThread = 64, kDoutThread = 96;

    __device__ const Sequence& sequence() const { return smem_.sequence; }
    __device__ int first_key() const { return work_.key_tile * kKeys; }

    // Calls visit(head, row tile, whether a row of it sees a key, whether the mask hides nothing of it), for all tiles, or
    // without some that are not visited. They rise; where blocks take turns they fall: there a causal mask lets all blocks of
    // a head begin at once.
    template <bool kAll, typename Visit>
    __device__ __forceinline__ void for_each_tile(const Visit& visit) const {
        const int causal_begin = p_.is_causal ? sequence().causal_begin(first_key()) / kRows : 0;
        for (int head = work_.first_head; head < work_.first_head + work_.group; ++head) {
            const RowRange rows = kAll ? RowRange{0, sequence().rows} : rows_to_visit(head);
            const int begin = rows.begin / kRows, tiles = max(ceil_div(rows.end, kRows) - begin, 0);
            const auto tile_at = [&](int i) { return begin + (p_.deterministic ? tiles - 1 - i : i); };
            for (LookAhead ahead{0}; ahead.next < tiles;) {
                const int first = ahead.next, end = min(first + 32, tiles);
                ahead.look(tiles, [&](int i, bool& is_empty, bool& is_full) {
                    const int tile = tile_at(i);
                    is_full = summary_of(sequence(), head, tile, work_.key_tile).full;
                    is_empty = tile < causal_begin || is_hidden(head, tile, work_.key_tile);
                });
                for (int i = first; i < end; ++i)
                    visit(head, tile_at(i), ahead.pending >> (i - first) & 1, ahead.is_full(i - first));
            }
        }
    }

    // The rows among which all lie that see some key, to some of a cluster's blocks, which visit the same tiles: by causality
    // and, where it says that without a look at every tile, by the mask.
    __device__ __forceinline__ RowRange rows_to_visit(int head) const {
        RowRange range{sequence().rows, 0};
        for_each_sharer([&](const Sequence& s) {
            const RowRange rows = MaskSummaries<kRows, kKeys>(p_, s, head).rows_of(s.rows, work_.key_tile);
            range = {min(range.begin, rows.begin), max(range.end, rows.end)};
            return true;
        });
        if (p_.is_causal) range.begin = max(range.begin, sequence().causal_begin(first_key()));
        return range;
    }
    __device__ __forceinline__ TileSummary<kKeys> summary_of(const Sequence& s, int head, int row_tile,
                                                             int key_tile) const {
        const MaskSummaries<kRows, kKeys> mask(p_, s, head);
        return mask.of(row_tile * kRows, min((row_tile + 1) * kRows, s.rows) - 1, key_tile);
    }
    // Whether the mask leaves no pair of a tile, to none of a cluster's blocks.
    __device__ __forceinline__ bool is_hidden(int head, int row_tile, int key_tile) const {
        bool is_empty = true;
        for_each_sharer([&](const Sequence& s) { return is_empty &= summary_of(s, head, row_tile, key_tile).empty; });
        return is_empty;
    }
    // Calls visit(sequence) for this block's and those of the other blocks of a cluster, as long as it gives true.
    template <typename Visit>
    __device__ __forceinline__ void for_each_sharer(const Visit& visit) const {
        if (!visit(sequence()) || !Tile::kExchanges) return;
        Sequence other = sequence();
        const int sharers = static_cast<int>(p_.dbias.batch_sharers);  // 2 or 4
        for (int i = 1; i < sharers; ++i) {
            other.batch = sequence().batch ^ i;
            if (!visit(other)) return;
        }
    }
    // One after the last of the lower tiles of keys whose blocks visit a tile of rows, too: they add to its dQ before. A
    // warp calls.
    __device__ __forceinline__ int turn(int head, int row_tile) const {
        for (int end = work_.key_tile; end > 0; end -= 32) {
            const int key_tile = end - 1 - lane_id();
            const uint32_t visiting = __ballot_sync(~0u, key_tile >= 0 && !is_hidden(head, row_tile, key_tile));
            if (visiting != 0) return end - (__ffs(visiting) - 1);
        }
        return 0;
    }

    // Keys that no row sees, for the mask or their bias, may hold anything: the consumers clear them.
    __device__ void load_keys() {
        const Sequence& s = sequence();
        if (threadIdx.x == 0) {
            const uint32_t barrier = smem_address(&smem_.keys_full);
            mbarrier_expect(barrier, 2 * sizeof(typename Tile::KeysTile));
            copy_rows(smem_.key, maps_.key, barrier, p_, s, s.first_key + first_key(), work_.kv_head);
            copy_rows(smem_.value, maps_.value, barrier, p_, s, s.first_key + first_key(), work_.kv_head);
        }
        const int warp = warp_id(), key = first_key() + threadIdx.x;  // a warp looks at 32 keys, if there are so many
        uint32_t seen = 0;
        for (int head = work_.first_head; head < work_.first_head + work_.group; ++head) {
            uint32_t seen_by_head = has_mask(p_) ? 0 : ~0u;
            if (has_mask(p_)) {
                const MaskSummaries<kRows, kKeys> mask(p_, sequence(), head);
                const RowRange rows = mask.rows_of(s.rows, work_.key_tile);
                for (int tile = rows.begin / kRows + lane_id(); tile * kRows < rows.end; tile += 32) {
                    const auto summary = mask.of(tile * kRows, min((tile + 1) * kRows, sequence().rows) - 1, work_.key_tile);
#pragma unroll
                    for (int w = 0; w < kWords; ++w) seen_by_head |= summary.columns[w] & (w == warp ? ~0u : 0u);
                }
            }
            bool is_hidden = key >= s.keys;
            if (kBias == BiasKind::kKey && !is_hidden) {
                const char* bias = bias_data(p_.bias, pair_offset(p_.bias, s, head, p_.heads));
                is_hidden = key_bias_of<T>(p_.bias, load_key_bias(p_.bias, bias, key * p_.bias.col_stride)) == -kInfinity;
            }
            seen |= __reduce_or_sync(~0u, seen_by_head) & __ballot_sync(~0u, !is_hidden);
        }
        if (lane_id() == 0 && warp < kWords) smem_.seen[warp] = seen;
        mbarrier_arrive_here(smem_address(&smem_.keys_full));
    }

    __device__ __forceinline__ void load_rows(int head, int row_tile, bool mask_full) {
        const Sequence& s = sequence();
        const int first = row_tile * kRows, row = first + threadIdx.x;
        const bool is_masked = !mask_full && p_.packed_mask.bits != nullptr;
        float lse = 0, delta = 0;
        MaskWords words = {};
        bool is_empty = false;
        if (threadIdx.x < kRows) {
            if (is_masked) words = load_mask(head, row);
            const bool exists = row < s.rows;
            const auto stat = [&](const RowStatView& view) {
                return exists ? static_cast<const float*>(view.data)[stat_offset(view, s, head) + row] : 0;
            };
            delta = stat(p_.delta);
            lse = lse_to_log2(stat(p_.lse), exists);
            is_empty = lse == kInfinity;
            if (is_empty) delta = 0;
        }
        const int tensor_row = s.first_row + first;
        if (threadIdx.x == kQueryThread) {
            query_ring_.wait_empty();
            mbarrier_expect(query_ring_.full(), sizeof(typename Tile::RowsTile));
            copy_rows(smem_.query[query_ring_.stage()], maps_.query, query_ring_.full(), p_, s, tensor_row, head);
        }
        if (threadIdx.x == kDoutThread) {
            dout_ring_.wait_empty();
            mbarrier_arrive_expecting(dout_ring_.full(), sizeof(typename Tile::RowsTile));
            copy_rows(smem_.dout[dout_ring_.stage()], maps_.dout, dout_ring_.full(), p_, s, tensor_row, head);
        }
        if (kBias == BiasKind::kDense && threadIdx.x == kBiasThread) {
            bias_ring_.wait_empty();
            mbarrier_arrive_expecting(bias_ring_.full(), sizeof(typename Tile::PairsTile));
            auto& pairs = smem_.pairs[bias_ring_.stage()];
#pragma unroll
            for (int panel = 0; panel < Tile::PairsTile::kPanels; ++panel)
                copy_box(smem_address(pairs.data + panel * kRows * 64), &maps_.bias, bias_ring_.full(),
                         first_key() + panel * 64, tensor_row, shared_head(head, p_.heads, p_.bias.heads),
                         smem_.bias_batch);
        }
        const int turn_to_add = p_.deterministic && warp_id() == 0 ? turn(head, row_tile) : 0;
        query_ring_.wait_empty();
        auto& info = smem_.rows[query_ring_.stage()];
        if (threadIdx.x < kRows) {
            info.lse[threadIdx.x] = lse;
            info.delta[threadIdx.x] = delta;
            if (is_masked) {
                info.mask[0][threadIdx.x] = words.x, info.mask[1][threadIdx.x] = words.y;
                if constexpr (kWords == 4) info.mask[2][threadIdx.x] = words.z, info.mask[3][threadIdx.x] = words.w;
            }
        }
        const bool has_empty = __any_sync(~0u, is_empty);
        if (lane_id() == 0 && warp_id() < kRows / 32) info.header.has_empty[warp_id()] = has_empty;
        if (threadIdx.x == 0) {
            info.header.head = head;
            info.header.row_tile = row_tile;
            const int64_t tile = dquery_tile<kRows>(p_, s, head, row_tile);
            info.dquery = p_.dquery_accum + tile * DqueryLayout<Tile>::kSize;
            info.turns = dquery_turns(p_, tile);
            info.turn = turn_to_add;
            info.header.mask_full = mask_full;
        }
        mbarrier_arrive_here(query_ring_.full());
        query_ring_.advance();
        dout_ring_.advance();
        bias_ring_.advance();
    }

    // Of a tile, one row's words.
    static_assert(kWords == 2 || kWords == 4);
    using MaskWords = std::conditional_t<kWords == 4, uint4, uint2>;
    __device__ __forceinline__ MaskWords load_mask(int head, int row) const {
        const uint32_t* words = mask_words(p_, sequence(), head) + work_.key_tile * kWords;
        const int64_t at = min(row, sequence().rows - 1) * p_.packed_mask.bits_row_stride;
        return __ldg(reinterpret_cast<const MaskWords*>(words + at));
    }

    __device__ void clear_dbias(int head, int row_tile) const {
        const Sequence& s = sequence();
        T* to = static_cast<T*>(p_.dbias.data) + pair_offset(p_.dbias, s, head, p_.heads) +
                static_cast<int64_t>(row_tile * kRows) * p_.dbias.row_stride + first_key();
        for (int i = threadIdx.x; i < kRows * kKeys / 8; i += 128) {
            const int row = i / (kKeys / 8), key = i % (kKeys / 8) * 8;
            // A row of keys is a multiple of 8, or the copy engine could not store it.
            if (row_tile * kRows + row < s.rows && first_key() + key < s.keys)
                *reinterpret_cast<uint4*>(to + row * p_.dbias.row_stride + key) = {};
        }
    }

    const BwdArgs& p_;
    const BwdMaps& maps_;
    Smem& smem_;
    const BwdWork& work_;
    Ring<Tile::kStages> query_ring_, dout_ring_, bias_ring_;
};

}  // namespace flash_dmattn::cuda::sm90
