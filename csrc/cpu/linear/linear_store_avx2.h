// Stores a tile's sums to the output and groups rows of x, for linear_*_avx2.cpp only: each has its own copy, so that the linker
// never shares AVX2 code with other files.
#pragma once

#include <immintrin.h>

#include "cpu/linear/linear.h"

namespace trireme {
namespace {

// Rows of x that are interleaved for large M: what a panel kernel takes at a time.
constexpr int kGroupRows = 6;

inline void store_half(float* out, const float* bias, bool accumulate, __m256 acc) {
  if (bias != nullptr) acc = _mm256_add_ps(acc, _mm256_loadu_ps(bias));
  if (accumulate) acc = _mm256_add_ps(acc, _mm256_loadu_ps(out));
  _mm256_storeu_ps(out, acc);
}

inline void store_partial(float* out, const float* bias, bool accumulate, const float* acc, int cols) {
  for (int lane = 0; lane < cols; ++lane) {
    float value = acc[lane];
    if (bias != nullptr) value += bias[lane];
    if (accumulate) value += out[lane];
    out[lane] = value;
  }
}

inline void store(const TileArgs& args, int row, int tile, __m256 acc0, __m256 acc1) {
  const int first = tile * kTileRows;
  float* out = args.out + row * args.out_stride + first;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + first;
  if (args.num_cols - first >= kTileRows) {
    store_half(out, bias, args.accumulate, acc0);
    store_half(out + 8, bias == nullptr ? nullptr : bias + 8, args.accumulate, acc1);
    return;
  }
  float lanes[kTileRows];
  _mm256_storeu_ps(lanes, acc0);
  _mm256_storeu_ps(lanes + 8, acc1);
  store_partial(out, bias, args.accumulate, lanes, args.num_cols - first);
}

}  // namespace
}  // namespace trireme
