// The AVX2 + FMA + F16C table of linear.h and its rounding of activations. Compiled with those flags: nothing here may be an
// inline function with external linkage, or the linker could keep this copy of it for machines without AVX2.
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

void quantize_row(const float* x, int k, const QuantizedRows& row) {
  int8_t* q = row.q;
  int16_t* wide = row.wide;
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    __m256 v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
    __m256i largest = _mm256_and_si256(_mm256_castps_si256(v[0]), magnitude);  // as integers, so that NaN wins
    for (int i = 1; i < 4; ++i) {
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    if (wide != nullptr) wide += kBlock;
    const uint32_t bits = max_lanes(largest);
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
      row.scale[block] = row.sum[block] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      row.minus_sum[block] = row.minus_halves[block] = 0;
      if (wide != nullptr) __builtin_memset(wide - kBlock, 0, 2 * kBlock);
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    const int32_t first = sum_lanes(_mm256_add_epi32(w[0], w[1])), second = sum_lanes(_mm256_add_epi32(w[2], w[3]));
    const __m256i low = _mm256_packs_epi32(w[0], w[1]), high = _mm256_packs_epi32(w[2], w[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    if (wide != nullptr) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide - kBlock), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide - kBlock / 2), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
    }
    row.scale[block] = amax / 127.0f;
    row.sum[block] = row.scale[block] * static_cast<float>(first + second);
    row.minus_sum[block] = -first - second;
    row.minus_halves[block] = static_cast<int32_t>((static_cast<uint32_t>(-first) & 0xffffu) | static_cast<uint32_t>(-second) << 16);
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx2() {
  static const LinearKernels kernels = [] {
    LinearKernels set{};
    set.quantize_row = quantize_row;
    set.wide_from = 12;
    for (int kind = 0; kind < static_cast<int>(WeightKind::int8); ++kind) {
      const auto of = static_cast<WeightKind>(kind);
      const bool is_plain = block_form(of).raw_values == kBlock;
      set.tiles[kind] = is_dense_kind(of) ? dense_tiles_avx2(of) : is_plain ? plain_tiles_avx2(of) : super_tiles_avx2(of);
    }
    set_int8(set, int8_kernels_avx2());
    return set;
  }();
  return kernels;
}

}  // namespace trireme
