// Sixteen float lanes as one value, in the registers of the including file's instruction set. Only for the kernel variants
// (*_portable.cpp, *_avx2.cpp, *_avx512.cpp): everything is in the variant's own namespace, so that none collide.
// The same operations in the same order are bit-identical on AVX2 and AVX-512; portable rounds a*b+c twice.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
// GCC 12 warns about the deliberately undefined vectors in its own headers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#define TRIREME_VARIANT variant_avx512
#elif defined(__AVX2__)
#include <immintrin.h>
#define TRIREME_VARIANT variant_avx2
#else
#define TRIREME_VARIANT variant_portable
#endif

#define TRIREME_INLINE static inline __attribute__((always_inline))

namespace trireme::TRIREME_VARIANT {

inline constexpr int kLanes = 16;

// Storage formats of the KV cache besides float.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};
// Keys and values as integers with a scale per token and head: see KvView in ops.h.
template <class T>
inline constexpr bool kIsInteger = false;
template <>
inline constexpr bool kIsInteger<int8_t> = true;
template <>
inline constexpr bool kIsInteger<int16_t> = true;

TRIREME_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

TRIREME_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// ---------------------------------------------------------------- one element: load and store in each format

TRIREME_INLINE float widen(float value) { return value; }
TRIREME_INLINE float widen(BFloat value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
TRIREME_INLINE float widen(Half value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return bits_to_float(sign | (rest + 0x70000000u));  // inf, nan
  // Rebase the exponent by a multiplication, which also normalizes subnormals.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
#endif
}

TRIREME_INLINE void narrow(float value, float* out) { *out = value; }
TRIREME_INLINE void narrow(float value, BFloat* out) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40u : rounded);
}
TRIREME_INLINE void narrow(float value, Half* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(value, 0);
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t size = bits & 0x7fffffffu;
  uint32_t result;
  if (size > 0x7f800000u) {
    result = 0x7e00u;
  } else if (size >= 0x477ff000u) {  // rounds to 65536 or more
    result = 0x7c00u;
  } else if (size < 0x38800000u) {  // subnormal: let float addition round at 2^-24
    result = float_to_bits(bits_to_float(size) + 0.5f) - 0x3f000000u;
  } else {
    result = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | result);
#endif
}

// ---------------------------------------------------------------- sixteen lanes

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};

TRIREME_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
TRIREME_INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
TRIREME_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
TRIREME_INLINE Vec load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TRIREME_INLINE Vec load(const BFloat* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
TRIREME_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
TRIREME_INLINE void store(Half* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, 0));
}
TRIREME_INLINE void store(BFloat* p, Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v), top = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(kept));
}
TRIREME_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
TRIREME_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
TRIREME_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
TRIREME_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
TRIREME_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in b wins.
TRIREME_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
TRIREME_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
TRIREME_INLINE Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// a * 2^n for whole n in [-126, 127].
TRIREME_INLINE Vec scale_pow2(Vec a, Vec n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)))};
}
// The same, given n + 12582912 (1.5 * 2^23), whose low bits hold n.
TRIREME_INLINE Vec scale_pow2_shifted(Vec a, Vec shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000))))};
}
// Lanes of a where !(x < limit), 0 elsewhere; a NaN in x keeps a.
TRIREME_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// Lanes [first, last) of a, `fill` elsewhere; 0 <= first <= last <= 16.
TRIREME_INLINE Vec keep_lanes(Vec a, int first, int last, Vec fill) {
  const uint32_t mask = ((1u << last) - 1u) & ~((1u << first) - 1u);
  return {_mm512_mask_mov_ps(fill.v, static_cast<__mmask16>(mask), a.v)};
}
// Integers: sixteen int32 sums of int16 pair dot products, exact. Pairs holds 32 numbers, two per lane; Pair broadcasts two to all
// lanes. `store_ints` rounds to nearest even; out-of-range values and NaN give unspecified integers.
struct Ints {
  __m512i v;
};
struct Pairs {
  __m512i v;
};
struct Pair {
  __m512i all;
};
TRIREME_INLINE Ints no_ints() { return {_mm512_setzero_si512()}; }
TRIREME_INLINE Pairs load_pairs(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
TRIREME_INLINE Pairs load_pairs(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TRIREME_INLINE Pair repeat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// Unrolled by hand: gcc 12 copies every accumulator around the multiply, and spills some.
TRIREME_INLINE void add_products(Ints& sums, Pair a, Pairs b) {
  asm("vpdpwssd %[b], %[a], %[sums]" : [sums] "+v"(sums.v) : [a] "v"(a.all), [b] "v"(b.v));
}
TRIREME_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
TRIREME_INLINE void store_ints(int16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
TRIREME_INLINE __m256 low_half(Vec a) { return _mm512_castps512_ps256(a.v); }
TRIREME_INLINE __m256 high_half(Vec a) { return _mm512_extractf32x8_ps(a.v, 1); }

#elif defined(__AVX2__)

struct Vec {
  __m256 lo, hi;
};

TRIREME_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TRIREME_INLINE Vec set1(float x) {
  const __m256 all = _mm256_set1_ps(x);
  return {all, all};
}
TRIREME_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TRIREME_INLINE Vec load(const Half* p) {
  const __m128i* raw = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(raw)), _mm256_cvtph_ps(_mm_loadu_si128(raw + 1))};
}
TRIREME_INLINE Vec load(const BFloat* p) {
  const __m128i* raw = reinterpret_cast<const __m128i*>(p);
  const __m256i lo = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(raw)), 16);
  const __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(raw + 1)), 16);
  return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
TRIREME_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
TRIREME_INLINE void store(Half* p, Vec a) {
  __m128i* raw = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(raw, _mm256_cvtps_ph(a.lo, 0));
  _mm_storeu_si128(raw + 1, _mm256_cvtps_ph(a.hi, 0));
}
TRIREME_INLINE __m256i bfloat_bits(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), top = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, nan);
}
TRIREME_INLINE void store(BFloat* p, Vec a) {
  const __m256i mixed = _mm256_packus_epi32(bfloat_bits(a.lo), bfloat_bits(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
TRIREME_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
TRIREME_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
TRIREME_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
TRIREME_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
TRIREME_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TRIREME_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
TRIREME_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
TRIREME_INLINE Vec round(Vec a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
TRIREME_INLINE __m256 scale_pow2_half(__m256 a, __m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
TRIREME_INLINE Vec scale_pow2(Vec a, Vec n) { return {scale_pow2_half(a.lo, n.lo), scale_pow2_half(a.hi, n.hi)}; }
TRIREME_INLINE __m256 scale_pow2_shifted_half(__m256 a, __m256 shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000))));
}
TRIREME_INLINE Vec scale_pow2_shifted(Vec a, Vec shifted) {
  return {scale_pow2_shifted_half(a.lo, shifted.lo), scale_pow2_shifted_half(a.hi, shifted.hi)};
}
TRIREME_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ))};
}
TRIREME_INLINE __m256 keep_half(__m256 a, __m256i lane, __m256i first, __m256i last, __m256 fill) {
  const __m256i kept = _mm256_andnot_si256(_mm256_cmpgt_epi32(first, lane), _mm256_cmpgt_epi32(last, lane));
  return _mm256_blendv_ps(fill, a, _mm256_castsi256_ps(kept));
}
TRIREME_INLINE Vec keep_lanes(Vec a, int first, int last, Vec fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i from = _mm256_set1_epi32(first), to = _mm256_set1_epi32(last);
  return {keep_half(a.lo, lane, from, to, fill.lo),
          keep_half(a.hi, _mm256_add_epi32(lane, _mm256_set1_epi32(8)), from, to, fill.hi)};
}
struct Ints {
  __m256i lo, hi;
};
struct Pairs {
  __m256i lo, hi;
};
struct Pair {
  __m256i all;
};
TRIREME_INLINE Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
TRIREME_INLINE Pairs load_pairs(const int16_t* p) {
  const __m256i* raw = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(raw), _mm256_loadu_si256(raw + 1)};
}
TRIREME_INLINE Pairs load_pairs(const int8_t* p) {
  const __m128i* raw = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(raw)), _mm256_cvtepi8_epi16(_mm_loadu_si128(raw + 1))};
}
TRIREME_INLINE Pair repeat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair)};
}
// Unrolled by hand: gcc 12 moves the additions after all multiplies, which no longer fit the registers.
TRIREME_INLINE void add_products(Ints& sums, Pair a, Pairs b) {
  __m256i low;
  asm("vpmaddwd %[b_lo], %[pair], %[low]\n\t"
      "vpmaddwd %[b_hi], %[pair], %[pair]\n\t"
      "vpaddd %[low], %[lo], %[lo]\n\t"
      "vpaddd %[pair], %[hi], %[hi]"
      : [lo] "+x"(sums.lo), [hi] "+x"(sums.hi), [low] "=&x"(low), [pair] "+&x"(a.all)
      : [b_lo] "x"(b.lo), [b_hi] "x"(b.hi));
}
TRIREME_INLINE Vec to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
TRIREME_INLINE void store_ints(int16_t* p, Vec a) {
  const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
TRIREME_INLINE __m256 low_half(Vec a) { return a.lo; }
TRIREME_INLINE __m256 high_half(Vec a) { return a.hi; }

#else

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));

struct Vec {
  Quad q[4];
};

template <class F>
TRIREME_INLINE Vec each_quad(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
TRIREME_INLINE Quad choose(QuadInt mask, Quad yes, Quad no) {
  return reinterpret_cast<Quad>((mask & reinterpret_cast<QuadInt>(yes)) | (~mask & reinterpret_cast<QuadInt>(no)));
}
TRIREME_INLINE Quad quad1(float x) { return Quad{x, x, x, x}; }

TRIREME_INLINE Vec set1(float x) {
  return each_quad([&](int) { return quad1(x); });
}
TRIREME_INLINE Vec zero() { return set1(0.0f); }
TRIREME_INLINE Vec load(const float* p) {
  Vec out;
  std::memcpy(&out, p, sizeof(out));
  return out;
}
template <class T>
TRIREME_INLINE Vec load(const T* p) {
  return each_quad([&](int i) {
    return Quad{widen(p[4 * i]), widen(p[4 * i + 1]), widen(p[4 * i + 2]), widen(p[4 * i + 3])};
  });
}
TRIREME_INLINE void store(float* p, Vec a) { std::memcpy(p, &a, sizeof(a)); }
template <class T>
TRIREME_INLINE void store(T* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) narrow(a.q[i / 4][i % 4], p + i);
}
TRIREME_INLINE Vec add(Vec a, Vec b) {
  return each_quad([&](int i) { return a.q[i] + b.q[i]; });
}
TRIREME_INLINE Vec sub(Vec a, Vec b) {
  return each_quad([&](int i) { return a.q[i] - b.q[i]; });
}
TRIREME_INLINE Vec mul(Vec a, Vec b) {
  return each_quad([&](int i) { return a.q[i] * b.q[i]; });
}
TRIREME_INLINE Vec div(Vec a, Vec b) {
  return each_quad([&](int i) { return a.q[i] / b.q[i]; });
}
TRIREME_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return each_quad([&](int i) { return a.q[i] * b.q[i] + c.q[i]; });
}
TRIREME_INLINE Vec max(Vec a, Vec b) {
  return each_quad([&](int i) { return choose(a.q[i] > b.q[i], a.q[i], b.q[i]); });
}
TRIREME_INLINE Vec min(Vec a, Vec b) {
  return each_quad([&](int i) { return choose(a.q[i] < b.q[i], a.q[i], b.q[i]); });
}
// To nearest even, for |a| < 2^22.
TRIREME_INLINE Vec round(Vec a) {
  const Quad magic = quad1(12582912.0f);
  return each_quad([&](int i) { return (a.q[i] + magic) - magic; });
}
TRIREME_INLINE Vec scale_pow2(Vec a, Vec n) {
  return each_quad([&](int i) {
    const QuadInt exponent = (__builtin_convertvector(n.q[i], QuadInt) + 127) << 23;
    return a.q[i] * reinterpret_cast<Quad>(exponent);
  });
}
TRIREME_INLINE Vec scale_pow2_shifted(Vec a, Vec shifted) {
  return each_quad([&](int i) {
    const QuadInt exponent = (reinterpret_cast<QuadInt>(shifted.q[i]) << 23) + 0x3f800000;
    return a.q[i] * reinterpret_cast<Quad>(exponent);
  });
}
TRIREME_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  return each_quad([&](int i) { return choose(x.q[i] < limit.q[i], quad1(0.0f), a.q[i]); });
}
TRIREME_INLINE Vec keep_lanes(Vec a, int first, int last, Vec fill) {
  return each_quad([&](int i) {
    const QuadInt lane = QuadInt{0, 1, 2, 3} + 4 * i;
    return choose((lane >= first) & (lane < last), a.q[i], fill.q[i]);
  });
}

struct Ints {
  int32_t v[kLanes];
};
struct Pairs {
  int16_t v[2 * kLanes];
};
struct Pair {
  int32_t first, second;
};
TRIREME_INLINE Ints no_ints() { return {}; }
template <class T>
TRIREME_INLINE Pairs load_pairs(const T* p) {
  Pairs out;
  for (int i = 0; i < 2 * kLanes; ++i) out.v[i] = p[i];
  return out;
}
TRIREME_INLINE Pair repeat_pair(const int16_t* p) { return {p[0], p[1]}; }
TRIREME_INLINE void add_products(Ints& sums, Pair a, const Pairs& b) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t product = static_cast<uint32_t>(a.first * b.v[2 * i]) + static_cast<uint32_t>(a.second * b.v[2 * i + 1]);
    sums.v[i] = static_cast<int32_t>(static_cast<uint32_t>(sums.v[i]) + product);
  }
}
TRIREME_INLINE Vec to_floats(const Ints& a) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(a.v[i]);
  return load(lanes);
}
// NaN becomes -32767.
TRIREME_INLINE void store_ints(int16_t* p, Vec a) {
  float lanes[kLanes];
  store(lanes, round(max(set1(-32767.0f), min(a, set1(32767.0f)))));
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(lanes[i] > -32767.0f ? lanes[i] : -32767.0f);
}

#endif

// ---------------------------------------------------------------- derived operations

#if defined(__AVX2__)

// Lanes are added as a tree: i with i + 8, then i + 4, i + 2, i + 1.
TRIREME_INLINE float reduce_add(Vec a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TRIREME_INLINE float reduce_max(Vec a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
TRIREME_INLINE float first_lane(Vec a) { return _mm256_cvtss_f32(low_half(a)); }

#else

TRIREME_INLINE float reduce_add(Vec a) {
  const Quad four = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
TRIREME_INLINE float reduce_max(Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}
TRIREME_INLINE float first_lane(Vec a) { return a.q[0][0]; }

#endif

// The first n lanes, zero in the others.
#if defined(__AVX512F__)
TRIREME_INLINE Vec load_first(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1u), p)};
}
TRIREME_INLINE void store_first(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1u), a.v);
}
#else
TRIREME_INLINE Vec load_first(const float* p, int n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * 4);
  return load(lanes);
}
TRIREME_INLINE void store_first(float* p, Vec a, int n) {
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, static_cast<size_t>(n) * 4);
}
#endif

// x[i] in lane i, zero after the last. Assembled in registers: a vector load right after scalar stores stalls until all of them
// reach the cache (failed store forwarding).
template <int N>
TRIREME_INLINE Vec from_lanes(const float (&x)[N]) {
  static_assert(N <= kLanes / 2);
  auto at = [&](int i) { return i < N ? x[i] : 0.0f; };
#if defined(__AVX2__)
  const __m256 eight = _mm256_setr_ps(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
#if defined(__AVX512F__)
  return {_mm512_zextps256_ps512(eight)};
#else
  return {eight, _mm256_setzero_ps()};
#endif
#else
  return {{Quad{at(0), at(1), at(2), at(3)}, Quad{at(4), at(5), at(6), at(7)}, quad1(0.0f), quad1(0.0f)}};
#endif
}

// e^x within 2 ulp; exactly 0 below -87.33, exactly 1 at 0, NaN for NaN; clamped above 88.37. Polynomial of Cephes' expf.
TRIREME_INLINE Vec exp(Vec x) {
  const Vec lowest = set1(-87.33654f);
  const Vec clamped = max(lowest, min(set1(88.37f), x));
  const Vec n = round(mul(clamped, set1(1.44269504f)));
  Vec r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, mul(r, r), add(r, set1(1.0f)));
  return zero_below(scale_pow2(y, n), x, lowest);
}

// 2^x within 5e-7 for x <= 127; exactly 1 at 0, NaN for NaN, 2^-120 below -120. Minimax polynomial of degree 5 with p(0) = 1.
TRIREME_INLINE Vec exp2(Vec x) {
  const Vec magic = set1(12582912.0f);  // adding it rounds to an integer
  const Vec clamped = max(set1(-120.0f), x);
  const Vec shifted = add(clamped, magic);
  const Vec r = sub(clamped, sub(shifted, magic));
  Vec y = set1(1.1125507299e-3f);
  y = fma(y, r, set1(9.6662826836e-3f));
  y = fma(y, r, set1(5.5574003607e-2f));
  y = fma(y, r, set1(2.4022351205e-1f));
  y = fma(y, r, set1(6.9314283133e-1f));
  y = fma(y, r, set1(1.0f));
  return scale_pow2_shifted(y, shifted);
}

TRIREME_INLINE float exp2_scalar(float x) { return first_lane(exp2(set1(x))); }

}  // namespace trireme::TRIREME_VARIANT
