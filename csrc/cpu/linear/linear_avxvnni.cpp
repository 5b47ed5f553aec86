// Kernels of linear.h for AVX2 + AVX-VNNI: block kinds by 256-bit byte dot products, dense kinds as in linear_avx2.cpp.
// Compiled with those flags: only the table may have external linkage.
#define TRIREME_VNNI_LANES 8
#include "cpu/linear/linear_vnni_rows.h"

namespace trireme {
namespace {

// From this M on, weights are unpacked once per call.
constexpr int kGroupedFrom = 24;

INLINE uint32_t max_lanes(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

void quantize_row(const float* x, int k, const QuantizedRows& row) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), ones = _mm256_set1_epi8(1);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock) {
    int8_t* q = row.q + block * row.q_step;
    const ptrdiff_t at = block * row.step;
    __m256 v[4];
    __m256i largest = _mm256_setzero_si256();  // compared as integers, so that NaN and infinity win
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(x + 8 * i);
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    const uint32_t bits = max_lanes(largest);
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      put(q, no_ints());
      row.scale[at] = row.sum[at] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      row.minus_sum[at] = row.minus_halves[at] = 0;
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    const __m256i low = _mm256_packs_epi32(w[0], w[1]), high = _mm256_packs_epi32(w[2], w[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    put(q, bytes);
    __m256i sums = dot_bytes(no_ints(), ones, bytes);
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    const int32_t first = _mm256_extract_epi32(sums, 0), second = _mm256_extract_epi32(sums, 4);
    row.scale[at] = amax / 127.0f;
    row.sum[at] = row.scale[at] * static_cast<float>(first + second);
    row.minus_sum[at] = (-first - second) * row.sum_factor;
    row.minus_halves[at] = static_cast<int32_t>((static_cast<uint32_t>(-first) & 0xffffu) | static_cast<uint32_t>(-second) << 16);
  }
}

LinearKernels make_kernels() {
  LinearKernels kernels{};
  kernels.quantize_row = quantize_row;
  kernels.grouped_from = kGroupedFrom;
  kernels.scaled_sums = true;
  for (WeightKind kind : {WeightKind::f32, WeightKind::f16, WeightKind::bf16}) {
    kernels.tiles[static_cast<int>(kind)] = linear_kernels_avx2().tiles[static_cast<int>(kind)];
  }
  set_block_kinds(kernels);
  set_int8(kernels, int8_kernels_avxvnni());
  return kernels;
}

}  // namespace

const LinearKernels& linear_kernels_avxvnni() {
  static const LinearKernels kernels = make_kernels();
  return kernels;
}

}  // namespace trireme
