// Stores a tile's sums to the output, for linear_avx512.cpp and linear_dense_avx512.cpp only: each has its own copy, so that the
// linker never shares AVX-512 code with other files.
#pragma once

#include <immintrin.h>

#include "cpu/linear/linear.h"

namespace trireme {
namespace {

inline void store(const TileArgs& args, int row, int tile, __m512 acc) {
  const int first = tile * kTileRows;
  const int cols = args.num_cols - first;
  const __mmask16 mask = cols >= kTileRows ? 0xffff : static_cast<__mmask16>((1u << cols) - 1);
  float* out = args.out + row * args.out_stride + first;
  if (args.bias != nullptr) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, args.bias + first));
  if (args.accumulate) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, out));
  _mm512_mask_storeu_ps(out, mask, acc);
}

}  // namespace
}  // namespace trireme
