// Kernels of linear.h in plain C++, for machines without the vector sets and as a reference for them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"

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

// Codes of one row of a block as multiplicands, offset subtracted, kTileRows apart.
template <WeightKind kind>
void read_codes(const uint8_t* planes, int lane, float* codes) {
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
    codes[i * kTileRows] = static_cast<float>(code - form.offset);
  }
}

float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return float_from_fp16(half);
}

// A block of a tile, unpacked once for all rows of activations. One output per lane, so that the compiler vectorizes.
struct WeightBlock {
  float codes[kBlock][kTileRows];
  float scale[kTileRows], min[kTileRows];        // of the block
  int scales[2][kTileRows], mins[2][kTileRows];  // sub-scales of its halves, or of the whole block in the first
};

template <WeightKind kind>
void unpack(const uint8_t* header, const uint8_t* sub, WeightBlock& w) {
  constexpr ScaleForm form = block_form(kind).scale;
  for (int lane = 0; lane < kTileRows; ++lane) {
    read_codes<kind>(sub + sub_scale_bytes(form), lane, &w.codes[0][lane]);
    w.scale[lane] = form == ScaleForm::exponent ? float_from_exponent(header[lane]) : half_at(header + 2 * lane);
    if constexpr (has_mins(form)) w.min[lane] = half_at(header + 2 * (kTileRows + lane));
    for (int i = 0; i < 2; ++i) {
      if constexpr (form == ScaleForm::super32) w.scales[i][lane] = static_cast<int8_t>(sub[lane]);
      if constexpr (form == ScaleForm::super32_min) {
        w.scales[i][lane] = sub[lane];
        w.mins[i][lane] = sub[kTileRows + lane];
      }
      if constexpr (form == ScaleForm::super16) w.scales[i][lane] = static_cast<int8_t>(sub[2 * lane + i]);
      if constexpr (form == ScaleForm::super16_min) {
        w.scales[i][lane] = sub[2 * lane + i] & 15;
        w.mins[i][lane] = sub[2 * lane + i] >> 4;
      }
    }
  }
}

// Sums of 16 multiplies per lane. They are integers below 2^24, so exact in float32.
void add_products(const float (*codes)[kTileRows], const int8_t* q, float* dot) {
  for (int i = 0; i < kBlock / 2; ++i) {
    const float x = q[i];
    for (int lane = 0; lane < kTileRows; ++lane) dot[lane] += codes[i][lane] * x;
  }
}

// Adds a block's contribution for one row of activations to acc; `at` is its position in `rows`.
template <WeightKind kind>
void add_block(const WeightBlock& w, const QuantizedRows& rows, size_t at, float* acc) {
  constexpr ScaleForm form = block_form(kind).scale;
  const int8_t* q = rows.q + at * kBlock;
  const float x_scale = rows.scale[at];
  float dot[kTileRows] = {};
  add_products(w.codes, q, dot);
  if constexpr (has_pairs(form)) {
    float second[kTileRows] = {};
    add_products(w.codes + kBlock / 2, q + kBlock / 2, second);
    const int minus_first = static_cast<int16_t>(rows.minus_halves[at] & 0xffff), minus_second = rows.minus_halves[at] >> 16;
    for (int lane = 0; lane < kTileRows; ++lane) {
      const int total = w.scales[0][lane] * static_cast<int>(dot[lane]) + w.scales[1][lane] * static_cast<int>(second[lane]);
      acc[lane] += static_cast<float>(total) * (w.scale[lane] * x_scale);
      if constexpr (form == ScaleForm::super16_min) {
        acc[lane] -= static_cast<float>(-w.mins[0][lane] * minus_first - w.mins[1][lane] * minus_second) * (w.min[lane] * x_scale);
      }
    }
    return;
  }
  add_products(w.codes + kBlock / 2, q + kBlock / 2, dot);
  for (int lane = 0; lane < kTileRows; ++lane) {
    if constexpr (form == ScaleForm::super32 || form == ScaleForm::super32_min) {
      acc[lane] += dot[lane] * (w.scale[lane] * static_cast<float>(w.scales[0][lane]) * x_scale);
    } else {
      acc[lane] += dot[lane] * (w.scale[lane] * x_scale);
    }
    if constexpr (form == ScaleForm::super32_min) acc[lane] -= w.min[lane] * static_cast<float>(w.mins[0][lane]) * rows.sum[at];
    if constexpr (form == ScaleForm::half_min) acc[lane] += w.min[lane] * rows.sum[at];
  }
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
      WeightBlock weights;
      unpack<kind>(header, sub, weights);
      for (int row = 0; row < args.m; ++row) {
        add_block<kind>(weights, args.rows, static_cast<size_t>(row) * num_blocks + block, acc[row]);
      }
    }
    for (int row = 0; row < args.m; ++row) store(args, row, tile, acc[row]);
  }
}

}  // namespace

const LinearKernels& linear_kernels_portable() {
  static const Int8Kernels int8 = int8_kernels_portable();
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles_portable(WeightKind::f32), dense_tiles_portable(WeightKind::f16), dense_tiles_portable(WeightKind::bf16),
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>,
       block_tiles<WeightKind::q5_0>, block_tiles<WeightKind::q5_1>, block_tiles<WeightKind::q2_k>,
       block_tiles<WeightKind::q3_k>, block_tiles<WeightKind::q4_k>, block_tiles<WeightKind::q5_k>,
       block_tiles<WeightKind::q6_k>, block_tiles<WeightKind::iq4_nl>, block_tiles<WeightKind::iq4_xs>,
       block_tiles<WeightKind::mxfp4>, int8.tiles},
      int8.quantize_row,
  };
  return kernels;
}

}  // namespace trireme
