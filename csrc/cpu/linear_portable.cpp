// Kernels of linear.h in plain C++, for machines without the vector sets and as a check of the others.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "halfs.h"
#include "linear.h"

namespace trireme {
namespace {

void quantize_row(const float* x, int k, int8_t* q, float* scale, float* sum, int32_t* minus_sum) {
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    uint32_t largest = 0;  // compared as integers, so that NaN and infinity win
    for (int i = 0; i < kBlock; ++i) largest = std::max(largest, bits_from_float(x[i]) & 0x7fffffffu);
    const float amax = float_from_bits(largest);
    const bool is_finite = largest < 0x7f800000u;
    const bool is_tiny = amax < 1e-30f;
    const float inverse = !is_finite || is_tiny ? 0.0f : 127.0f / amax;
    int32_t total = 0;
    for (int i = 0; i < kBlock; ++i) {
      q[i] = inverse == 0.0f ? 0 : static_cast<int8_t>(std::lrintf(x[i] * inverse));
      total += q[i];
    }
    scale[block] = !is_finite ? NAN : is_tiny ? 0.0f : amax / 127.0f;
    sum[block] = scale[block] * static_cast<float>(total);
    minus_sum[block] = -total;
  }
}

void store(const TileArgs& args, int row, int tile, const float* acc) {
  const int first = tile * kTileRows;
  float* out = args.out + row * args.out_stride + first;
  const int cols = std::min(kTileRows, args.num_cols - first);
  for (int lane = 0; lane < cols; ++lane) {
    float value = acc[lane];
    if (args.bias != nullptr) value += args.bias[first + lane];
    if (args.accumulate) value += out[lane];
    out[lane] = value;
  }
}

void dot_q8(const uint8_t* values, const int8_t* q, int32_t* dot) {
  const auto* weights = reinterpret_cast<const int8_t*>(values);
  for (int group = 0; group < kBlock / 4; ++group) {
    for (int lane = 0; lane < kTileRows; ++lane) {
      for (int i = 0; i < 4; ++i) dot[lane] += weights[(group * kTileRows + lane) * 4 + i] * q[group * 4 + i];
    }
  }
}

void dot_q4(const uint8_t* values, const int8_t* q, int32_t* dot) {
  for (int pair = 0; pair < kBlock / 8; ++pair) {
    for (int lane = 0; lane < kTileRows; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const uint8_t byte = values[(pair * kTileRows + lane) * 4 + i];
        dot[lane] += (byte & 15) * q[pair * 8 + i] + (byte >> 4) * q[pair * 8 + 4 + i];
      }
    }
  }
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int num_scales = kind == WeightKind::q4_1 ? 2 : 1;
  const int num_blocks = args.k / kBlock;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    for (int row = 0; row < args.m; ++row) {
      float acc[kTileRows] = {};
      for (int block = 0; block < num_blocks; ++block) {
        const uint8_t* packed = args.tiles + tile * args.tile_bytes + block * step;
        const size_t at = static_cast<size_t>(row) * num_blocks + block;
        int32_t dot[kTileRows] = {};
        const uint8_t* values = packed + 2 * kTileRows * num_scales;
        if (kind == WeightKind::q8_0) dot_q8(values, args.rows.q + at * kBlock, dot);
        if (kind != WeightKind::q8_0) dot_q4(values, args.rows.q + at * kBlock, dot);
        uint16_t halfs[2 * kTileRows];
        std::memcpy(halfs, packed, 2 * kTileRows * num_scales);
        for (int lane = 0; lane < kTileRows; ++lane) {
          if (kind == WeightKind::q4_0) dot[lane] += 8 * args.rows.minus_sum[at];
          acc[lane] += static_cast<float>(dot[lane]) * (float_from_fp16(halfs[lane]) * args.rows.scale[at]);
          if (kind == WeightKind::q4_1) acc[lane] += float_from_fp16(halfs[kTileRows + lane]) * args.rows.sum[at];
        }
      }
      store(args, row, tile, acc);
    }
  }
}

void load_column(WeightKind kind, const uint8_t* packed, float* column) {
  if (kind == WeightKind::f32) {
    std::memcpy(column, packed, 4 * kTileRows);
    return;
  }
  uint16_t halfs[kTileRows];
  std::memcpy(halfs, packed, sizeof halfs);
  for (int lane = 0; lane < kTileRows; ++lane) {
    column[lane] = kind == WeightKind::f16 ? float_from_fp16(halfs[lane]) : float_from_bf16(halfs[lane]);
  }
}

template <WeightKind kind>
void dense_tiles(const TileArgs& args) {
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int kRows = 4;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    const uint8_t* packed = args.tiles + tile * args.tile_bytes;
    for (int first = 0; first < args.m; first += kRows) {
      const int rows = std::min(kRows, args.m - first);
      float acc[kRows][kTileRows] = {};
      for (int i = 0; i < args.k; ++i) {
        float column[kTileRows];
        load_column(kind, packed + i * step, column);
        for (int row = 0; row < rows; ++row) {
          const float value = args.x[(first + row) * args.x_stride + i];
          for (int lane = 0; lane < kTileRows; ++lane) acc[row][lane] += column[lane] * value;
        }
      }
      for (int row = 0; row < rows; ++row) store(args, first + row, tile, acc[row]);
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels_portable() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles<WeightKind::f32>, dense_tiles<WeightKind::f16>, dense_tiles<WeightKind::bf16>,
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>},
  };
  return kernels;
}

}  // namespace trireme
