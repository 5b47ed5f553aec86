// Kernels of linear.h for AVX-512 F/BW/VL/DQ/VNNI. Compiled with those flags: nothing here may be an inline function
// with external linkage, or the linker could keep this copy of it for machines without AVX-512.
#include <immintrin.h>

#include "halfs.h"
#include "linear.h"

namespace trireme {
namespace {

// ---------------------------------------------------------------- activations

void quantize_row(const float* x, int k, int8_t* q, float* scale, float* sum, int32_t* minus_sum) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    const __m512 v0 = _mm512_loadu_ps(x), v1 = _mm512_loadu_ps(x + 16);
    // Compared as integers, so that NaN and infinity win.
    const __m512i m0 = _mm512_and_si512(_mm512_castps_si512(v0), magnitude);
    const __m512i m1 = _mm512_and_si512(_mm512_castps_si512(v1), magnitude);
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(m0, m1));
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
      scale[block] = sum[block] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      minus_sum[block] = 0;
      continue;
    }
    const __m512 inverse = _mm512_set1_ps(127.0f / amax);
    const __m512i w0 = _mm512_cvtps_epi32(_mm512_mul_ps(v0, inverse));
    const __m512i w1 = _mm512_cvtps_epi32(_mm512_mul_ps(v1, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(w0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(w1));
    const int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(w0, w1));
    scale[block] = amax / 127.0f;
    sum[block] = scale[block] * static_cast<float>(total);
    minus_sum[block] = -total;
  }
}

// ---------------------------------------------------------------- results

inline void store(const TileArgs& args, int row, int tile, __m512 acc) {
  const int first = tile * kTileRows;
  const int cols = args.num_cols - first;
  const __mmask16 mask = cols >= kTileRows ? 0xffff : static_cast<__mmask16>((1u << cols) - 1);
  float* out = args.out + row * args.out_stride + first;
  if (args.bias != nullptr) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, args.bias + first));
  if (args.accumulate) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, out));
  _mm512_mask_storeu_ps(out, mask, acc);
}

// ---------------------------------------------------------------- block kinds

struct Four {
  int8_t values[4];
};

inline __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }

// acc + products of w (unsigned) with 4 activations, the same for all 16 lanes. gcc does not fold the broadcast into the
// instruction by itself, and an asm keeps it from moving whole chains of products behind each other.
inline __attribute__((always_inline)) void add_products(__m512i& acc, __m512i w, const int8_t* q) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const Four*>(q)));
}

inline __m512 load_halfs(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// dot[r] += exact integer products of one block with R rows of activations. With one row, two sums run side by side.
template <int R>
inline __attribute__((always_inline)) void dot_q4(const uint8_t* values, const int8_t* q, ptrdiff_t q_stride,
                                                  __m512i* dot) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i second = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    const __m512i w = load(values + pair * 64);
    const __m512i low = _mm512_and_si512(w, mask);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int8_t* x = q + r * q_stride + pair * 8;
      add_products(dot[r], low, x);
      add_products(R == 1 ? second : dot[r], high, x + 4);
    }
  }
  if constexpr (R == 1) dot[0] = _mm512_add_epi32(dot[0], second);
}

// The instruction wants unsigned weights: w + 128 is used, and the caller starts dot at -128 * sum of q.
template <int R>
inline __attribute__((always_inline)) void dot_q8(const uint8_t* values, const int8_t* q, ptrdiff_t q_stride,
                                                  __m512i* dot) {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i second = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int group = 0; group < 8; ++group) {
    const __m512i w = _mm512_xor_si512(load(values + group * 64), offset);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      add_products(R == 1 && group % 2 == 1 ? second : dot[r], w, q + r * q_stride + group * 4);
    }
  }
  if constexpr (R == 1) dot[0] = _mm512_add_epi32(dot[0], second);
}

// While it works on a tile, it fetches what lies `ahead` bytes further (0: nothing).
template <WeightKind kind, int R>
inline __attribute__((always_inline)) void block_rows(const TileArgs& args, int tile, int first_row,
                                                      size_t ahead) {
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int scale_bytes = kind == WeightKind::q4_1 ? 64 : 32;
  constexpr int offset_bits = kind == WeightKind::q8_0 ? 7 : kind == WeightKind::q4_0 ? 3 : 0;
  const int num_blocks = args.k / kBlock;
  const ptrdiff_t q_stride = args.k;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const int8_t* q = args.rows.q + first_row * q_stride;
  const size_t at = static_cast<size_t>(first_row) * num_blocks;
  const float* scale = args.rows.scale + at;
  const float* sum = args.rows.sum + at;
  const int32_t* minus_sum = args.rows.minus_sum + at;
  __m512 acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();

  for (int block = 0; block < num_blocks; ++block, packed += step, q += kBlock) {
    __m512i dot[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const size_t i = static_cast<size_t>(r) * num_blocks + block;
      dot[r] = offset_bits == 0 ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_set1_epi32(minus_sum[i]), offset_bits);
    }
    if (ahead != 0) {
      const char* next = reinterpret_cast<const char*>(packed) + ahead;
      for (size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
    }
    if constexpr (kind == WeightKind::q8_0) {
      dot_q8<R>(packed + scale_bytes, q, q_stride, dot);
    } else {
      dot_q4<R>(packed + scale_bytes, q, q_stride, dot);
    }
    const __m512 w_scale = load_halfs(packed);
    __m512 w_min;
    if constexpr (kind == WeightKind::q4_1) w_min = load_halfs(packed + 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const size_t i = static_cast<size_t>(r) * num_blocks + block;
      const __m512 product_scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(scale[i]));
      acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), product_scale, acc[r]);
      if constexpr (kind == WeightKind::q4_1) acc[r] = _mm512_fmadd_ps(w_min, _mm512_set1_ps(sum[i]), acc[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(args, first_row + r, tile, acc[r]);
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  // One row streams through the weights; more rows stay on a tile while the first of them fetch the next one.
  const size_t ahead = args.m == 1 ? 2048 : args.tile_bytes;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    int row = 0;
    for (; row + 8 <= args.m; row += 8) block_rows<kind, 8>(args, tile, row, row == 0 ? ahead : 0);
    switch (args.m - row) {
      case 7: block_rows<kind, 7>(args, tile, row, row == 0 ? ahead : 0); break;
      case 6: block_rows<kind, 6>(args, tile, row, row == 0 ? ahead : 0); break;
      case 5: block_rows<kind, 5>(args, tile, row, row == 0 ? ahead : 0); break;
      case 4: block_rows<kind, 4>(args, tile, row, row == 0 ? ahead : 0); break;
      case 3: block_rows<kind, 3>(args, tile, row, row == 0 ? ahead : 0); break;
      case 2: block_rows<kind, 2>(args, tile, row, row == 0 ? ahead : 0); break;
      case 1: block_rows<kind, 1>(args, tile, row, row == 0 ? ahead : 0); break;
    }
  }
}

// ---------------------------------------------------------------- dense kinds

template <WeightKind kind>
inline __attribute__((always_inline)) __m512 load_dense(const uint8_t* p) {
  if constexpr (kind == WeightKind::f32) return _mm512_loadu_ps(p);
  if constexpr (kind == WeightKind::f16) return load_halfs(p);
  const __m256i halfs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halfs), 16));
}

// R rows of x by T consecutive tiles; R * T accumulators hide the latency of the sequential sums.
template <WeightKind kind, int R, int T>
inline __attribute__((always_inline)) void dense_rows(const TileArgs& args, int tile, int first_row) {
  constexpr size_t step = packed_block_bytes(kind);
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

const LinearKernels& linear_kernels_avx512() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles<WeightKind::f32>, dense_tiles<WeightKind::f16>, dense_tiles<WeightKind::bf16>,
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>},
  };
  return kernels;
}

}  // namespace trireme
