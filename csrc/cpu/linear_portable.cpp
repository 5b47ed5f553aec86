// Kernels of linear.h in plain C++, for machines without the vector sets and as a check of the others.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "halfs.h"
#include "linear.h"

namespace trireme {
namespace {

void quantize_row(const float* x, int k, const QuantizedRows& row) {
  int8_t* q = row.q;
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    uint32_t largest = 0;  // compared as integers, so that NaN and infinity win
    for (int i = 0; i < kBlock; ++i) largest = std::max(largest, bits_from_float(x[i]) & 0x7fffffffu);
    const float amax = float_from_bits(largest);
    const bool is_finite = largest < 0x7f800000u;
    const bool is_tiny = amax < 1e-30f;
    const float inverse = !is_finite || is_tiny ? 0.0f : 127.0f / amax;
    int32_t totals[2] = {0, 0};
    for (int i = 0; i < kBlock; ++i) {
      q[i] = inverse == 0.0f ? 0 : static_cast<int8_t>(std::lrintf(x[i] * inverse));
      totals[i / 16] += q[i];
    }
    row.scale[block] = !is_finite ? NAN : is_tiny ? 0.0f : amax / 127.0f;
    row.minus_sum[block] = -(totals[0] + totals[1]);
    row.sum[block] = row.scale[block] * static_cast<float>(-row.minus_sum[block]);
    row.minus_halves[block] = static_cast<int32_t>((static_cast<uint32_t>(-totals[0]) & 0xffffu) | static_cast<uint32_t>(-totals[1]) << 16);
  }
}

void store(const TileArgs& args, int row, int tile, const float* acc) {
  const int first = tile * kTileRows;
  float* out = args.out + row * args.out_stride + first;
  const int cols = std::min(kTileRows, args.num_cols - first);
  for (int lane = 0; lane < cols; ++lane) {
    float value = acc[lane];
    if (args.bias != nullptr) value += args.bias[first + lane];
    if (args.accumulate) value += out[lane];
    out[lane] = value;
  }
}

// Codes of one row of a block as the values that products are made of, offset taken off.
template <WeightKind kind>
void read_codes(const uint8_t* planes, int lane, int16_t* codes) {
  constexpr BlockForm form = block_form(kind);
  const uint8_t* second = planes + form.first_bits * 4 * kTileRows;
  auto field = [&](const uint8_t* plane, int bits, int i) {
    const int per_byte = 8 / bits, quad = i / 4;
    const int byte = plane[(quad / per_byte * kTileRows + lane) * 4 + i % 4];
    return byte >> (quad % per_byte * bits) & ((1 << bits) - 1);
  };
  for (int i = 0; i < kBlock; ++i) {
    int code = field(planes, form.first_bits, i);
    if constexpr (form.second_bits != 0) code |= field(second, form.second_bits, i) << form.first_bits;
    if constexpr (form.table != nullptr) {
      code = form.table[code];
    } else if constexpr (form.first_bits == 8) {
      code = static_cast<int8_t>(code);
    }
    codes[i] = static_cast<int16_t>(code - form.offset);
  }
}

float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return float_from_fp16(half);
}

// One row of a block, unpacked once for all rows of activations.
struct WeightRow {
  int16_t codes[kBlock];
  float scale, min;  // of the block
  int scales[2];     // sub-scales of its halves, where there are such; else the first is that of the block
  int mins[2];
};

template <WeightKind kind>
WeightRow read_row_of_block(const uint8_t* header, const uint8_t* sub, int lane) {
  constexpr ScaleForm form = block_form(kind).scale;
  WeightRow w{};
  read_codes<kind>(sub + sub_scale_bytes(form), lane, w.codes);
  w.scale = form == ScaleForm::exponent ? float_from_exponent(header[lane]) : half_at(header + 2 * lane);
  if constexpr (has_mins(form)) w.min = half_at(header + 2 * (kTileRows + lane));
  for (int i = 0; i < 2; ++i) {
    if constexpr (form == ScaleForm::super32) w.scales[i] = static_cast<int8_t>(sub[lane]);
    if constexpr (form == ScaleForm::super32_min) {
      w.scales[i] = sub[lane];
      w.mins[i] = sub[kTileRows + lane];
    }
    if constexpr (form == ScaleForm::super16) w.scales[i] = static_cast<int8_t>(sub[2 * lane + i]);
    if constexpr (form == ScaleForm::super16_min) {
      w.scales[i] = sub[2 * lane + i] & 15;
      w.mins[i] = sub[2 * lane + i] >> 4;
    }
  }
  return w;
}

// acc + what one block of one weight row gives with one row of activations: q as int16, and its place `at` in `rows`.
template <WeightKind kind>
float add_block(const WeightRow& w, const int16_t* q, const QuantizedRows& rows, size_t at, float acc) {
  constexpr ScaleForm form = block_form(kind).scale;
  int32_t first = 0, second = 0;
  for (int i = 0; i < kBlock / 2; ++i) first += w.codes[i] * q[i];
  for (int i = kBlock / 2; i < kBlock; ++i) second += w.codes[i] * q[i];
  const float x_scale = rows.scale[at];
  if constexpr (has_pairs(form)) {
    acc += static_cast<float>(w.scales[0] * first + w.scales[1] * second) * (w.scale * x_scale);
    if constexpr (form == ScaleForm::super16_min) {
      const int minus_first = static_cast<int16_t>(rows.minus_halves[at] & 0xffff), minus_second = rows.minus_halves[at] >> 16;
      acc -= static_cast<float>(-w.mins[0] * minus_first - w.mins[1] * minus_second) * (w.min * x_scale);
    }
    return acc;
  }
  const float dot = static_cast<float>(first + second);
  if constexpr (form == ScaleForm::super32 || form == ScaleForm::super32_min) {
    acc += dot * (w.scale * w.scales[0] * x_scale);
    return form == ScaleForm::super32 ? acc : acc - w.min * w.mins[0] * rows.sum[at];
  }
  acc += dot * (w.scale * x_scale);
  return form == ScaleForm::half_min ? acc + w.min * rows.sum[at] : acc;
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  constexpr BlockForm form = block_form(kind);
  constexpr int per_group = form.raw_values / kBlock;
  const int num_blocks = args.k / kBlock;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    float acc[kMaxTaskRows][kTileRows] = {};
    for (int block = 0; block < num_blocks; ++block) {
      const uint8_t* header = args.tiles + tile * args.tile_bytes + block / per_group * packed_group_bytes(kind);
      const uint8_t* sub = header + header_bytes(form.scale) + block % per_group * packed_block_bytes(kind);
      WeightRow weights[kTileRows];
      for (int lane = 0; lane < kTileRows; ++lane) weights[lane] = read_row_of_block<kind>(header, sub, lane);
      for (int row = 0; row < args.m; ++row) {
        const size_t at = static_cast<size_t>(row) * num_blocks + block;
        int16_t q[kBlock];
        for (int i = 0; i < kBlock; ++i) q[i] = args.rows.q[at * kBlock + i];
        for (int lane = 0; lane < kTileRows; ++lane) acc[row][lane] = add_block<kind>(weights[lane], q, args.rows, at, acc[row][lane]);
      }
    }
    for (int row = 0; row < args.m; ++row) store(args, row, tile, acc[row]);
  }
}

}  // namespace

const LinearKernels& linear_kernels_portable() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles_portable(WeightKind::f32), dense_tiles_portable(WeightKind::f16), dense_tiles_portable(WeightKind::bf16),
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>,
       block_tiles<WeightKind::q5_0>, block_tiles<WeightKind::q5_1>, block_tiles<WeightKind::q2_k>,
       block_tiles<WeightKind::q3_k>, block_tiles<WeightKind::q4_k>, block_tiles<WeightKind::q5_k>,
       block_tiles<WeightKind::q6_k>, block_tiles<WeightKind::iq4_nl>, block_tiles<WeightKind::iq4_xs>,
       block_tiles<WeightKind::mxfp4>},
  };
  return kernels;
}

}  // namespace trireme
