// Products with AVX512-BF16: pairs of bfloat16 at a time, added in float. Other inputs are multiplied in float.
//
// An expert with many rows of bfloat16 takes them in blocks of 16: a pair of weights is multiplied with the pairs of 16
// rows, so that each lane is the sum of one row. Without blocks the lanes of a sum are added up at its end: products of
// 2048 columns take a tenth longer, those of 768 a fifth.
#include "bfloat16_math_avx512bf16.h"

#include "kernels.h"

#include "product.inc"

#include "row_blocks.inc"

#include "experts.inc"

namespace {

struct BlockMath : BFloat16Math {};

// An expert with fewer rows than this is not worth packing.
constexpr int64_t kManyRows = 32;

// How many rows of an expert that has `count` lie in blocks: the first ones. What does not fill a block is left.
static inline int64_t rows_in_blocks(int64_t count) {
    return count < kManyRows ? 0 : count / kBlockRows * kBlockRows;
}

struct Range {
    int64_t start, end;
};

// Of the rows of experts `first` to `last`, from the first to the last that lie in blocks.
static inline Range range_of_blocks(const int64_t* offsets, int64_t first, int64_t last) {
    Range range = {0, 0};
    for (int64_t expert = first; expert < last; expert++) {
        const int64_t start = load(offsets, expert), rows = rows_in_blocks(load(offsets, expert + 1) - start);
        if (!rows) continue;
        if (!range.end) range.start = start;
        range.end = start + rows;
    }
    return range;
}

// The rows of some experts, in blocks and not. Activated rows lie in one array, the blocks of an expert before its
// other rows; those of x are packed into a copy that has blocks only.
class BlockedRows {
  public:
    // Packs those in `range`, which is that of experts `first` to `last`.
    BlockedRows(const Rows<BFloat16>& rows, int64_t columns, const int64_t* offsets, int64_t first, int64_t last,
                Range range, int64_t threads)
        : rows_(rows),
          start_(range.start),
          stride_(padded(columns)),
          packed_((range.end - range.start) * stride_),
          base_(packed_.get()) {
        if (!has_memory()) return;
        BFloat16* out = packed_.get();
        for_ranges(range.end - range.start, stride_, (int)threads, [&](int64_t from, int64_t to) {
            from += start_, to += start_;
            for (int64_t expert = first; expert < last; expert++) {
                const int64_t begin = load(offsets, expert);
                const int64_t end = begin + rows_in_blocks(load(offsets, expert + 1) - begin);
                for (int64_t row = begin; row < end; row += kBlockRows) {
                    if (row < from || row >= to) continue;  // another thread's
                    pack_block(rows_, row, kBlockRows, stride_, out + (row - start_) * stride_);
                }
            }
        });
    }

    // Rows that lie in blocks already.
    explicit BlockedRows(const Rows<BFloat16>& rows)
        : rows_(rows), start_(0), stride_(rows.stride), packed_(0), base_(rows.base) {}

    bool has_memory() const { return base_; }

    const Rows<BFloat16>& rows() const { return rows_; }
    // The block of row `row`, which is its first one, and of those after it.
    const BFloat16* block(int64_t row) const { return base_ + (row - start_) * stride_; }
    int64_t block_size() const { return kBlockRows * stride_; }

  private:
    const Rows<BFloat16> rows_;
    const int64_t start_, stride_;
    const Buffer<BFloat16> packed_;
    const BFloat16* base_;
};

template <>
struct Operand<BlockMath> {
    using Type = const BlockedRows&;

    static int64_t packed_of(int64_t count) { return rows_in_blocks(count); }

    static BlockedRows of(const Rows<BFloat16>& rows, int64_t columns, const int64_t* offsets, int64_t first,
                          int64_t last, int64_t threads) {
        return BlockedRows(rows, columns, offsets, first, last, range_of_blocks(offsets, first, last), threads);
    }
    static BlockedRows placed(const Rows<BFloat16>& rows, int64_t, const int64_t*, int64_t, int64_t) {
        return BlockedRows(rows);
    }
    static bool has_memory(Type rows) { return rows.has_memory(); }

    static Place<BFloat16> place(BFloat16* rows, int64_t stride, int64_t row, int64_t first, int64_t last) {
        const int64_t inside = (row - first) % kBlockRows, block = row - inside;
        if (row - first >= rows_in_blocks(last - first)) return {rows + row * stride, 2};
        return {rows + block * stride + 2 * inside, 2 * kBlockRows};
    }
};

// The products of a block of rows with a tile.
struct BlockSums {
    static constexpr int kRows = kBlockRows;
    using Values = BlockValues;

    const float (*sums)[kBlockRows];

    // Where the block from row `row` on lies, of rows at their `place`.
    static BlockPlace place(BFloat16* rows, int64_t stride, int64_t row) { return {rows + row * stride}; }
};

// Rows of weights that are multiplied at a time: two quads, 32 KB with 2048 columns, which stay in L1.
constexpr int kWeightRows = 2 * kQuad;

// `sums[b][i][j]` = row i of kWeightRows rows of weights times row j of block b. A product waits for four cycles or
// more for the one before it in the same sum, so there are kParts sums of each, of which 12 or more are at work. With
// kReadsNext the blocks after these are read into L2 meanwhile.
template <int kBlocks, int kParts, bool kReadsNext>
static void multiply_blocks(const BFloat16* weights, int64_t quad_size, const BFloat16* x, int64_t block_size,
                            int64_t groups, float (*sums)[kTileRows][kBlockRows]) {
    __m512 totals[kParts][kWeightRows][kBlocks];
    for (auto& part : totals)
        for (auto& row : part)
            for (__m512& total : row) total = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, weights += kQuad * kGroup, x += kGroup * kBlockRows) {
#pragma GCC unroll 4
        for (int k = 0; k < kGroup; k += 2 * kParts) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; part++) {
                const int column = k + 2 * part;
                __m512bh pairs[kBlocks];
                for (int b = 0; b < kBlocks; b++) {
                    const BFloat16* from = x + b * block_size + column * kBlockRows;
                    pairs[b] = BFloat16Math::load(from);
                    if (kReadsNext) prefetch<_MM_HINT_T1>(from + kBlocks * block_size, 1);
                }
#pragma GCC unroll 8
                for (int i = 0; i < kWeightRows; i++) {
                    int pair;
                    memcpy(&pair, weights + i / kQuad * quad_size + i % kQuad * kGroup + column, sizeof pair);
                    const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
                    for (int b = 0; b < kBlocks; b++)
                        totals[part][i][b] = BFloat16Math::dot(totals[part][i][b], weight, pairs[b]);
                }
            }
        }
    }
    for (int i = 0; i < kWeightRows; i++)
        for (int b = 0; b < kBlocks; b++) {
            __m512 total = totals[0][i][b];
            for (int part = 1; part < kParts; part++) total = _mm512_add_ps(total, totals[part][i][b]);
            _mm512_store_ps(sums[b][i], total);
        }
}

template <>
class Worker<BlockMath> : public Worker<BFloat16Math> {
  public:
    using Worker<BFloat16Math>::Worker;

    template <class Take, class TakeBlock>
    void multiply_tile(const PackedStack& stack, int64_t expert, const Tile& tile, const BlockedRows& rows,
                       int64_t first, int64_t last, const Take& take, const TakeBlock& take_block) {
        if (rows_in_blocks(last - first) == 0)
            Worker<BFloat16Math>::multiply_tile(stack, expert, tile, rows.rows(), first, last, take, take_block);
        else if (stack.bits == 4)
            multiply_many<BFloat16Math::Unpack4, 4>(stack, expert, tile, rows, first, last, take, take_block);
        else
            multiply_many<BFloat16Math::Unpack8, 8>(stack, expert, tile, rows, first, last, take, take_block);
    }

  private:
    // Blocks that are multiplied before weights are unpacked again.
    static constexpr int kMostBlocks = 16;

    template <class Unpack, int kBits, class Take, class TakeBlock>
    void multiply_many(const PackedStack& stack, int64_t index, const Tile& tile, const BlockedRows& rows,
                       int64_t first, int64_t last, const Take& take, const TakeBlock& take_block) {
        const Expert expert(stack, index);
        Unpack unpack(stack.codebook, false);
        alignas(64) float sums[kMostBlocks][kTileRows][kBlockRows];
        float values[kBlockRows][kTileRows];
        while (first < last) {
            const int64_t blocks = least((last - first) / kBlockRows, kMostBlocks), end = first + blocks * kBlockRows;
            const int64_t rest = last - end < kBlockRows ? last - end : 0;
            for (int q = 0; q < kTileRows; q += kWeightRows) {
                for (int i = 0; i < kWeightRows; i += kQuad)
                    unpack_rows<Unpack, kBits, kQuad>(stack, expert, tile, q + i, unpack, quad_at(stack, i));
                multiply_all(stack, rows, first, blocks, q == 0,
                             reinterpret_cast<float(*)[kTileRows][kBlockRows]>(sums[0][q]));
                for (int i = 0; i < kWeightRows; i += kQuad)
                    multiply_rows(quad_at(stack, i), stack.columns, rows.rows(), end, rest, at_column(values, q + i));
            }
            for (int64_t block = 0; block < blocks; block++)
                take_sums(first + block * kBlockRows, sums[block], take, take_block);
            for (int64_t i = 0; i < rest; i++) take(end + i, values[i]);
            first = end + rest;
        }
    }

    // Two blocks at a time, and three if one would be left.
    void multiply_all(const PackedStack& stack, const BlockedRows& rows, int64_t first, int64_t blocks, bool is_first,
                      float (*sums)[kTileRows][kBlockRows]) const {
        const int64_t size = rows.block_size(), quad_size = kQuad * padded(stack.columns);
        const int64_t groups = padded(stack.columns) / kGroup;
        const BFloat16 *weights = weights_.get(), *x = rows.block(first);
        for (; blocks > 3 || blocks == 2; blocks -= 2, x += 2 * size, sums += 2)
            if (is_first && blocks > 3)
                multiply_blocks<2, 1, true>(weights, quad_size, x, size, groups, sums);
            else
                multiply_blocks<2, 1, false>(weights, quad_size, x, size, groups, sums);
        if (blocks == 3) multiply_blocks<3, 1, false>(weights, quad_size, x, size, groups, sums);
        if (blocks == 1) multiply_blocks<1, 2, false>(weights, quad_size, x, size, groups, sums);
    }

    template <class Take, class TakeBlock>
    static void take_sums(int64_t row, const float (&sums)[kTileRows][kBlockRows], const Take& take,
                          const TakeBlock& take_block) {
        if constexpr (kSame<TakeBlock, NoBlocks>) {
            alignas(64) float values[kBlockRows][kTileRows];
            put_sums(sums[0], values);
            put_sums(sums[kBlockRows], reinterpret_cast<float(*)[kTileRows]>(&values[0][kBlockRows]));
            for (int i = 0; i < kBlockRows; i++) take(row + i, values[i]);
        } else {
            take_block(row, BlockSums{sums});
        }
    }
};

}  // namespace

int hf_qmoe_experts_avx512bf16(const ExpertsCall* call) {
    return call->dtype == kBFloat16 ? experts<BlockMath, BFloat16>(*call) : experts_in_float<FloatMath>(*call);
}

int hf_qmoe_grouped_linear_avx512bf16(const GroupedLinearCall* call) {
    return call->dtype == kBFloat16 ? grouped_linear<BlockMath, BFloat16>(*call)
                                    : grouped_linear_in_float<FloatMath>(*call);
}
