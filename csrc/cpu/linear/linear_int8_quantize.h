// Quantizes a row of x for int8 weights, with the same operations for any vector set: the compiler vectorizes them. Included by
// linear_int8_*.cpp only; all static, so that the linker never shares vector code with other files.
#pragma once

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"

namespace trireme {
namespace {

// Each code is xor-ed with `flip`: 0x80 makes unsigned bytes, 128 above the code.
template <int flip>
void quantize_whole_row(const float* x, int k, const QuantizedRows& row) {
  uint32_t largest = 0;  // compared as integers, so that NaN and infinity win
  for (int i = 0; i < k; ++i) {
    const uint32_t magnitude = bits_from_float(x[i]) & 0x7fffffffu;
    largest = largest > magnitude ? largest : magnitude;
  }
  const float amax = float_from_bits(largest);
  const bool is_finite = largest < 0x7f800000u, is_tiny = amax < 1e-30f;
  const int padded = blocks_in(k) * kBlock;
  auto* q = reinterpret_cast<uint8_t*>(row.q);
  *row.scale = !is_finite ? __builtin_nanf("") : is_tiny ? 0.0f : amax / 127.0f;
  int i = 0;
  if (is_finite && !is_tiny) {
    // At 1.5 * 2^23 a float's ulp is 1: the addition rounds to nearest, ties to even, into the low byte.
    const float inverse = 127.0f / amax;
    for (; i < k; ++i) q[i] = static_cast<uint8_t>(bits_from_float(x[i] * inverse + 12582912.0f) ^ flip);
  }
  for (; i < padded; ++i) q[i] = flip;
}

}  // namespace
}  // namespace trireme
