// Products with dense weights (f32, f16, bf16) for AVX2; see linear.h. Nothing here may have external linkage but the table.
#include <immintrin.h>

#include "linear.h"
#include "linear_store_avx2.h"

namespace trireme {
namespace {

template <WeightKind kind>
inline __attribute__((always_inline)) __m256 load_dense(const uint8_t* p) {
  if constexpr (kind == WeightKind::f32) return _mm256_load_ps(reinterpret_cast<const float*>(p));
  const __m128i halfs = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (kind == WeightKind::f16) return _mm256_cvtph_ps(halfs);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halfs), 16));
}

// R rows of x by T consecutive tiles; R * T accumulators of 16 lanes hide the latency of the sequential sums.
template <WeightKind kind, int R, int T>
inline __attribute__((always_inline)) void dense_rows(const TileArgs& args, int tile, int first_row) {
  constexpr size_t step = packed_group_bytes(kind);
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const float* x = args.x + first_row * args.x_stride;
  __m256 acc[R][T][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t][0] = acc[r][t][1] = _mm256_setzero_ps();
  }
  for (int i = 0; i < args.k; ++i, packed += step) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 w0 = load_dense<kind>(packed + t * args.tile_bytes);
      const __m256 w1 = load_dense<kind>(packed + t * args.tile_bytes + step / 2);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256 value = _mm256_broadcast_ss(x + r * args.x_stride + i);
        acc[r][t][0] = _mm256_fmadd_ps(w0, value, acc[r][t][0]);
        acc[r][t][1] = _mm256_fmadd_ps(w1, value, acc[r][t][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) store(args, first_row + r, tile + t, acc[r][t][0], acc[r][t][1]);
  }
}

template <WeightKind kind>
void dense_tiles(const TileArgs& args) {
  int tile = 0;
  if (args.m == 1) {
    for (; tile + 4 <= args.num_tiles; tile += 4) dense_rows<kind, 1, 4>(args, tile, 0);
  } else if (args.m == 2) {
    for (; tile + 2 <= args.num_tiles; tile += 2) dense_rows<kind, 2, 2>(args, tile, 0);
  }
  for (; tile < args.num_tiles; ++tile) {
    int row = 0;
    for (; row + 6 <= args.m; row += 6) dense_rows<kind, 6, 1>(args, tile, row);
    switch (args.m - row) {
      case 5: dense_rows<kind, 5, 1>(args, tile, row); break;
      case 4: dense_rows<kind, 4, 1>(args, tile, row); break;
      case 3: dense_rows<kind, 3, 1>(args, tile, row); break;
      case 2: dense_rows<kind, 2, 1>(args, tile, row); break;
      case 1: dense_rows<kind, 1, 1>(args, tile, row); break;
    }
  }
}

}  // namespace

TileFn dense_tiles_avx2(WeightKind kind) {
  switch (kind) {
    case WeightKind::f16: return dense_tiles<WeightKind::f16>;
    case WeightKind::bf16: return dense_tiles<WeightKind::bf16>;
    default: return dense_tiles<WeightKind::f32>;
  }
}

}  // namespace trireme
