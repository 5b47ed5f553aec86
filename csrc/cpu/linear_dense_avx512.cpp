// Products with dense weights (f32, f16, bf16) for AVX-512; see linear.h. Nothing here may have external linkage but the table.
#include <immintrin.h>

#include "linear.h"
#include "linear_store_avx512.h"

namespace trireme {
namespace {

template <WeightKind kind>
inline __attribute__((always_inline)) __m512 load_dense(const uint8_t* p) {
  if constexpr (kind == WeightKind::f32) return _mm512_loadu_ps(p);
  if constexpr (kind == WeightKind::f16) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m256i halfs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halfs), 16));
}

// R rows of x by T consecutive tiles; R * T accumulators hide the latency of the sequential sums.
template <WeightKind kind, int R, int T>
inline __attribute__((always_inline)) void dense_rows(const TileArgs& args, int tile, int first_row) {
  constexpr size_t step = packed_group_bytes(kind);
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const float* x = args.x + first_row * args.x_stride;
  __m512 acc[R][T];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] = _mm512_setzero_ps();
  }
  for (int i = 0; i < args.k; ++i, packed += step) {
    __m512 w[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) w[t] = load_dense<kind>(packed + t * args.tile_bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 value = _mm512_set1_ps(x[r * args.x_stride + i]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[r][t] = _mm512_fmadd_ps(w[t], value, acc[r][t]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) store(args, first_row + r, tile + t, acc[r][t]);
  }
}

template <WeightKind kind, int T>
void dense_tile_run(const TileArgs& args, int tile) {
  int row = 0;
  for (; row + 8 <= args.m; row += 8) dense_rows<kind, 8, T>(args, tile, row);
  switch (args.m - row) {
    case 7: dense_rows<kind, 7, T>(args, tile, row); break;
    case 6: dense_rows<kind, 6, T>(args, tile, row); break;
    case 5: dense_rows<kind, 5, T>(args, tile, row); break;
    case 4: dense_rows<kind, 4, T>(args, tile, row); break;
    case 3: dense_rows<kind, 3, T>(args, tile, row); break;
    case 2: dense_rows<kind, 2, T>(args, tile, row); break;
    case 1: dense_rows<kind, 1, T>(args, tile, row); break;
  }
}

template <WeightKind kind>
void dense_tiles(const TileArgs& args) {
  int tile = 0;
  if (args.m == 1) {
    for (; tile + 8 <= args.num_tiles; tile += 8) dense_rows<kind, 1, 8>(args, tile, 0);
  }
  for (; tile + 2 <= args.num_tiles; tile += 2) dense_tile_run<kind, 2>(args, tile);
  for (; tile < args.num_tiles; ++tile) dense_tile_run<kind, 1>(args, tile);
}

}  // namespace

TileFn dense_tiles_avx512(WeightKind kind) {
  switch (kind) {
    case WeightKind::f16: return dense_tiles<WeightKind::f16>;
    case WeightKind::bf16: return dense_tiles<WeightKind::bf16>;
    default: return dense_tiles<WeightKind::f32>;
  }
}

}  // namespace trireme
