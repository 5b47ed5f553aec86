// int8 weights with one scale per output: quantizing, packing into the tiles of linear.h, reading back. Called by
// linear_pack.cpp and linear_quantize.cpp from tasks of the thread pool.
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/linear/linear.h"

namespace trireme {
namespace {

constexpr size_t kScaleBytes = 4 * kTileRows, kCodesAt = 2 * kScaleBytes;

}  // namespace

void round_int8_row(const float* values, int k, uint8_t* raw) {
  float largest = 0.0f;
  bool is_finite = true;
  for (int i = 0; i < k; ++i) {
    const float magnitude = std::fabs(values[i]);
    is_finite = is_finite && std::isfinite(magnitude);
    if (magnitude > largest) largest = magnitude;
  }
  const float scale = is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
  const bool is_zero = !is_finite || largest < 1e-30f;
  std::memcpy(raw, &scale, 4);
  raw += 4;
  for (int i = 0; i < k; ++i) raw[i] = is_zero ? 0 : static_cast<uint8_t>(static_cast<int8_t>(std::nearbyintf(values[i] / largest * 127.0f)));
}

void pack_int8_tile(const uint8_t* raw, size_t raw_row, int rows, int k, uint8_t* tile) {
  for (int lane = 0; lane < rows; ++lane, raw += raw_row) {
    const uint8_t* codes = raw + 4;
    int32_t sum = 0;
    for (int i = 0; i < k; ++i) {
      tile[kCodesAt + (i / 4 * kTileRows + lane) * 4 + i % 4] = codes[i];
      sum += static_cast<int8_t>(codes[i]);
    }
    const int32_t minus = -128 * sum;
    std::memcpy(tile + 4 * lane, raw, 4);
    std::memcpy(tile + kScaleBytes + 4 * lane, &minus, 4);
  }
}

void read_int8_row(const uint8_t* tile, int lane, int k, float* out) {
  float scale = 0.0f;
  std::memcpy(&scale, tile + 4 * lane, 4);
  for (int i = 0; i < k; ++i) {
    out[i] = scale * static_cast<float>(static_cast<int8_t>(tile[kCodesAt + (i / 4 * kTileRows + lane) * 4 + i % 4]));
  }
}

}  // namespace trireme
