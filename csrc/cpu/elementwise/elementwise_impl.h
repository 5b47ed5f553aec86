// Kernels of norms, rotary embedding with cache write, and gated activation, for one instruction set. Included by ops_*.cpp.
// Summation order depends on the width only.
#pragma once

#include "cpu/elementwise/ops.h"
#include "cpu/simd16.h"

namespace trireme::TRIREME_VARIANT {

// ---------------------------------------------------------------- norms

// Sum of squares over four independent accumulators.
TRIREME_INLINE float sum_squares(const float* x, int width) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec value = load(x + i + j * kLanes);
      sums[j] = fma(value, value, sums[j]);
    }
  }
  for (; i + kLanes <= width; i += kLanes) {
    const Vec value = load(x + i);
    sums[0] = fma(value, value, sums[0]);
  }
  if (i < width) {
    const Vec value = load_first(x + i, width - i);
    sums[1] = fma(value, value, sums[1]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

TRIREME_INLINE void norm_row(const float* x, const float* weight, float* out, int width, float eps) {
  const float inverse = 1.0f / std::sqrt(sum_squares(x, width) / static_cast<float>(width) + eps);
  const Vec factor = set1(inverse);
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, mul(load(weight + i), mul(load(x + i), factor)));
  for (; i < width; ++i) out[i] = weight[i] * (x[i] * inverse);
}

TRIREME_INLINE void add_row(float* residual, const float* x, int width) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(residual + i, add(load(residual + i), load(x + i)));
  for (; i < width; ++i) residual[i] += x[i];
}

static void norm_rows(const NormArgs& a, int first, int last) {
  for (int row = first; row < last; ++row) {
    const float* x = a.x + row * a.x_stride;
    if (a.residual != nullptr) {
      float* residual = a.residual + row * a.residual_stride;
      add_row(residual, x, a.width);
      x = residual;
    }
    norm_row(x, a.weight, a.out + row * a.out_stride, a.width, a.eps);
  }
}

// ---------------------------------------------------------------- rotary embedding and cache write

// Units up to this count as zero: 1 / unit must be finite.
inline constexpr float kLeastUnit = 1e-36f;

// out may be x. Multiplies are rounded before the add, as in the reference.
TRIREME_INLINE void rotate(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? half - i : kLanes;
    const bool full = n == kLanes;
    const Vec c = full ? load(cos + i) : load_first(cos + i, n);
    const Vec s = full ? load(sin + i) : load_first(sin + i, n);
    const Vec a = full ? load(x + i) : load_first(x + i, n);
    const Vec b = full ? load(x + half + i) : load_first(x + half + i, n);
    const Vec first = sub(mul(a, c), mul(b, s));
    const Vec second = add(mul(b, c), mul(a, s));
    if (full) {
      store(out + i, first);
      store(out + half + i, second);
    } else {
      store_first(out + i, first, n);
      store_first(out + half + i, second, n);
    }
  }
}

template <class T>
TRIREME_INLINE void narrow_row(const float* x, T* out, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i));
  for (; i < n; ++i) narrow(x[i], out + i);
}

// The rotated, normed key of one head of one token, in `key` or in place.
TRIREME_INLINE const float* finished_key(const RopeArgs& a, int token, int head, const float* cos, float* key) {
  const float* k = a.k + token * a.k_stride + static_cast<int64_t>(head) * a.kv.dim;
  if (a.k_norm != nullptr) {
    norm_row(k, a.k_norm, key, a.kv.dim, a.eps);
    k = key;
  }
  if (a.rot < a.kv.dim && k != key) std::memcpy(key + a.rot, k + a.rot, static_cast<size_t>(a.kv.dim - a.rot) * 4);
  rotate(k, cos, cos + a.rot / 2, a.rot / 2, key);
  return key;
}

template <class T>
static void cache_token(const RopeArgs& a, int token, const float* cos, float* key) {
  const KvView& kv = a.kv;
  const int64_t block = a.slots[token] / kv.block_size, offset = a.slots[token] % kv.block_size;
  const int64_t head_size = static_cast<int64_t>(kv.dim) * kv.block_size;
  T narrow_key[kMaxHeadDim];
  for (int head = 0; head < kv.heads; ++head) {
    narrow_row(finished_key(a, token, head, cos, key), narrow_key, kv.dim);
    const int64_t base = (block * kv.heads + head) * head_size;
    T* keys = static_cast<T*>(kv.k) + base + offset;
    for (int d = 0; d < kv.dim; ++d) keys[static_cast<int64_t>(d) * kv.block_size] = narrow_key[d];
    const float* v = a.v + token * a.v_stride + static_cast<int64_t>(head) * kv.dim;
    narrow_row(v, static_cast<T*>(kv.v) + base + offset * kv.dim, kv.dim);
  }
}

// out[i] = x[i] / unit, rounded; out has room for whole vectors. A NaN unit gives unspecified integers.
TRIREME_INLINE void divide_row(const float* x, float unit, int16_t* out, int n) {
  const Vec inverse = set1(unit > kLeastUnit ? 1.0f / unit : 0.0f);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store_ints(out + i, mul(load(x + i), inverse));
  if (i < n) store_ints(out + i, mul(load_first(x + i, n - i), inverse));
}

template <class T>
TRIREME_INLINE void store_unit(T* units, int64_t offset, float unit) {
  if (!(unit > kLeastUnit) && unit == unit) unit = 0.0f;
  std::memcpy(reinterpret_cast<char*>(units) + 4 * offset, &unit, 4);
}

// The amax, NaN if there is any.
TRIREME_INLINE float largest(const float* x, int n) {
  Vec best = zero(), tainted = zero();
  for (int i = 0; i < n; i += kLanes) {
    const Vec value = i + kLanes <= n ? load(x + i) : load_first(x + i, n - i);
    best = max(best, max(value, sub(zero(), value)));
    tainted = fma(value, zero(), tainted);
  }
  return reduce_max(best) + reduce_add(tainted);
}

// Elements of one token at `stride`, `width` adjacent ones at a time.
template <int Width, class T>
TRIREME_INLINE void spread(const int16_t* from, T* to, int64_t stride, int n) {
  for (int i = 0; i < n; i += Width) {
    for (int j = 0; j < Width; ++j) to[i / Width * stride + j] = static_cast<T>(from[i + j]);
  }
}

template <class T>
static void cache_integers(const RopeArgs& a, int token, const float* cos, float* key) {
  const KvView& kv = a.kv;
  const int64_t block = a.slots[token] / kv.block_size, offset = a.slots[token] % kv.block_size;
  const int64_t head_bytes = kv_head_bytes(kv.type, kv.dim, kv.block_size);
  const int64_t numbers = static_cast<int64_t>(kv.dim) * kv.block_size;
  constexpr float most = sizeof(T) == 2 ? 32767.0f : 127.0f;
  int16_t rounded[kMaxHeadDim];
  for (int head = 0; head < kv.heads; ++head) {
    T* keys = reinterpret_cast<T*>(static_cast<char*>(kv.k) + (block * kv.heads + head) * head_bytes);
    T* values = reinterpret_cast<T*>(static_cast<char*>(kv.v) + (block * kv.heads + head) * head_bytes);
    const float* k = finished_key(a, token, head, cos, key);
    const float key_unit = (sizeof(T) == 2 ? std::sqrt(sum_squares(k, kv.dim)) : largest(k, kv.dim)) / most;
    divide_row(k, key_unit, rounded, kv.dim);
    spread<2>(rounded, keys + 2 * offset, 2 * kv.block_size, kv.dim);
    store_unit(keys + numbers, offset, key_unit);
    const float* v = a.v + token * a.v_stride + static_cast<int64_t>(head) * kv.dim;
    const float value_unit = largest(v, kv.dim) / most;
    divide_row(v, value_unit, rounded, kv.dim);
    spread<1>(rounded, values + offset / 2 * 2 * kv.dim + offset % 2, 2, kv.dim);
    store_unit(values + numbers, offset, value_unit);
  }
}

static void rope_tokens(const RopeArgs& a, int first, int last) {
  float key[kMaxHeadDim];
  for (int token = first; token < last; ++token) {
    const float* cos = a.cos_sin + static_cast<int64_t>(a.positions[token]) * a.rot;
    for (int head = 0; head < a.q_heads; ++head) {
      float* q = a.q + token * a.q_stride + static_cast<int64_t>(head) * a.kv.dim;
      if (a.q_norm != nullptr) norm_row(q, a.q_norm, q, a.kv.dim, a.eps);
      rotate(q, cos, cos + a.rot / 2, a.rot / 2, q);
    }
    if (a.slots[token] < 0) continue;
    switch (a.kv.type) {
      case KvType::f32: cache_token<float>(a, token, cos, key); break;
      case KvType::f16: cache_token<Half>(a, token, cos, key); break;
      case KvType::bf16: cache_token<BFloat>(a, token, cos, key); break;
      case KvType::i8: cache_integers<int8_t>(a, token, cos, key); break;
      case KvType::i16: cache_integers<int16_t>(a, token, cos, key); break;
    }
  }
}

// ---------------------------------------------------------------- activation

TRIREME_INLINE Vec swiglu_lanes(Vec gate, Vec up) {
  return mul(div(gate, add(set1(1.0f), exp(sub(zero(), gate)))), up);
}

// GELU by tanh: x * (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), with y = sqrt(2 / pi) * (x + 0.044715 x^3).
TRIREME_INLINE Vec geglu_lanes(Vec gate, Vec up) {
  const Vec cubic = mul(mul(gate, gate), set1(0.044715f));
  const Vec y = mul(mul(gate, add(set1(1.0f), cubic)), set1(-1.5957691216057308f));
  return mul(div(gate, add(set1(1.0f), exp(y))), up);
}

template <Activation A>
static void gate_span(const SwigluArgs& a, int row, int first, int last) {
  const auto lanes = [](Vec gate, Vec up) {
    if constexpr (A == Activation::silu) return swiglu_lanes(gate, up);
    else return geglu_lanes(gate, up);
  };
  const float* gate = a.gate_up + row * a.gate_up_stride;
  const float* up = gate + a.width;
  float* out = a.out + row * a.out_stride;
  int i = first;
  for (; i + kLanes <= last; i += kLanes) store(out + i, lanes(load(gate + i), load(up + i)));
  if (i < last) {
    const int n = last - i;
    store_first(out + i, lanes(load_first(gate + i, n), load_first(up + i, n)), n);
  }
}

static void swiglu_span(const SwigluArgs& a, int row, int first, int last) {
  if (a.activation == Activation::silu) return gate_span<Activation::silu>(a, row, first, last);
  gate_span<Activation::gelu_tanh>(a, row, first, last);
}

}  // namespace trireme::TRIREME_VARIANT
