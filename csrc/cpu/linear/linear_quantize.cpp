// Quantizes fp32 weights to raw GGUF blocks, for models that are quantized while they load. Bound by bind/linear.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"
#include "cpu/threads.h"

namespace trireme {
namespace {

float largest_magnitude(const float* x) {
  float largest = 0.0f;
  for (int i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

void put_half(float value, uint8_t* to) {
  const uint16_t half = fp16_from_float(value);
  std::memcpy(to, &half, 2);
}

// As in ggml, values are divided by the scale before the scale is rounded to fp16.
void round_q8_0(const float* x, uint8_t* block) {
  const float scale = largest_magnitude(x) / 127.0f;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  put_half(scale, block);
  for (int i = 0; i < kBlock; ++i) {
    const float value = std::round(x[i] * inverse);
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(value, -127.0f, 127.0f)));
  }
}

// The value of largest magnitude, including its sign, becomes -8.
void round_q4_0(const float* x, uint8_t* block) {
  float extreme = 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  const float scale = extreme / -8.0f;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  put_half(scale, block);
  auto code = [&](int i) { return std::min(15, static_cast<int>(x[i] * inverse + 8.5f)); };
  for (int i = 0; i < 16; ++i) block[2 + i] = static_cast<uint8_t>(code(i) | code(i + 16) << 4);
}

}  // namespace

void quantize_weight(WeightKind kind, const float* values, int n, int k, uint8_t* raw) {
  const size_t row_bytes = raw_row_bytes(kind, k), block_bytes = static_cast<size_t>(block_form(kind).raw_bytes);
  parallel(n, [&](int row, int) {
    const float* x = values + static_cast<size_t>(row) * k;
    uint8_t* block = raw + static_cast<size_t>(row) * row_bytes;
    if (kind == WeightKind::int8) return round_int8_row(x, k, block);
    for (int i = 0; i < k / kBlock; ++i, x += kBlock, block += block_bytes) {
      if (kind == WeightKind::q4_0) {
        round_q4_0(x, block);
      } else {
        round_q8_0(x, block);
      }
    }
  });
}

}  // namespace trireme
