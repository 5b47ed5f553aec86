// Matrix products over packed weights: out[M, N] = x[M, K] * W[N, K]^T, fp32 in and out. Called by bind_linear.cpp.
//
// Packed form: tiles of 16 rows (the last one padded with zeros), so that a SIMD lane is an output row and no kernel
// needs a horizontal sum. Block types hold, per tile and block of 32 k's:
//     scales fp16[16] | mins fp16[16] (Q4_1 only) | values
// with the values of 4 consecutive k's of a row side by side, as byte dot products want them:
//     Q8_0         for each group of 4 k's: int8[16 rows][4]
//     Q4_0, Q4_1   for each pair of groups: byte[16 rows][4], low nibble = first group, high nibble = second group
// Dense types hold, per tile, for each k the 16 values of that column.
//
// Numerics: every output lane is accumulated in fp32 in ascending order of k (dense) or of blocks (block types, exact
// integer sums inside a block), by the same operations whatever M, N's split and the thread count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace trireme {

constexpr int kTileRows = 16;
constexpr int kBlock = 32;

enum class WeightKind { f32 = 0, f16 = 1, bf16 = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5 };
constexpr int kNumWeightKinds = 6;

inline bool is_block_kind(WeightKind kind) { return kind >= WeightKind::q8_0; }

// Bytes of one packed block of a tile: 32 k's of a block kind, one k of a dense kind.
constexpr size_t packed_block_bytes(WeightKind kind) {
  switch (kind) {
    case WeightKind::f32: return 4 * kTileRows;
    case WeightKind::f16:
    case WeightKind::bf16: return 2 * kTileRows;
    case WeightKind::q8_0: return 2 * kTileRows + kBlock * kTileRows;
    case WeightKind::q4_0: return 2 * kTileRows + kBlock / 2 * kTileRows;
    case WeightKind::q4_1: return 4 * kTileRows + kBlock / 2 * kTileRows;
  }
  return 0;
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

// raw: n rows as in a GGUF file (k a multiple of 32 for block kinds). Throws std::bad_alloc.
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

// Rows ids[0..count) as fp32. ids must be in range.
void gather_rows(const PackedWeight& weight, const int32_t* ids, int count, float* out, ptrdiff_t out_stride);

// ---- what a kernel file (linear_portable.cpp, linear_avx2.cpp, linear_avx512.cpp) provides

// int8 form of activations: x = q * scale per block of 32.
struct QuantizedRows {
  int8_t* q;        // [m][k]
  float* scale;     // [m][k / 32]; NaN where x has a value that is not finite
  float* sum;       // [m][k / 32], scale * sum of q
  int32_t* minus_sum;  // [m][k / 32], minus the sum of q
};

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

using QuantizeRowFn = void (*)(const float* x, int k, int8_t* q, float* scale, float* sum, int32_t* minus_sum);
using TileFn = void (*)(const TileArgs& args);

struct LinearKernels {
  QuantizeRowFn quantize_row;
  TileFn tiles[kNumWeightKinds];
};

const LinearKernels& linear_kernels_portable();
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avx512();

}  // namespace trireme
