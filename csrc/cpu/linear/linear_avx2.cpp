// The AVX2 + FMA + F16C table of linear.h and its quantization of activations. Compiled with those flags: nothing here may be an
// inline function with external linkage, or the linker could keep this copy of it for machines without AVX2.
#include <immintrin.h>

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"
#include "cpu/linear/linear_store_avx2.h"

namespace trireme {
namespace {

// M from which unpacking a tile pays: smaller for kinds whose codes are expensive to unpack.
constexpr int kGroupedFrom = 12, kDearGroupedFrom = 8;

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
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock) {
    const ptrdiff_t at = block * row.step;
    int8_t* q = row.q + block * row.q_step;
    int16_t* wide = row.wide == nullptr ? nullptr : row.wide + block * row.q_step / 2;
    __m256 v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
    __m256i largest = _mm256_and_si256(_mm256_castps_si256(v[0]), magnitude);  // as integers, so that NaN wins
    for (int i = 1; i < 4; ++i) {
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    const uint32_t bits = max_lanes(largest);
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      __builtin_memset(wide == nullptr ? static_cast<void*>(q) : wide, 0, wide == nullptr ? kBlock : 2 * kBlock);
      row.scale[at] = row.sum[at] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      row.minus_sum[at] = row.minus_halves[at] = 0;
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    const int32_t first = sum_lanes(_mm256_add_epi32(w[0], w[1])), second = sum_lanes(_mm256_add_epi32(w[2], w[3]));
    const __m256i low = _mm256_packs_epi32(w[0], w[1]), high = _mm256_packs_epi32(w[2], w[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    if (wide != nullptr) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + kBlock / 2), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    }
    row.scale[at] = amax / 127.0f;
    row.sum[at] = row.scale[at] * static_cast<float>(first + second);
    row.minus_sum[at] = (-first - second) * row.sum_factor;
    row.minus_halves[at] = static_cast<int32_t>((static_cast<uint32_t>(-first) & 0xffffu) | static_cast<uint32_t>(-second) << 16);
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx2() {
  static const LinearKernels kernels = [] {
    LinearKernels set{};
    set.quantize_row = quantize_row;
    set.grouped_from = kGroupedFrom;
    set.dear_grouped_from = kDearGroupedFrom;
    set.group = kGroupRows;
    set.wide = set.scaled_sums = true;
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
