// Kernels of linear.h for AVX2 + FMA + F16C. Compiled with those flags: nothing here may be an inline function with
// external linkage, or the linker could keep this copy of it for machines without AVX2.
#include <immintrin.h>

#include "halfs.h"
#include "linear.h"
#include "linear_store_avx2.h"

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
      row.scale[block] = row.sum[block] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      row.minus_sum[block] = row.minus_halves[block] = 0;
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    const int32_t first = sum_lanes(_mm256_add_epi32(w[0], w[1])), second = sum_lanes(_mm256_add_epi32(w[2], w[3]));
    const __m256i low = _mm256_packs_epi32(w[0], w[1]), high = _mm256_packs_epi32(w[2], w[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    row.scale[block] = amax / 127.0f;
    row.sum[block] = row.scale[block] * static_cast<float>(first + second);
    row.minus_sum[block] = -first - second;
    row.minus_halves[block] = static_cast<int32_t>((static_cast<uint32_t>(-first) & 0xffffu) | static_cast<uint32_t>(-second) << 16);
  }
}

// ---------------------------------------------------------------- block kinds

#define INLINE inline __attribute__((always_inline))

// Makes the compiler finish this value here. Without it gcc moves all additions of a block behind all its products and
// spills them: measured 100 against 220 GOP/s.
INLINE void pin(__m256i& value) { asm("" : "+x"(value)); }

INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE __m256 load_floats(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
INLINE __m256 load_halfs(const uint8_t* p) { return _mm256_cvtph_ps(load_16(p)); }
INLINE __m128i load_8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
INLINE __m256 load_unsigned(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(p))); }
INLINE __m256 load_signed(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(p))); }

// The same 4 activations for all 8 lanes.
INLINE __m256i broadcast4(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

INLINE __m256 load_exponents(const uint8_t* p) {  // see float_from_exponent
  const __m256i e = _mm256_cvtepu8_epi32(load_8(p));
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

// What one half (8 lanes) of a tile has beside the codes of a block.
struct Scales {
  __m256 scale;
  __m256 min;
  __m256i first, second;  // types with pairs: the sub-scale of the first or second 16 k's, twice as int16
  __m256i pairs;          // both of them as int16
  __m256i min_pairs;
};

INLINE void widen_pairs(Scales& s, __m256i pairs) {
  s.pairs = pairs;
  s.first = _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(pairs, 16));
  s.second = _mm256_or_si256(_mm256_srli_epi32(pairs, 16), _mm256_andnot_si256(_mm256_set1_epi32(0xffff), pairs));
}

template <WeightKind kind>
INLINE Scales load_scales(const uint8_t* header, const uint8_t* sub, int half) {
  constexpr ScaleForm form = block_form(kind).scale;
  Scales s{};
  if constexpr (form == ScaleForm::exponent) {
    s.scale = load_exponents(header + 8 * half);
    return s;
  }
  s.scale = load_halfs(header + 16 * half);
  if constexpr (has_mins(form)) s.min = load_halfs(header + 2 * kTileRows + 16 * half);
  if constexpr (form == ScaleForm::super32) s.scale = _mm256_mul_ps(s.scale, load_signed(sub + 8 * half));
  if constexpr (form == ScaleForm::super32_min) {
    s.scale = _mm256_mul_ps(s.scale, load_unsigned(sub + 8 * half));
    s.min = _mm256_mul_ps(s.min, load_unsigned(sub + kTileRows + 8 * half));
  }
  if constexpr (form == ScaleForm::super16) widen_pairs(s, _mm256_cvtepi8_epi16(load_16(sub + 16 * half)));
  if constexpr (form == ScaleForm::super16_min) {
    const __m256i both = _mm256_cvtepu8_epi16(load_16(sub + 16 * half));
    widen_pairs(s, _mm256_and_si256(both, _mm256_set1_epi16(15)));
    s.min_pairs = _mm256_srli_epi16(both, 4);
  }
  return s;
}

// Two quads of codes (8 lanes each) out of the planes.
template <WeightKind kind>
INLINE void unpack(const uint8_t* planes, int pair, int half, __m256i& a, __m256i& b) {
  constexpr BlockForm form = block_form(kind);
  planes += 32 * half;
  const uint8_t* second = planes + form.first_bits * 4 * kTileRows;
  if constexpr (form.first_bits == 8) {
    a = load(planes + 128 * pair);
    b = load(planes + 128 * pair + 64);
  } else if constexpr (form.first_bits == 4) {
    const __m256i w = load(planes + 64 * pair), mask = _mm256_set1_epi8(15);
    a = _mm256_and_si256(w, mask);
    b = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
  } else {
    const __m256i w = load(planes + 64 * (pair / 2)), mask = _mm256_set1_epi8(3);
    a = _mm256_and_si256(_mm256_srli_epi16(w, 4 * (pair % 2)), mask);
    b = _mm256_and_si256(_mm256_srli_epi16(w, 4 * (pair % 2) + 2), mask);
  }
  if constexpr (form.second_bits == 1) {
    const __m256i w = _mm256_srli_epi16(load(second), 2 * pair), bit = _mm256_set1_epi8(1 << form.first_bits);
    a = _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16(w, form.first_bits), bit));
    b = _mm256_or_si256(b, _mm256_and_si256(_mm256_slli_epi16(w, form.first_bits - 1), bit));
  } else if constexpr (form.second_bits == 2) {
    const __m256i w = _mm256_srli_epi16(load(second + 64 * (pair / 2)), 4 * (pair % 2)), bits = _mm256_set1_epi8(0x30);
    a = _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16(w, 4), bits));
    b = _mm256_or_si256(b, _mm256_and_si256(_mm256_slli_epi16(w, 2), bits));
  }
  if constexpr (form.table != nullptr) {
    const __m256i table = _mm256_broadcastsi128_si256(load_16(reinterpret_cast<const uint8_t*>(form.table)));
    a = _mm256_shuffle_epi8(table, a);
    b = _mm256_shuffle_epi8(table, b);
  }
}

// ---- panels: what load_scales and unpack give for up to kPanelBlocks blocks of a tile, made once for many rows of x

constexpr int kPanelBlocks = 32;
constexpr int kPanelRows = 12;  // from so many rows on a panel pays
constexpr int kMaxRows = 128;
constexpr size_t kVector = 4 * kTileRows;  // 16 lanes of 4 bytes

constexpr size_t panel_scale_bytes(ScaleForm form) {
  return kVector * (1 + (has_mins(form) ? 1 : 0) + (has_pairs(form) ? 3 : 0) + (form == ScaleForm::super16_min ? 1 : 0));
}

template <WeightKind kind>
constexpr size_t panel_step = panel_scale_bytes(block_form(kind).scale) + kBlock * kTileRows;

INLINE void put(uint8_t*& p, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), value);
  p += kVector;
}

template <WeightKind kind>
INLINE void write_panel_block(const uint8_t* header, const uint8_t* sub, uint8_t* panel) {
  constexpr ScaleForm form = block_form(kind).scale;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    uint8_t* p = panel + 32 * half;
    const Scales s = load_scales<kind>(header, sub, half);
    put(p, _mm256_castps_si256(s.scale));
    if constexpr (has_mins(form)) put(p, _mm256_castps_si256(s.min));
    if constexpr (has_pairs(form)) {
      put(p, s.first);
      put(p, s.second);
      put(p, s.pairs);
    }
    if constexpr (form == ScaleForm::super16_min) put(p, s.min_pairs);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      __m256i a, b;
      unpack<kind>(sub + sub_scale_bytes(form), pair, half, a, b);
      put(p, a);
      put(p, b);
    }
  }
}

template <WeightKind kind>
INLINE Scales load_panel_scales(const uint8_t* p, int half) {
  constexpr ScaleForm form = block_form(kind).scale;
  Scales s{};
  p += 32 * half;
  s.scale = load_floats(p);
  p += kVector;
  if constexpr (has_mins(form)) {
    s.min = load_floats(p);
    p += kVector;
  }
  if constexpr (has_pairs(form)) {
    s.first = load(p);
    s.second = load(p + kVector);
    s.pairs = load(p + 2 * kVector);
  }
  if constexpr (form == ScaleForm::super16_min) s.min_pairs = load(p + 3 * kVector);
  return s;
}

// Quads whose products of codes up to `max_code` with activations up to 127, two to a lane, add up in 16 bits.
constexpr int chain_of(BlockForm form) {
  const int most = 32767 / (2 * 127 * form.max_code);
  const int chain = most >= 8 ? 8 : most >= 4 ? 4 : 2;
  return has_pairs(form.scale) && chain > 4 ? 4 : chain;
}

// dot[r][half]: exact integer products of one block with R rows of activations (q, rows q_stride apart), times the
// sub-scales of 16 k's where there are such. The offset is not yet taken off.
template <WeightKind kind, int R, bool from_panel>
INLINE void dot_unsigned(const uint8_t* planes, const Scales (&s)[2], const int8_t* q, ptrdiff_t q_stride,
                         __m256i (*dot)[2]) {
  constexpr BlockForm form = block_form(kind);
  constexpr int chain = chain_of(form);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i acc[R][2];
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    __m256i a[2], b[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if constexpr (from_panel) {
        a[half] = load(planes + 128 * pair + 32 * half);
        b[half] = load(planes + 128 * pair + 64 + 32 * half);
      } else {
        unpack<kind>(planes, pair, half, a[half], b[half]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(q + r * q_stride + pair * 8);
      const __m256i y = broadcast4(q + r * q_stride + pair * 8 + 4);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i product = _mm256_maddubs_epi16(a[half], x);
        acc[r][half] = 2 * pair % chain == 0 ? product : _mm256_add_epi16(acc[r][half], product);
        pin(acc[r][half]);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        acc[r][half] = _mm256_add_epi16(acc[r][half], _mm256_maddubs_epi16(b[half], y));
        pin(acc[r][half]);
        if ((2 * pair + 2) % chain == 0) {
          const __m256i factor = !has_pairs(form.scale) ? ones : pair < 2 ? s[half].first : s[half].second;
          const __m256i sum = _mm256_madd_epi16(acc[r][half], factor);
          dot[r][half] = 2 * pair + 2 == chain ? sum : _mm256_add_epi32(dot[r][half], sum);
          pin(dot[r][half]);
        }
      }
    }
  }
}

// |w| times x with the sign of w: a pair is at most 2 * 128 * 127 = 32512, which fits 16 bits, but no two of them do.
template <WeightKind kind, int R, bool from_panel>
INLINE void dot_signed(const uint8_t* planes, const int8_t* q, ptrdiff_t q_stride, __m256i (*dot)[2]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    __m256i w[2][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if constexpr (from_panel) {
        w[0][half] = load(planes + 128 * pair + 32 * half);
        w[1][half] = load(planes + 128 * pair + 64 + 32 * half);
      } else {
        unpack<kind>(planes, pair, half, w[0][half], w[1][half]);
      }
    }
#pragma GCC unroll 2
    for (int quad = 0; quad < 2; ++quad) {
      const __m256i abs0 = _mm256_abs_epi8(w[quad][0]), abs1 = _mm256_abs_epi8(w[quad][1]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast4(q + r * q_stride + pair * 8 + quad * 4);
        const __m256i s0 = _mm256_madd_epi16(_mm256_maddubs_epi16(abs0, _mm256_sign_epi8(x, w[quad][0])), ones);
        const __m256i s1 = _mm256_madd_epi16(_mm256_maddubs_epi16(abs1, _mm256_sign_epi8(x, w[quad][1])), ones);
        dot[r][0] = pair + quad == 0 ? s0 : _mm256_add_epi32(dot[r][0], s0);
        dot[r][1] = pair + quad == 0 ? s1 : _mm256_add_epi32(dot[r][1], s1);
        pin(dot[r][0]);
        pin(dot[r][1]);
      }
    }
  }
}

template <WeightKind kind>
INLINE __m256i take_offset(__m256i dot, const Scales& s, const QuantizedRows& rows, size_t at) {
  constexpr BlockForm form = block_form(kind);
  if constexpr (form.offset == 0) return dot;
  if constexpr (has_pairs(form.scale)) {
    const __m256i sums = _mm256_madd_epi16(s.pairs, _mm256_set1_epi32(rows.minus_halves[at]));
    return _mm256_add_epi32(dot, _mm256_slli_epi32(sums, __builtin_ctz(form.offset)));
  }
  return _mm256_add_epi32(dot, _mm256_set1_epi32(rows.minus_sum[at] * form.offset));
}

// What a block adds to the 8 lanes of one row.
template <WeightKind kind>
INLINE __m256 add_block(__m256 acc, __m256i dot, const Scales& s, const QuantizedRows& rows, size_t at) {
  constexpr ScaleForm form = block_form(kind).scale;
  const __m256 x_scale = _mm256_broadcast_ss(rows.scale + at);
  dot = take_offset<kind>(dot, s, rows, at);
  acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(s.scale, x_scale), acc);
  if constexpr (form == ScaleForm::half_min) acc = _mm256_fmadd_ps(s.min, _mm256_broadcast_ss(rows.sum + at), acc);
  if constexpr (form == ScaleForm::super32_min) acc = _mm256_fnmadd_ps(s.min, _mm256_broadcast_ss(rows.sum + at), acc);
  if constexpr (form == ScaleForm::super16_min) {
    const __m256i sums = _mm256_madd_epi16(s.min_pairs, _mm256_set1_epi32(rows.minus_halves[at]));
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(s.min, x_scale), acc);
  }
  return acc;
}

template <WeightKind kind, int R, bool from_panel>
INLINE void add_block_rows(const uint8_t* header, const uint8_t* block, const int8_t* q, ptrdiff_t q_stride,
                           const QuantizedRows& rows, size_t at, size_t num_blocks, __m256 (*acc)[2]) {
  constexpr BlockForm form = block_form(kind);
  Scales s[2];
  __m256i dot[R][2];
  if constexpr (!from_panel) {
    s[0] = load_scales<kind>(header, block, 0);
    s[1] = load_scales<kind>(header, block, 1);
  } else {
    s[0] = load_panel_scales<kind>(block, 0);
    s[1] = load_panel_scales<kind>(block, 1);
  }
  const uint8_t* planes = block + (from_panel ? panel_scale_bytes(form.scale) : sub_scale_bytes(form.scale));
  if constexpr (form.max_code == 0) {
    dot_signed<kind, R, from_panel>(planes, q, q_stride, dot);
  } else {
    dot_unsigned<kind, R, from_panel>(planes, s, q, q_stride, dot);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    acc[r][0] = add_block<kind>(acc[r][0], dot[r][0], s[0], rows, at + r * num_blocks);
    acc[r][1] = add_block<kind>(acc[r][1], dot[r][1], s[1], rows, at + r * num_blocks);
  }
}

// R rows with a tile as it lies in memory. Meanwhile fetches what lies `ahead` bytes further (0: nothing).
template <WeightKind kind, int R>
__attribute__((noinline)) void stream_rows(const TileArgs& args, int tile, int first_row, size_t ahead) {
  constexpr BlockForm form = block_form(kind);
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int per_group = form.raw_values / kBlock;
  const int num_blocks = args.k / kBlock;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const int8_t* q = args.rows.q + first_row * static_cast<ptrdiff_t>(args.k);
  size_t at = static_cast<size_t>(first_row) * num_blocks;
  __m256 acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int group = 0; group < num_blocks / per_group; ++group) {
    const uint8_t* header = packed;
    packed += header_bytes(form.scale);
    for (int block = 0; block < per_group; ++block, packed += step, q += kBlock, ++at) {
      if (ahead != 0) {
        const char* next = reinterpret_cast<const char*>(packed) + ahead;
        for (size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
      }
      add_block_rows<kind, R, false>(header, packed, q, args.k, args.rows, at, num_blocks, acc);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(args, first_row + r, tile, acc[r][0], acc[r][1]);
}

template <WeightKind kind>
void stream_tile(const TileArgs& args, int tile) {
  // One row streams through the weights; more rows stay on a tile while the first of them fetch the next one.
  const size_t ahead = args.m == 1 ? 2048 : args.tile_bytes;
  int row = 0;
  for (; row + 4 <= args.m; row += 4) stream_rows<kind, 4>(args, tile, row, row == 0 ? ahead : 0);
  switch (args.m - row) {
    case 3: stream_rows<kind, 3>(args, tile, row, row == 0 ? ahead : 0); break;
    case 2: stream_rows<kind, 2>(args, tile, row, row == 0 ? ahead : 0); break;
    case 1: stream_rows<kind, 1>(args, tile, row, row == 0 ? ahead : 0); break;
  }
}

// Blocks [first, first + count) of a tile, unpacked.
template <WeightKind kind>
__attribute__((noinline)) void write_panel(const uint8_t* tile, int first, int count, uint8_t* panel) {
  constexpr int per_group = block_form(kind).raw_values / kBlock;
  for (int i = 0; i < count; ++i) {
    const uint8_t* header = tile + (first + i) / per_group * packed_group_bytes(kind);
    const uint8_t* block = header + header_bytes(block_form(kind).scale) + (first + i) % per_group * packed_block_bytes(kind);
    _mm_prefetch(reinterpret_cast<const char*>(block) + 4096, _MM_HINT_T0);
    write_panel_block<kind>(header, block, panel + i * panel_step<kind>);
  }
}

// R rows with a panel; `partial` [R][16] carries sums from panel to panel of a tile.
template <WeightKind kind, int R>
__attribute__((noinline)) void panel_rows(const TileArgs& args, int tile, int first_row, const uint8_t* panel, int first, int count, float* partial) {
  const int num_blocks = args.k / kBlock;
  const int8_t* q = args.rows.q + first_row * static_cast<ptrdiff_t>(args.k) + first * kBlock;
  size_t at = static_cast<size_t>(first_row) * num_blocks + first;
  __m256 acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    acc[r][0] = first == 0 ? _mm256_setzero_ps() : _mm256_load_ps(partial + r * kTileRows);
    acc[r][1] = first == 0 ? _mm256_setzero_ps() : _mm256_load_ps(partial + r * kTileRows + 8);
  }
  for (int i = 0; i < count; ++i, panel += panel_step<kind>, q += kBlock, ++at) {
    add_block_rows<kind, R, true>(nullptr, panel, q, args.k, args.rows, at, num_blocks, acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (first + count == num_blocks) {
      store(args, first_row + r, tile, acc[r][0], acc[r][1]);
    } else {
      _mm256_store_ps(partial + r * kTileRows, acc[r][0]);
      _mm256_store_ps(partial + r * kTileRows + 8, acc[r][1]);
    }
  }
}

template <WeightKind kind>
void panel_tile(const TileArgs& args, int tile) {
  alignas(64) uint8_t panel[kPanelBlocks * panel_step<kind>];
  alignas(64) float partial[kMaxRows * kTileRows];
  const int num_blocks = args.k / kBlock;
  for (int first = 0; first < num_blocks; first += kPanelBlocks) {
    const int count = num_blocks - first < kPanelBlocks ? num_blocks - first : kPanelBlocks;
    write_panel<kind>(args.tiles + tile * args.tile_bytes, first, count, panel);
    int row = 0;
    for (; row + 4 <= args.m; row += 4) panel_rows<kind, 4>(args, tile, row, panel, first, count, partial + row * kTileRows);
    switch (args.m - row) {
      case 3: panel_rows<kind, 3>(args, tile, row, panel, first, count, partial + row * kTileRows); break;
      case 2: panel_rows<kind, 2>(args, tile, row, panel, first, count, partial + row * kTileRows); break;
      case 1: panel_rows<kind, 1>(args, tile, row, panel, first, count, partial + row * kTileRows); break;
    }
  }
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    if (args.m >= kPanelRows && args.m <= kMaxRows) {
      panel_tile<kind>(args, tile);
    } else {
      stream_tile<kind>(args, tile);
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx2() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles_avx2(WeightKind::f32), dense_tiles_avx2(WeightKind::f16), dense_tiles_avx2(WeightKind::bf16),
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>,
       block_tiles<WeightKind::q5_0>, block_tiles<WeightKind::q5_1>, block_tiles<WeightKind::q2_k>,
       block_tiles<WeightKind::q3_k>, block_tiles<WeightKind::q4_k>, block_tiles<WeightKind::q5_k>,
       block_tiles<WeightKind::q6_k>, block_tiles<WeightKind::iq4_nl>, block_tiles<WeightKind::iq4_xs>,
       block_tiles<WeightKind::mxfp4>},
  };
  return kernels;
}

}  // namespace trireme
