// Kernels of linear.h for AVX2 + FMA + F16C. Compiled with those flags: nothing here may be an inline function with
// external linkage, or the linker could keep this copy of it for machines without AVX2.
#include <immintrin.h>

#include "halfs.h"
#include "linear.h"

namespace trireme {
namespace {

// ---------------------------------------------------------------- activations

inline int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

inline uint32_t max_lanes(__m256i v) {
  __m128i s = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(s));
}

void quantize_row(const float* x, int k, int8_t* q, float* scale, float* sum, int32_t* minus_sum) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    __m256 v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
    __m256i largest = _mm256_and_si256(_mm256_castps_si256(v[0]), magnitude);  // as integers, so that NaN wins
    for (int i = 1; i < 4; ++i) {
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    const uint32_t bits = max_lanes(largest);
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
      scale[block] = sum[block] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      minus_sum[block] = 0;
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    const int32_t total = sum_lanes(_mm256_add_epi32(_mm256_add_epi32(w[0], w[1]), _mm256_add_epi32(w[2], w[3])));
    const __m256i low = _mm256_packs_epi32(w[0], w[1]), high = _mm256_packs_epi32(w[2], w[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    scale[block] = amax / 127.0f;
    sum[block] = scale[block] * static_cast<float>(total);
    minus_sum[block] = -total;
  }
}

// ---------------------------------------------------------------- results

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

// ---------------------------------------------------------------- block kinds

// Makes the compiler finish this value here. Without it gcc moves all additions of a block behind all its products and
// spills them: measured 100 against 220 GOP/s.
inline __attribute__((always_inline)) void pin(__m256i& value) { asm("" : "+x"(value)); }

inline __m256i load(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

// The same 4 activations for all 8 lanes.
inline __m256i broadcast4(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

inline __m256 load_halfs(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// dot[r][half]: exact integer products of one block with R rows of activations (q, rows q_stride apart).
// A product of a nibble pair is at most 2 * 15 * 127, so the eight of a block fit 16 bits (30480).
template <int R>
inline __attribute__((always_inline)) void dot_q4(const uint8_t* values, const int8_t* q, ptrdiff_t q_stride,
                                                  __m256i (*dot)[2]) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i acc[R][2];
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    const __m256i w0 = load(values + pair * 64), w1 = load(values + pair * 64 + 32);
    const __m256i low0 = _mm256_and_si256(w0, mask), low1 = _mm256_and_si256(w1, mask);
    const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), mask);
    const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(q + r * q_stride + pair * 8);
      const __m256i y = broadcast4(q + r * q_stride + pair * 8 + 4);
      acc[r][0] = pair == 0 ? _mm256_maddubs_epi16(low0, x) : _mm256_add_epi16(acc[r][0], _mm256_maddubs_epi16(low0, x));
      acc[r][1] = pair == 0 ? _mm256_maddubs_epi16(low1, x) : _mm256_add_epi16(acc[r][1], _mm256_maddubs_epi16(low1, x));
      pin(acc[r][0]);
      pin(acc[r][1]);
      acc[r][0] = _mm256_add_epi16(acc[r][0], _mm256_maddubs_epi16(high0, y));
      acc[r][1] = _mm256_add_epi16(acc[r][1], _mm256_maddubs_epi16(high1, y));
      pin(acc[r][0]);
      pin(acc[r][1]);
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    dot[r][0] = _mm256_madd_epi16(acc[r][0], ones);
    dot[r][1] = _mm256_madd_epi16(acc[r][1], ones);
  }
}

// |w| times x with the sign of w: a pair is at most 2 * 128 * 127 = 32512, which fits 16 bits, but no two of them do.
template <int R>
inline __attribute__((always_inline)) void dot_q8(const uint8_t* values, const int8_t* q, ptrdiff_t q_stride,
                                                  __m256i (*dot)[2]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int group = 0; group < 8; ++group) {
    const __m256i w0 = load(values + group * 64), w1 = load(values + group * 64 + 32);
    const __m256i abs0 = _mm256_abs_epi8(w0), abs1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(q + r * q_stride + group * 4);
      const __m256i s0 = _mm256_madd_epi16(_mm256_maddubs_epi16(abs0, _mm256_sign_epi8(x, w0)), ones);
      const __m256i s1 = _mm256_madd_epi16(_mm256_maddubs_epi16(abs1, _mm256_sign_epi8(x, w1)), ones);
      dot[r][0] = group == 0 ? s0 : _mm256_add_epi32(dot[r][0], s0);
      dot[r][1] = group == 0 ? s1 : _mm256_add_epi32(dot[r][1], s1);
      pin(dot[r][0]);
      pin(dot[r][1]);
    }
  }
}

// While it works on a tile, it fetches what lies `ahead` bytes further (0: nothing).
template <WeightKind kind, int R>
inline __attribute__((always_inline)) void block_rows(const TileArgs& args, int tile, int first_row,
                                                      size_t ahead) {
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int scale_bytes = kind == WeightKind::q4_1 ? 64 : 32;
  const int num_blocks = args.k / kBlock;
  const ptrdiff_t q_stride = args.k;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const int8_t* q = args.rows.q + first_row * q_stride;
  const size_t at = static_cast<size_t>(first_row) * num_blocks;
  const float* scale = args.rows.scale + at;
  const float* sum = args.rows.sum + at;
  const int32_t* minus_sum = args.rows.minus_sum + at;
  __m256 acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();

  for (int block = 0; block < num_blocks; ++block, packed += step, q += kBlock) {
    __m256i dot[R][2];
    if (ahead != 0) {
      const char* next = reinterpret_cast<const char*>(packed) + ahead;
      for (size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
    }
    if constexpr (kind == WeightKind::q8_0) {
      dot_q8<R>(packed + scale_bytes, q, q_stride, dot);
    } else {
      dot_q4<R>(packed + scale_bytes, q, q_stride, dot);
    }
    const __m256 scale0 = load_halfs(packed), scale1 = load_halfs(packed + 16);
    __m256 min0, min1;
    if constexpr (kind == WeightKind::q4_1) {
      min0 = load_halfs(packed + 32);
      min1 = load_halfs(packed + 48);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const size_t i = static_cast<size_t>(r) * num_blocks + block;
      if constexpr (kind == WeightKind::q4_0) {
        const __m256i offset = _mm256_slli_epi32(_mm256_set1_epi32(minus_sum[i]), 3);
        dot[r][0] = _mm256_add_epi32(dot[r][0], offset);
        dot[r][1] = _mm256_add_epi32(dot[r][1], offset);
      }
      const __m256 x_scale = _mm256_broadcast_ss(scale + i);
      acc[r][0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][0]), _mm256_mul_ps(scale0, x_scale), acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][1]), _mm256_mul_ps(scale1, x_scale), acc[r][1]);
      if constexpr (kind == WeightKind::q4_1) {
        const __m256 x_sum = _mm256_broadcast_ss(sum + i);
        acc[r][0] = _mm256_fmadd_ps(min0, x_sum, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(min1, x_sum, acc[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(args, first_row + r, tile, acc[r][0], acc[r][1]);
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  // One row streams through the weights; more rows stay on a tile while the first of them fetch the next one.
  const size_t ahead = args.m == 1 ? 2048 : args.tile_bytes;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    int row = 0;
    for (; row + 4 <= args.m; row += 4) block_rows<kind, 4>(args, tile, row, row == 0 ? ahead : 0);
    switch (args.m - row) {
      case 3: block_rows<kind, 3>(args, tile, row, row == 0 ? ahead : 0); break;
      case 2: block_rows<kind, 2>(args, tile, row, row == 0 ? ahead : 0); break;
      case 1: block_rows<kind, 1>(args, tile, row, row == 0 ? ahead : 0); break;
    }
  }
}

// ---------------------------------------------------------------- dense kinds

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
  constexpr size_t step = packed_block_bytes(kind);
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

const LinearKernels& linear_kernels_avx2() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles<WeightKind::f32>, dense_tiles<WeightKind::f16>, dense_tiles<WeightKind::bf16>,
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>},
  };
  return kernels;
}

}  // namespace trireme
