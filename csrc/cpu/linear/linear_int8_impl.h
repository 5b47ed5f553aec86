// GEMMs with int8 weights, one scale per output, for one vector set: x and weights are multiplied as bytes straight from the
// tiles, and all of k accumulates in int32. Included by linear_int8_avx2.cpp (TRIREME_INT8_VECTORS 256, by vpmaddubsw),
// linear_int8_avxvnni.cpp (256, by vpdpbusd) and linear_int8_avx512.cpp (512); all in an anonymous namespace, so that the linker
// never shares vector code with other files.
//
// vpdpbusd multiplies unsigned by signed bytes: x has 128 added, which is cancelled by initializing sums to minus 128 times the
// sum of the weights. vpmaddubsw gets |w| and x with the sign of w: a pair is at most 2 * 128 * 127, which fits 16 bits.
#pragma once

#include <immintrin.h>

#include "cpu/linear/linear.h"
#include "cpu/linear/linear_int8_quantize.h"
#if TRIREME_INT8_VECTORS == 512
#include "cpu/linear/linear_store_avx512.h"
#else
#include "cpu/linear/linear_store_avx2.h"
#endif

namespace trireme {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr size_t kTileVector = 4 * kTileRows;  // bytes of one quad of a tile
constexpr size_t kCodesAt = 2 * kTileVector;

#if TRIREME_INT8_VECTORS == 512
using Ints = __m512i;
constexpr int kHalves = 1, kRows = 8, kTiles = 2;  // vectors per tile; (rows of x, tiles) whose sums fit the registers
INLINE Ints load(const void* p) { return _mm512_loadu_si512(p); }
INLINE Ints every_int(int v) { return _mm512_set1_epi32(v); }
INLINE void pin(Ints& value) { asm("" : "+v"(value)); }
#else
using Ints = __m256i;
#if defined(__AVXVNNI__)
constexpr int kHalves = 2, kRows = 6, kTiles = 1;
#else
constexpr int kHalves = 2, kRows = 4, kTiles = 1;
#endif
INLINE Ints load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE Ints every_int(int v) { return _mm256_set1_epi32(v); }
INLINE void pin(Ints& value) { asm("" : "+x"(value)); }
#endif

// 4 k's of a vector of outputs.
struct Quad {
  Ints codes;
#if TRIREME_INT8_VECTORS == 512
  static constexpr int flip = 0x80;
  INLINE explicit Quad(const uint8_t* p) : codes(load(p)) {}
  INLINE void add_to(Ints& sums, Ints x) const { sums = _mm512_dpbusd_epi32(sums, x, codes); }
#elif defined(__AVXVNNI__)
  static constexpr int flip = 0x80;
  INLINE explicit Quad(const uint8_t* p) : codes(load(p)) {}
  INLINE void add_to(Ints& sums, Ints x) const { sums = _mm256_dpbusd_avx_epi32(sums, x, codes); }
#else
  static constexpr int flip = 0;
  Ints magnitude;
  INLINE explicit Quad(const uint8_t* p) : codes(load(p)), magnitude(_mm256_abs_epi8(codes)) {}
  INLINE void add_to(Ints& sums, Ints x) const {
    const Ints pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, codes));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#endif
};

// The scaled sums of one row of x with a tile.
INLINE void finish(const TileArgs& args, int row, int tile, const Ints* sums, const uint8_t* scales, float x_scale) {
#if TRIREME_INT8_VECTORS == 512
  const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_set1_ps(x_scale));
  store(args, row, tile, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[0]), scale));
#else
  const auto* at = reinterpret_cast<const float*>(scales);
  const __m256 x = _mm256_set1_ps(x_scale);
  const __m256 first = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[0]), _mm256_mul_ps(_mm256_loadu_ps(at), x));
  const __m256 second = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[1]), _mm256_mul_ps(_mm256_loadu_ps(at + 8), x));
  store(args, row, tile, first, second);
#endif
}

// R rows of x with T tiles. Prefetches `ahead` bytes further (0: nothing).
template <int R, int T>
__attribute__((noinline)) void multiply(const TileArgs& args, int tile, int row, size_t ahead) {
  constexpr int V = T * kHalves;
  const int num_blocks = blocks_in(args.k);
  const ptrdiff_t x_step = static_cast<ptrdiff_t>(num_blocks) * kBlock;
  const uint8_t* tiles = args.tiles + tile * args.tile_bytes;
  const int8_t* x = args.rows.q + row * x_step;
  Ints sums[R][V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const uint8_t* minus = tiles + v / kHalves * args.tile_bytes + kTileVector + v % kHalves * sizeof(Ints);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][v] = Quad::flip != 0 ? load(minus) : every_int(0);
  }
  const uint8_t* codes = tiles + kCodesAt;
  for (int block = 0; block < num_blocks; ++block, codes += 8 * kTileVector, x += kBlock) {
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      if (ahead != 0) {
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) {
          _mm_prefetch(reinterpret_cast<const char*>(codes + t * args.tile_bytes + quad * kTileVector) + ahead, _MM_HINT_T1);
        }
      }
      Ints four[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t bytes;
        __builtin_memcpy(&bytes, x + r * x_step + 4 * quad, 4);
        four[r] = every_int(bytes);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Quad w(codes + v / kHalves * args.tile_bytes + quad * kTileVector + v % kHalves * sizeof(Ints));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          w.add_to(sums[r][v], four[r]);
          pin(sums[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const float x_scale = args.rows.scale[static_cast<ptrdiff_t>(row + r) * num_blocks];
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) finish(args, row + r, tile + t, sums[r] + t * kHalves, tiles + t * args.tile_bytes, x_scale);
  }
}

template <int R, int T>
INLINE void multiply_rows(int rows, const TileArgs& args, int tile, int row, size_t ahead) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<R - 1, T>(rows, args, tile, row, ahead);
  }
  multiply<R, T>(args, tile, row, ahead);
}

// All rows of x with T tiles, in groups as even as possible; the first one prefetches the next tiles.
template <int T>
void multiply_all_rows(const TileArgs& args, int tile) {
  const int groups = (args.m + kRows - 1) / kRows;
  for (int group = 0, row = 0; group < groups; ++group) {
    const int rows = args.m / groups + (group < args.m % groups);
    multiply_rows<kRows, T>(rows, args, tile, row, group == 0 ? T * args.tile_bytes : 0);
    row += rows;
  }
}

void int8_tiles(const TileArgs& args) {
  constexpr size_t kAheadOfOneRow = 2048;  // a single row streams through the tiles
  int tile = 0;
  if (args.m == 1) {
    for (; tile < args.num_tiles; ++tile) multiply<1, 1>(args, tile, 0, kAheadOfOneRow);
    return;
  }
  for (; tile + kTiles <= args.num_tiles; tile += kTiles) multiply_all_rows<kTiles>(args, tile);
  for (; tile < args.num_tiles; ++tile) multiply_all_rows<1>(args, tile);
}

}  // namespace
}  // namespace trireme
