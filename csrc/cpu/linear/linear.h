// Matrix products over packed weights: out[M, N] = x[M, K] * W[N, K]^T, fp32 in and out. Called by bind/linear.cpp.
//
// Packed form: tiles of 16 rows (the last one padded with zeros), so that a SIMD lane is an output row and no kernel
// needs a horizontal sum. Block types are a sequence of groups; a group is what shares the scales of one raw block of the
// file (32 or 256 k's):
//     header: fp16[16] scales, fp16[16] mins (types with mins) or uint8[16] exponents (MXFP4)
//     then for each 32 k's: sub-scales (types of 256) | first plane | second plane
// Codes of 4 consecutive k's of a row (a quad; 8 quads to a block) lie side by side, as byte dot products want them. A plane of B bits is
// B pieces of byte[16 rows][4]; piece p has quads p * 8 / B onwards in its bit fields, lowest first:
//     Q8_0 8 bits | Q4_0 Q4_1 Q4_K IQ4_NL IQ4_XS MXFP4 4 | Q5_0 Q5_1 Q5_K 4 + 1 | Q6_K 4 + 2 | Q2_K 2 | Q3_K 2 + 1
// Sub-scales: uint8[16] scales + uint8[16] mins (Q4_K, Q5_K), int8[16] (IQ4_XS), or per row a pair for its two runs of 16
// k's: int8[16][2] (Q3_K, Q6_K), byte[16][2] with the scale in the low and the min in the high nibble (Q2_K).
// Six-bit sub-scales become bytes; all else keeps the bits of the file. Dense types hold, per tile, for each k the 16
// values of that column. int8 (one scale to a row; in a file: float32 scale, then k signed bytes) holds per tile
//     float32[16] scales | int32[16] minus 128 times the sum of each row | for each 4 k's byte[16 rows][4]; k ends with zeros
//
// Numerics: every output lane is accumulated in fp32 in ascending order of k (dense) or of blocks (block types, exact
// integer sums inside a block, sub-scales of 16 k's included), by the same operations whatever M, N's split and threads.
// int8 rounds a row of x with one scale and sums all of k in int32, so that all variants agree to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace trireme {

constexpr int kTileRows = 16;
constexpr int kBlock = 32;

enum class WeightKind {
  f32 = 0, f16 = 1, bf16 = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5, q5_0 = 6, q5_1 = 7, q2_k = 8, q3_k = 9, q4_k = 10, q5_k = 11,
  q6_k = 12, iq4_nl = 13, iq4_xs = 14, mxfp4 = 15, int8 = 16
};
constexpr int kNumWeightKinds = 17;

constexpr bool is_dense_kind(WeightKind kind) { return kind <= WeightKind::bf16; }
constexpr bool is_block_kind(WeightKind kind) { return kind >= WeightKind::q8_0 && kind <= WeightKind::mxfp4; }

// Most k's of int8, whose sums of 128 * 127 each must fit int32.
constexpr int kMaxInt8Length = 1 << 17;

enum class ScaleForm {
  half,         // fp16 per 32
  half_min,     // fp16 scale and min per 32
  exponent,     // power of two per 32
  super32,      // fp16 per 256 times int8 per 32
  super32_min,  // fp16 scale and min per 256 times uint8 per 32
  super16,      // fp16 per 256 times int8 per 16
  super16_min,  // fp16 scale and min per 256 times 4 bits per 16
};

struct BlockForm {
  int raw_values;   // k's that one raw block holds
  int raw_bytes;
  int first_bits;   // width of the first plane
  int second_bits;  // of the second one, which holds the upper bits; may be 0
  int offset;       // taken off each code (after the table, where there is one); 0 or a power of two: kernels shift by it
  int max_code;     // largest unsigned code (after the table); 0: signed bytes
  const int8_t* table;  // 16 values that 4-bit codes stand for, or null
  ScaleForm scale;
};

inline constexpr int8_t kIq4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice the values of a float of 4 bits, plus 16.
inline constexpr int8_t kMxfp4Table[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr BlockForm block_form(WeightKind kind) {
  switch (kind) {
    case WeightKind::q8_0: return {32, 34, 8, 0, 0, 0, nullptr, ScaleForm::half};
    case WeightKind::q4_0: return {32, 18, 4, 0, 8, 15, nullptr, ScaleForm::half};
    case WeightKind::q4_1: return {32, 20, 4, 0, 0, 15, nullptr, ScaleForm::half_min};
    case WeightKind::q5_0: return {32, 22, 4, 1, 16, 31, nullptr, ScaleForm::half};
    case WeightKind::q5_1: return {32, 24, 4, 1, 0, 31, nullptr, ScaleForm::half_min};
    case WeightKind::q2_k: return {256, 84, 2, 0, 0, 3, nullptr, ScaleForm::super16_min};
    case WeightKind::q3_k: return {256, 110, 2, 1, 4, 7, nullptr, ScaleForm::super16};
    case WeightKind::q4_k: return {256, 144, 4, 0, 0, 15, nullptr, ScaleForm::super32_min};
    case WeightKind::q5_k: return {256, 176, 4, 1, 0, 31, nullptr, ScaleForm::super32_min};
    case WeightKind::q6_k: return {256, 210, 4, 2, 32, 63, nullptr, ScaleForm::super16};
    case WeightKind::iq4_nl: return {32, 18, 4, 0, 0, 0, kIq4Table, ScaleForm::half};
    case WeightKind::iq4_xs: return {256, 136, 4, 0, 0, 0, kIq4Table, ScaleForm::super32};
    case WeightKind::mxfp4: return {32, 17, 4, 0, 16, 28, kMxfp4Table, ScaleForm::exponent};
    default: return {1, kind == WeightKind::f32 ? 4 : 2, 0, 0, 0, 0, nullptr, ScaleForm::half};
  }
}

constexpr bool offsets_are_shifts() {
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    const int offset = block_form(static_cast<WeightKind>(kind)).offset;
    if ((offset & (offset - 1)) != 0) return false;
  }
  return true;
}
static_assert(offsets_are_shifts());

constexpr bool has_mins(ScaleForm form) {
  return form == ScaleForm::half_min || form == ScaleForm::super32_min || form == ScaleForm::super16_min;
}

constexpr bool has_pairs(ScaleForm form) { return form == ScaleForm::super16 || form == ScaleForm::super16_min; }

constexpr size_t header_bytes(ScaleForm form) {
  return kTileRows * (form == ScaleForm::exponent ? 1 : has_mins(form) ? 4 : 2);
}

constexpr size_t sub_scale_bytes(ScaleForm form) {
  switch (form) {
    case ScaleForm::super32: return kTileRows;
    case ScaleForm::super32_min:
    case ScaleForm::super16:
    case ScaleForm::super16_min: return 2 * kTileRows;
    default: return 0;
  }
}

// Bytes of one packed block of 32 k's, its group's header not counted.
constexpr size_t packed_block_bytes(WeightKind kind) {
  const BlockForm form = block_form(kind);
  return sub_scale_bytes(form.scale) + static_cast<size_t>(form.first_bits + form.second_bits) * 4 * kTileRows;
}

// Bytes of one packed group of a tile: the k's of one raw block; one k of a dense kind.
constexpr size_t packed_group_bytes(WeightKind kind) {
  const BlockForm form = block_form(kind);
  if (!is_block_kind(kind)) return static_cast<size_t>(form.raw_bytes) * kTileRows;
  return header_bytes(form.scale) + form.raw_values / kBlock * packed_block_bytes(kind);
}

// Bytes of one row in a file, and of a tile.
constexpr size_t raw_row_bytes(WeightKind kind, int k) {
  if (kind == WeightKind::int8) return 4 + static_cast<size_t>(k);
  return static_cast<size_t>(k / block_form(kind).raw_values) * block_form(kind).raw_bytes;
}

static constexpr int blocks_in(int k) { return (k + kBlock - 1) / kBlock; }

constexpr size_t packed_tile_bytes(WeightKind kind, int k) {
  if (kind == WeightKind::int8) return kTileRows * (8 + static_cast<size_t>(blocks_in(k)) * kBlock);
  return packed_group_bytes(kind) * static_cast<size_t>(k / block_form(kind).raw_values);
}

struct PackedWeight {
  WeightKind kind;
  int n;
  int k;
  int num_tiles;
  size_t tile_bytes;
  const uint8_t* data;           // 64-byte aligned
  std::shared_ptr<void> memory;  // keeps the mapping that data lies in
  size_t nbytes() const { return tile_bytes * static_cast<size_t>(num_tiles); }
};

// raw: n rows as in a GGUF file (k a multiple of the block's values). Uses the thread pool. Throws std::bad_alloc.
std::unique_ptr<PackedWeight> pack_weight(WeightKind kind, const uint8_t* raw, int n, int k);

struct LinearArgs {
  const float* x;
  ptrdiff_t x_stride;  // elements between rows
  int m;
  float* out;
  ptrdiff_t out_stride;
  const float* bias;  // [n] or null
  bool accumulate;    // add to out instead of overwriting it
};

// Uses the thread pool; any thread may call it.
void linear(const PackedWeight& weight, const LinearArgs& args);

// Rows ids[0..count) as fp32, exactly the values of the file. ids must be in range.
void gather_rows(const PackedWeight& weight, const int32_t* ids, int count, float* out, ptrdiff_t out_stride);

// Rounds n rows of fp32 to raw rows of q8_0 or q4_0 (k a multiple of 32), by the rules of ggml's reference, or of int8: to
// nearest, the largest magnitude of a row becoming 127; a row that is not finite gets the scale NaN. Uses the thread pool.
void quantize_weight(WeightKind kind, const float* values, int n, int k, uint8_t* raw);

// ---- linear_pack.cpp, for linear.cpp

// Packs up to 16 rows, raw_row bytes apart, into a tile of zeros.
void pack_tile(WeightKind kind, const uint8_t* raw, size_t raw_row, int rows, int k, uint8_t* tile);

// One row of a tile.
void read_row(WeightKind kind, const uint8_t* tile, int lane, int k, float* out);

// ---- linear_int8.cpp, for linear_pack.cpp and linear_quantize.cpp: the same of int8

void pack_int8_tile(const uint8_t* raw, size_t raw_row, int rows, int k, uint8_t* tile);
void read_int8_row(const uint8_t* tile, int lane, int k, float* out);
void round_int8_row(const float* values, int k, uint8_t* raw);

// ---- what a kernel file (linear_portable.cpp, linear_avx2.cpp, linear_avxvnni.cpp, linear_avx512.cpp, linear_amx.cpp) provides

// int8 form of activations: x = q * scale per block of 32. Either row by row, or "grouped": for each `group` rows, for each block,
// q of these rows and then what else belongs to the block (grouped_block_bytes in all), so that a kernel that takes many rows
// finds them side by side. Of the last group's rows that do not exist, nothing is written.
// For int8 weights: row by row, k as far as whole blocks go, the row's only scale in the place of its first block's, and of
// the rest nothing; q in the form that the kernels want.
struct QuantizedRows {
  int8_t* q;        // [m][k]
  float* scale;     // [m][k / 32]; NaN where x has a value that is not finite
  float* sum;       // [m][k / 32], scale * sum of q
  int32_t* minus_sum;  // [m][k / 32], minus the sum of q, times sum_factor
  int32_t* minus_halves;  // [m][k / 32], the same of the first and the second 16 as two int16, first one low
  ptrdiff_t q_step = kBlock;  // bytes between the blocks of a row
  ptrdiff_t step = 1;         // elements of the other arrays between them
  int16_t* wide = nullptr;    // in place of q: int16, for kernels that ask for it; always grouped
  int group = 1;              // 1: row by row
  int sum_factor = 1;
};
// What kernels with scaled_sums have the sums multiplied by.
constexpr int sum_factor(BlockForm form) { return form.offset != 0 ? form.offset : 1; }
constexpr ptrdiff_t grouped_block_bytes(int group, bool wide) { return group * (kBlock * (wide ? 2 : 1) + 16); }
constexpr ptrdiff_t kGroupedBlock = grouped_block_bytes(kTileRows, false);

// Most rows that a task has, and with AVX-512, whose machines have larger caches.
constexpr int kMaxTaskRows = 96, kAvx512TaskRows = 256;

// One rectangle of a product: consecutive tiles x consecutive rows.
struct TileArgs {
  const uint8_t* tiles;
  size_t tile_bytes;
  int num_tiles;
  int k;
  int m;
  const float* x;  // dense kinds
  ptrdiff_t x_stride;
  QuantizedRows rows;  // block kinds
  float* out;          // at the first row and the first column of the first tile
  ptrdiff_t out_stride;
  int num_cols;       // valid columns from the first tile on
  const float* bias;  // at the first column, or null
  bool accumulate;
};

using QuantizeRowFn = void (*)(const float* x, int k, const QuantizedRows& row);
using TileFn = void (*)(const TileArgs& args);

// What multiplies with int8 weights, and the rounding of x that it wants.
struct Int8Kernels {
  QuantizeRowFn quantize_row;
  TileFn tiles;
};

struct LinearKernels {
  QuantizeRowFn quantize_row;
  TileFn tiles[kNumWeightKinds];
  QuantizeRowFn quantize_whole_row;  // for int8 weights
  int grouped_from = 1 << 30;  // calls of so many rows get them grouped; quantize_row then minds the steps
  int dear_grouped_from = 1 << 30;  // the same for kinds that are dear to unpack, if that is less
  int group = kTileRows;       // a divisor of task_rows
  int task_rows = kMaxTaskRows;          // a task unpacks its weights once
  int strip_tiles = 1;                   // grouped rows meet so many tiles at once
  size_t task_row_bytes = 192 << 10;     // what the rounded form of a task's rows may take, so that they stay in the second-level cache
  bool wide = false;           // grouped rows for kinds of signed codes are QuantizedRows::wide
  bool scaled_sums = false;    // QuantizedRows::sum_factor is the kind's offset
};

const LinearKernels& linear_kernels_portable();
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avxvnni();
const LinearKernels& linear_kernels_avx512();
const LinearKernels& linear_kernels_amx();

// Of linear_dense_*.cpp, linear_plain_*.cpp and linear_super_*.cpp, for those tables.
TileFn dense_tiles_portable(WeightKind kind);
TileFn dense_tiles_avx2(WeightKind kind);
TileFn plain_tiles_avx2(WeightKind kind);
TileFn super_tiles_avx2(WeightKind kind);
TileFn dense_tiles_avx512(WeightKind kind);

// Of linear_int8_*.cpp, likewise.
Int8Kernels int8_kernels_portable();
Int8Kernels int8_kernels_avx2();
Int8Kernels int8_kernels_avxvnni();
Int8Kernels int8_kernels_avx512();

static inline void set_int8(LinearKernels& kernels, const Int8Kernels& int8) {
  kernels.tiles[static_cast<int>(WeightKind::int8)] = int8.tiles;
  kernels.quantize_whole_row = int8.quantize_row;
}

}  // namespace trireme
