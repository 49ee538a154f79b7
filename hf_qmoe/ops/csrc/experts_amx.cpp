// Products with AMX-BF16 for experts with many rows of bfloat16; what is left is done as with AVX512-BF16.
//
// 32 rows of weights are unpacked and multiplied with 32 rows of x at a time, in 2 x 2 tiles of 16 x 16 sums. Weights
// lie as [group][32][64] bfloat16, so that a tile of them is 16 rows of 32 columns, 128 bytes apart. A tile of x is to
// be 16 pairs of columns for 16 rows: x is packed once for all tiles, into blocks of [pair of columns][16 rows][2].
#include "amx.h"
#include "bfloat16_math_avx512bf16.h"

#include "kernels.h"

#include "product.inc"

#include "row_blocks.inc"

#include "experts.inc"

namespace {

constexpr int kTileSize = kBlockRows, kTileColumns = kBlockColumns;

// An expert with fewer rows than this is multiplied with AVX512-BF16: a tile of them would not be full. That it pays
// from here on was not measured.
constexpr int kManyRows = kTileSize;

struct AmxMath : BFloat16Math {};

// The rows of the experts that have many, packed; those of the others as they are.
class PackedRows {
  public:
    // Those of experts `first` to `last`.
    PackedRows(const Rows<BFloat16>& rows, int64_t columns, const int64_t* offsets, int64_t first, int64_t last,
               int64_t threads)
        : rows_(rows),
          first_(first),
          block_size_(kTileSize * padded(columns)),
          blocks_(offsets + first, last - first),
          packed_(blocks_.count * block_size_) {
        if (!has_memory()) return;
        const int64_t* owners = blocks_.owners.get();
        for_ranges(blocks_.count, block_size_, (int)threads, [&](int64_t from, int64_t to) {
            for (int64_t block = from; block < to; block++) {
                const int64_t inside = (block - blocks_.starts.get()[owners[block]]) * kTileSize;
                const int64_t expert = first_ + owners[block];
                const int64_t first = load(offsets, expert) + inside, last = load(offsets, expert + 1);
                pack_block(rows_, first, least(last - first, kTileSize), padded(columns),
                           packed_.get() + block * block_size_);
            }
        });
    }

    bool has_memory() const { return blocks_.starts.get() && blocks_.owners.get() && packed_.get(); }

    const Rows<BFloat16>& rows() const { return rows_; }

    // Block i of an expert with many rows is at `block(expert) + i * block_size()`.
    const BFloat16* block(int64_t expert) const {
        return packed_.get() + blocks_.starts.get()[expert - first_] * block_size_;
    }
    int64_t block_size() const { return block_size_; }

    static int64_t blocks_of_expert(int64_t count) { return count < kManyRows ? 0 : blocks_of(count, kTileSize); }

  private:

    // The first block of each expert, and the expert of each block.
    struct Blocks {
        Blocks(const int64_t* offsets, int64_t num_experts)
            : count(total(offsets, num_experts)), starts(num_experts), owners(count) {
            if (!starts.get() || !owners.get()) return;
            for (int64_t expert = 0, next = 0; expert < num_experts; expert++) {
                starts.get()[expert] = next;
                const int64_t end = next + blocks_of_expert(load(offsets, expert + 1) - load(offsets, expert));
                for (; next < end; next++) owners.get()[next] = expert;
            }
        }

        static int64_t total(const int64_t* offsets, int64_t num_experts) {
            int64_t sum = 0;
            for (int64_t expert = 0; expert < num_experts; expert++)
                sum += blocks_of_expert(load(offsets, expert + 1) - load(offsets, expert));
            return sum;
        }

        const int64_t count;
        const Buffer<int64_t> starts, owners;
    };

    const Rows<BFloat16> rows_;
    const int64_t first_, block_size_;
    const Blocks blocks_;
    const Buffer<BFloat16> packed_;
};

template <>
struct Operand<AmxMath> : Operand<BFloat16Math> {
    using Type = const PackedRows&;

    static int64_t packed_of(int64_t count) { return PackedRows::blocks_of_expert(count) * kTileSize; }

    static PackedRows of(const Rows<BFloat16>& rows, int64_t columns, const int64_t* offsets, int64_t first,
                         int64_t last, int64_t threads) {
        return PackedRows(rows, columns, offsets, first, last, threads);
    }
    static PackedRows placed(const Rows<BFloat16>& rows, int64_t columns, const int64_t* offsets, int64_t num_experts,
                             int64_t threads) {
        return PackedRows(rows, columns, offsets, 0, num_experts, threads);
    }
    static bool has_memory(Type rows) { return rows.has_memory(); }
};

// The tiles of a thread: configured at the first use, given back at the end. A thread that has tiles in use takes
// longer to switch to and from.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (configured_) tile_release();
    }

    void use() {
        if (configured_) return;
        TileConfig config = {};
        config.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = kTileSize;
            config.column_bytes[tile] = kTileColumns * sizeof(BFloat16);
        }
        tile_load_config(&config);
        configured_ = true;
    }

  private:
    bool configured_ = false;
};

// `out[i][0..31]` = 32 rows of weights times row i of one or two blocks of x.
template <bool kTwo>
static void multiply_blocks(const BFloat16* weights, const BFloat16* x, int64_t block_size, int64_t groups,
                            float (*out)[kTileRows]) {
    constexpr int64_t kRowBytes = kGroup * sizeof(BFloat16), kPairBytes = kTileColumns * sizeof(BFloat16);
    constexpr int64_t kSumBytes = kTileSize * sizeof(float);
    alignas(64) float sums[4][kTileSize * kTileSize];
    tile_fence();
    tile_zero(0);
    tile_zero(1);
    if (kTwo) {
        tile_zero(2);
        tile_zero(3);
    }
    for (int64_t group = 0; group < groups; group++, weights += kTileRows * kGroup) {
        for (int k = 0; k < kGroup; k += kTileColumns, x += kTileSize * kTileColumns) {
            tile_load(4, weights + k, kRowBytes);
            tile_load(5, weights + kTileSize * kGroup + k, kRowBytes);
            tile_load(6, x, kPairBytes);
            tile_dot(0, 4, 6);
            tile_dot(1, 5, 6);
            if (kTwo) {
                tile_load(7, x + block_size, kPairBytes);
                tile_dot(2, 4, 7);
                tile_dot(3, 5, 7);
            }
        }
    }
    tile_store(0, sums[0], kSumBytes);
    tile_store(1, sums[1], kSumBytes);
    put_sums(sums[0], out);
    put_sums(sums[1], reinterpret_cast<float(*)[kTileRows]>(&out[0][kTileSize]));
    if (kTwo) {
        tile_store(2, sums[2], kSumBytes);
        tile_store(3, sums[3], kSumBytes);
        put_sums(sums[2], out + kTileSize);
        put_sums(sums[3], reinterpret_cast<float(*)[kTileRows]>(&out[kTileSize][kTileSize]));
    }
}

template <>
class Worker<AmxMath> : public Worker<BFloat16Math> {
  public:
    using Worker<BFloat16Math>::Worker;

    template <class Take, class TakeBlock>
    void multiply_tile(const PackedStack& stack, int64_t expert, const Tile& tile, const PackedRows& rows,
                       int64_t first, int64_t last, const Take& take, const TakeBlock& take_block) {
        if (last - first < kManyRows)
            Worker<BFloat16Math>::multiply_tile(stack, expert, tile, rows.rows(), first, last, take, take_block);
        else if (stack.bits == 4)
            multiply_many<BFloat16Math::Unpack4, 4>(stack, expert, tile, rows, first, last, take);
        else
            multiply_many<BFloat16Math::Unpack8, 8>(stack, expert, tile, rows, first, last, take);
    }

  private:
    template <class Unpack, int kBits, class Take>
    void multiply_many(const PackedStack& stack, int64_t index, const Tile& tile, const PackedRows& rows,
                       int64_t first, int64_t last, const Take& take) {
        const Expert expert(stack, index);
        const int64_t groups = padded(stack.columns) / kGroup, size = rows.block_size();
        const int64_t count = last - first, pairs = blocks_of(count, 2 * kTileSize);
        Unpack unpack(stack.codebook, false);
        for (int q = 0; q < kTileRows; q += kQuad)
            unpack_rows<Unpack, kBits, kTileRows>(stack, expert, tile, q, unpack, weights_.get() + q * kGroup);
        tiles_.use();
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int64_t from = pair * 2 * kTileSize, length = least(count - from, 2 * kTileSize);
            const BFloat16* x = rows.block(index) + 2 * pair * size;
            float values[2 * kTileSize][kTileRows];
            // Read from memory while there is time, what the next tile is unpacked from.
            for (int64_t j = kTileRows * pair / pairs; j < kTileRows * (pair + 1) / pairs; j++)
                prefetch(expert.codes(tile.rows[j] * stack.columns + tile.apart), stack.columns * kBits / 8);
            if (length > kTileSize)
                multiply_blocks<true>(weights_.get(), x, size, groups, values);
            else
                multiply_blocks<false>(weights_.get(), x, size, groups, values);
            for (int64_t i = 0; i < length; i++) take(first + from + i, values[i]);
        }
    }

    Tiles tiles_;
};

}  // namespace

int hf_qmoe_experts_amx(const ExpertsCall* call) {
    return call->dtype == kBFloat16 ? experts<AmxMath, BFloat16>(*call) : experts_in_float<FloatMath>(*call);
}

int hf_qmoe_grouped_linear_amx(const GroupedLinearCall* call) {
    return call->dtype == kBFloat16 ? grouped_linear<AmxMath, BFloat16>(*call)
                                    : grouped_linear_in_float<FloatMath>(*call);
}

void hf_qmoe_multiply_tile_amx(float* sums, const uint16_t* a, const uint16_t* b) {
    Tiles tiles;
    tiles.use();
    tile_load(0, sums, 64);
    tile_load(1, a, 64);
    tile_load(2, b, 64);
    tile_dot(0, 1, 2);
    tile_store(0, sums, 64);
}

bool hf_qmoe_agrees_amx() {
    // Two and a half blocks of rows of x, two and a half groups of columns, weights of either sign.
    constexpr int64_t kRows = 40, kColumns = 160, kWeights = kTileRows * kColumns, kBlocksize = 32;
    uint32_t state = 1;
    const auto next = [&] { return state = state * 1664525u + 1013904223u; };
    uint8_t packed[kWeights / 2];
    float absmax[kWeights / kBlocksize], codebook[16];
    for (uint8_t& byte : packed) byte = (uint8_t)(next() >> 24);
    for (float& scale : absmax) scale = 0.5f + (float)(next() >> 16) * 0x1p-17f;
    for (int i = 0; i < 16; i++) codebook[i] = (float)(2 * i - 15) / 15;
    const PackedStack stack = {packed,   absmax,    nullptr,  nullptr,    nullptr,
                               codebook, kTileRows, kColumns, kBlocksize, 4};

    const Buffer<BFloat16> x(kRows * padded(kColumns));
    const int64_t offsets[] = {0, kRows};
    Tile tile = {};
    rows_of_tile(0, kTileRows, tile.rows);
    Worker<AmxMath> worker(kColumns);
    Worker<BFloat16Math> other(kColumns);
    if (!x.get() || !worker.has_memory() || !other.has_memory()) return false;
    memset(x.get(), 0, kRows * padded(kColumns) * sizeof(BFloat16));
    for (int64_t i = 0; i < kRows; i++)
        for (int64_t k = 0; k < kColumns; k++)
            from_float((float)(next() >> 16) * 0x1p-15f - 1.0f, x.get() + i * padded(kColumns) + k);
    const Rows<BFloat16> rows = {x.get(), nullptr, padded(kColumns)};
    const PackedRows packed_rows(rows, kColumns, offsets, 0, 1, 1);
    if (!packed_rows.has_memory()) return false;

    float sums[kRows][kTileRows], expected[kRows][kTileRows];
    worker.multiply_tile(stack, 0, tile, packed_rows, 0, kRows,
                         [&](int64_t row, const float* values) { memcpy(sums[row], values, sizeof sums[row]); },
                         NoBlocks());
    other.multiply_tile(stack, 0, tile, rows, 0, kRows,
                        [&](int64_t row, const float* values) { memcpy(expected[row], values, sizeof sums[row]); },
                        NoBlocks());
    // Sums of 160 terms below 1, up to 13 in size: ten units of their last place. Emulated they are 1.4e-6 apart.
    bool agrees = true;
    for (int64_t i = 0; i < kRows; i++)
        for (int j = 0; j < kTileRows; j++) agrees = agrees && fabsf(sums[i][j] - expected[i][j]) <= 1e-5f;
    return agrees;
}
