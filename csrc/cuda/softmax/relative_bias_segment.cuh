// The entries of a relative bias that a block of scores reads, in shared memory.
//
// A block has kRows x kCols scores in the accumulator layout of fragment.cuh: query rows x keys in the forward, keys x
// query rows in the backward. Along a diagonal all scores read the same entry, so that a segment holds the entries of
// consecutive positions, ascending with the column and descending with the row. The two columns that a lane has in a
// fragment are read at once, from the copy in which they are aligned.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/fragment.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "relative_bias.cuh"

namespace flash_dmattn::cuda {

// kMaxEntries entries, twice.
template <int kMaxEntries_>
struct alignas(8) RelativeBiasEntries {
    static constexpr int kMaxEntries = kMaxEntries_;
    static constexpr int kStride = (kMaxEntries + 31) / 32 * 32 + 16;  // lanes of even and of odd rows: different banks

    float entries[2][kStride];  // the second one begins with the second entry

    __device__ __forceinline__ void store(int i, float entry) {
        entries[0][i] = entry;
        if (i > 0) entries[1][i - 1] = entry;
    }
    // Copies by cp.async. The first entry's second copy goes to the padding.
    __device__ __forceinline__ void copy(int i, const float* from) {
        static_assert(kStride > kMaxEntries);
        const uint32_t to = smem_address(entries[0] + i);
        cp_async<4>(to, from);
        cp_async<4>(to + (kStride - 1) * sizeof(float), from);
    }

protected:
    // The offset in `entries` of an entry and the next one.
    static __device__ __forceinline__ int aligned(int entry) { return entry % 2 == 0 ? entry : kStride + entry - 1; }
    __device__ __forceinline__ float2 at(int offset) const {
        return *reinterpret_cast<const float2*>(entries[0] + offset);
    }
    // Sets kFragments fragments of a warp's 16 rows to the entries times `factor`. Row r + 8 reads of a fragment what row
    // r reads of the one before.
    template <int kFragments>
    __device__ __forceinline__ void load_diagonals(float (&acc)[kFragments][4], int offset, float factor) const {
#pragma unroll
        for (int n = -1; n < kFragments; ++n) {
            float2 entry = at(offset + n * 8);
            entry.x *= factor, entry.y *= factor;
            if (n >= 0) acc[n][0] = entry.x, acc[n][1] = entry.y;
            if (n + 1 < kFragments) acc[n + 1][2] = entry.x, acc[n + 1][3] = entry.y;
        }
    }
    // The same without a factor, while another GEMM is issued: copies of what is loaded, moved behind it, would serialize
    // the two. The assembler merges loads of equal addresses.
    template <int kFragments>
    __device__ __forceinline__ void load_diagonals_ahead(float (&acc)[kFragments][4], int offset) const {
        const auto load_two = [](float* to, const float* from) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(to[0]), "=f"(to[1])
                         : "r"(smem_address(from))
                         : "memory");
        };
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
            load_two(acc[n], entries[0] + offset + n * 8);
            load_two(acc[n] + 2, entries[0] + offset + n * 8 - 8);
        }
    }
};

// One dimension: entry c - r + kRows - 1 belongs to row r and column c.
template <int kRows, int kCols>
struct RelativeBiasSegment : RelativeBiasEntries<kRows + kCols> {
    using Base = RelativeBiasEntries<kRows + kCols>;
    static constexpr int kKeyStep = 1;  // the position of the next key

    static __host__ __device__ __forceinline__ int size(const RelativeBiasView&) { return Base::kMaxEntries; }

    // Begins a block of which column 0 is first_col of the sequence.
    __device__ __forceinline__ void begin(const RelativeBiasView&, int /* first_col */, int /* thread */) {}

    // Where this lane reads: of the block's rows from r and columns from c on.
    struct Lane {
        int offset;

        Lane() = default;
        __device__ __forceinline__ Lane(const RelativeBiasView&, int /* first_row */, int r, int c)
            : offset(Base::aligned(c + fragment_col() - r - fragment_row() + kRows - 1)) {}
    };
    // The lane's two entries in row r + 8 h and fragment n.
    __device__ __forceinline__ float2 at(const Lane& lane, int h, int n) const {
        return Base::at(lane.offset + (n - h) * 8);
    }
    // Sets the accumulator of a warp's 16 rows to the entries.
    template <int kFragments>
    __device__ __forceinline__ void load(float (&acc)[1][kFragments][4], const Lane& lane) const {
        Base::load_diagonals(acc[0], lane.offset, 1);
    }
};

// How many consecutive positions of a grid `tokens` tokens cover at most, from a multiple of `tokens` on. A new row of
// the grid skips width - 1 positions.
constexpr __host__ __device__ __forceinline__ int grid_span(int width, int tokens) {
    const int new_rows = width % tokens == 0 ? 0 : tokens % width == 0 ? tokens / width - 1 : (tokens - 2) / width + 1;
    return tokens + new_rows * (width - 1);
}
constexpr int kMaxGridSpan = 3;  // times the tokens

// A grid whose width is a multiple of 16: aligned runs of 16 tokens, or even of 64, lie in one row of the grid.
template <int kRows, int kCols>
struct GridBiasSegment : RelativeBiasEntries<kMaxGridSpan*(kRows + kCols)> {
    using Base = RelativeBiasEntries<kMaxGridSpan*(kRows + kCols)>;
    static constexpr int kKeyStep = -1;

    alignas(16) int run_entries[kCols / 16];  // from column 0 to 16 i entries move by run_entries[i]

    static __host__ __device__ __forceinline__ int size(const RelativeBiasView& view) {
        const int width = static_cast<int>(view.grid_width);
        return grid_span(width, kRows) + grid_span(width, kCols);
    }

    // At least kCols / 16 threads call.
    __device__ __forceinline__ void begin(const RelativeBiasView& view, int first_col, int thread) {
        if (thread < kCols / 16)
            run_entries[thread] = token_in_table(first_col + thread * 16, view) - token_in_table(first_col, view);
    }

    struct Lane {
        int entry, first_run;
        bool has_long_runs;

        Lane() = default;
        __device__ __forceinline__ Lane(const RelativeBiasView& view, int first_row, int r, int c)
            : entry(token_in_table(first_row + kRows - 1, view) - token_in_table(first_row + r, view) + fragment_col() -
                    fragment_row()),
              first_run(c / 16), has_long_runs(view.grid_width % 64 == 0) {}
    };
    __device__ __forceinline__ float2 at(const Lane& lane, int h, int n) const {
        return Base::at(run_offset(lane, n / 2) + (n % 2 - h) * 8);
    }
    template <int kFragments>
    __device__ __forceinline__ void load(float (&acc)[1][kFragments][4], const Lane& lane, float factor) const {
        for_each_run(acc[0], lane, [&](auto& run, int offset) { Base::load_diagonals(run, offset, factor); });
    }
    template <int kFragments>
    __device__ __forceinline__ void load_ahead(float (&acc)[1][kFragments][4], const Lane& lane) const {
        for_each_run(acc[0], lane, [&](auto& run, int offset) { Base::load_diagonals_ahead(run, offset); });
    }

private:
    __device__ __forceinline__ int run_offset(const Lane& lane, int run) const {
        return Base::aligned(lane.entry + run_entries[lane.first_run + run]);
    }
    template <int kFragments, typename Visit>
    __device__ __forceinline__ void for_each_run(float (&acc)[kFragments][4], const Lane& lane,
                                                 const Visit& visit) const {
        if (kFragments % 8 == 0 && lane.has_long_runs) {
            for_each_run_of<8>(acc, lane, visit);
        } else {
            for_each_run_of<2>(acc, lane, visit);
        }
    }
    template <int kRunFragments, int kFragments, typename Visit>
    __device__ __forceinline__ void for_each_run_of(float (&acc)[kFragments][4], const Lane& lane,
                                                    const Visit& visit) const {
#pragma unroll
        for (int n = 0; n < kFragments; n += kRunFragments)
            visit(reinterpret_cast<float (&)[kRunFragments][4]>(acc[n]), run_offset(lane, n / 2));
    }
};

template <BiasKind kBias, int kRows, int kCols>
using SegmentOf = std::conditional_t<kBias == BiasKind::kRelativeGrid, GridBiasSegment<kRows, kCols>,
                                     RelativeBiasSegment<kRows, kCols>>;

}  // namespace flash_dmattn::cuda
