// Scalar conversions between fp32 and the 16-bit formats, for packing, gathering and the portable kernels.
#pragma once

#include <cstdint>
#include <cstring>

namespace trireme {

static inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_from_bf16(uint16_t half) { return float_from_bits(static_cast<uint32_t>(half) << 16); }

static inline float float_from_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return float_from_bits(bits_from_float(magnitude) | sign);
  }
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | (fraction << 13));
  return float_from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// To nearest, ties to even; overflows to infinity.
static inline uint16_t fp16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the fraction in units of 2^-24, rounded by the addition
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_from_float(shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13));
}

// 2^(exponent - 128), subnormal for 0 and 1: half the scale of an E8M0 byte.
static inline float float_from_exponent(uint8_t exponent) {
  const uint32_t e = exponent;
  return float_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

}  // namespace trireme
