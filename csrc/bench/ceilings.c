/* Loops that reach what one core can do at most: products from registers only, reads from memory only. Compiled for the
 * machine at hand and called by models/cpu/bench/ceilings.py, one call per thread; no part of the extension.
 *
 * Each loop keeps enough independent sums to hide the latency; an empty asm makes a register unknown to the compiler, so
 * that nothing is hoisted. Every function returns how many operations it did (two per multiply-add), or bytes, or 0 where
 * the instructions do not exist. */
#include <stdint.h>
#include <stddef.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SUMS 10
#define UNKNOWN(x) __asm__ volatile("" : "+x"(x))

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef __m512i ints;
typedef __m512 floats;
#define ZERO_I _mm512_setzero_si512()
#define ZERO_F _mm512_setzero_ps()
#define LANES 16
#undef UNKNOWN
#define UNKNOWN(x) __asm__ volatile("" : "+v"(x))
static inline ints dot(ints sum, ints a, ints b) { return _mm512_dpbusd_epi32(sum, a, b); }
static inline ints dot_narrow(ints sum, ints a, ints b) { return dot(sum, a, b); }
static inline floats fma_(floats sum, floats a, floats b) { return _mm512_fmadd_ps(a, b, sum); }
static inline ints load(const char *p) { return _mm512_loadu_si512((const void *)p); }
static inline ints merge(ints a, ints b) { return _mm512_or_si512(a, b); }
const char *ceiling_isa(void) { return "AVX-512 VNNI"; }
#define HAVE 1
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256i ints;
typedef __m256 floats;
#define ZERO_I _mm256_setzero_si256()
#define ZERO_F _mm256_setzero_ps()
#define LANES 8
/* Sums of 32 bits, as exact kernels need them at some point: three instructions for 32 products. */
static inline ints dot(ints sum, ints a, ints b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
/* Sums of 16 bits: two instructions for 32 products, the most that AVX2 can do. */
static inline ints dot_narrow(ints sum, ints a, ints b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
static inline floats fma_(floats sum, floats a, floats b) { return _mm256_fmadd_ps(a, b, sum); }
static inline ints load(const char *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline ints merge(ints a, ints b) { return _mm256_or_si256(a, b); }
const char *ceiling_isa(void) { return "AVX2"; }
#define HAVE 1
#else
const char *ceiling_isa(void) { return "unknown"; }
#define HAVE 0
#endif

#if HAVE
/* Sums are named one by one: an array would live in memory. */
#define STEP(sum, op) UNKNOWN(a); UNKNOWN(b); sum = op(sum, a, b); UNKNOWN(sum)
#define PRODUCTS(name, type, zero, op, per_lane)                                              \
    int64_t name(int64_t rounds) {                                                            \
        type a = zero, b = zero;                                                              \
        type s0 = zero, s1 = zero, s2 = zero, s3 = zero, s4 = zero;                           \
        type s5 = zero, s6 = zero, s7 = zero, s8 = zero, s9 = zero;                           \
        for (int64_t r = 0; r < rounds; ++r) {                                                \
            STEP(s0, op); STEP(s1, op); STEP(s2, op); STEP(s3, op); STEP(s4, op);             \
            STEP(s5, op); STEP(s6, op); STEP(s7, op); STEP(s8, op); STEP(s9, op);             \
        }                                                                                     \
        return rounds * SUMS * LANES * (per_lane);                                            \
    }
PRODUCTS(ceiling_int8, ints, ZERO_I, dot, 8)
PRODUCTS(ceiling_int8_narrow, ints, ZERO_I, dot_narrow, 8)
PRODUCTS(ceiling_fma, floats, ZERO_F, fma_, 2)

int64_t ceiling_read(const char *data, int64_t size) {
    ints s0 = ZERO_I, s1 = ZERO_I, s2 = ZERO_I, s3 = ZERO_I;
    const int64_t wide = (int64_t)sizeof(ints);
    int64_t at = 0;
    for (; at + 4 * wide <= size; at += 4 * wide) {
        s0 = merge(s0, load(data + at));
        s1 = merge(s1, load(data + at + wide));
        s2 = merge(s2, load(data + at + 2 * wide));
        s3 = merge(s3, load(data + at + 3 * wide));
    }
    UNKNOWN(s0); UNKNOWN(s1); UNKNOWN(s2); UNKNOWN(s3);
    return at;
}
#else
int64_t ceiling_int8(int64_t rounds) { (void)rounds; return 0; }
int64_t ceiling_int8_narrow(int64_t rounds) { (void)rounds; return 0; }
int64_t ceiling_fma(int64_t rounds) { (void)rounds; return 0; }
int64_t ceiling_read(const char *data, int64_t size) {
    uint64_t sums[8] = {0};
    int64_t at = 0;
    for (; at + 64 <= size; at += 64)
        for (int i = 0; i < 8; ++i) sums[i] |= *(const uint64_t *)(data + at + 8 * i);
    for (int i = 0; i < 8; ++i) __asm__ volatile("" : "+r"(sums[i]));
    return at;
}
#endif
