// Conversion between GGUF file rows and the tiles of linear.h: packing and reading back. Called by linear.cpp, from tasks of the
// thread pool. Layouts of raw blocks are those of ggml's block structs.
#include <algorithm>
#include <cstring>

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"

namespace trireme {
namespace {

// ---------------------------------------------------------------- raw blocks

// One raw block unpacked to bytes: the intermediate form between file and tile.
struct Group {
  uint8_t header[4];      // fp16 scale and min, or an exponent
  uint8_t first_sub[8];   // per block of 32: the sub-scale area of a row, see linear.h
  uint8_t second_sub[8];
  uint8_t codes[256];
};

void set_header(Group* group, const uint8_t* scale, const uint8_t* min) {
  std::memcpy(group->header, scale, 2);
  if (min != nullptr) std::memcpy(group->header + 2, min, 2);
}

// n bytes hold n values in their low nibbles, then n in their high ones.
void read_nibbles(const uint8_t* from, int n, uint8_t* codes) {
  for (int i = 0; i < n; ++i) {
    codes[i] = from[i] & 15;
    codes[n + i] = from[i] >> 4;
  }
}

void add_bits(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < kBlock; ++i) codes[i] |= static_cast<uint8_t>((bytes[i / 8] >> (i % 8) & 1) << 4);
}

// Bit `run` of 32 bytes belongs to the run-th 32 values.
void add_run_bits(const uint8_t* bytes, int to_bit, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] |= static_cast<uint8_t>((bytes[i % 32] >> (i / 32) & 1) << to_bit);
}

// Bit pair j of 32 bytes belongs to the j-th 32 of 128 values.
void add_crumbs(const uint8_t* bytes, int to_bit, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) {
    const int byte = i / 128 * 32 + i % 32, pair = i % 128 / 32;
    codes[i] |= static_cast<uint8_t>((bytes[byte] >> (2 * pair) & 3) << to_bit);
  }
}

void read_scales_and_mins(const uint8_t* s, Group* group) {
  for (int i = 0; i < 4; ++i) {
    group->first_sub[i] = s[i] & 63;
    group->second_sub[i] = s[i + 4] & 63;
    group->first_sub[i + 4] = static_cast<uint8_t>((s[i + 8] & 15) | (s[i] >> 6) << 4);
    group->second_sub[i + 4] = static_cast<uint8_t>((s[i + 8] >> 4) | (s[i + 4] >> 6) << 4);
  }
}

void set_pair(Group* group, int run16, int value) {
  (run16 % 2 == 0 ? group->first_sub : group->second_sub)[run16 / 2] = static_cast<uint8_t>(value);
}

void read_q2_k(const uint8_t* raw, Group* group) {
  set_header(group, raw + 80, raw + 82);
  for (int i = 0; i < 16; ++i) set_pair(group, i, raw[i]);
  std::memset(group->codes, 0, 256);
  add_crumbs(raw + 16, 0, group->codes);
}

void read_q3_k(const uint8_t* raw, Group* group) {
  set_header(group, raw + 108, nullptr);
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? raw[96 + i] & 15 : raw[88 + i] >> 4;
    set_pair(group, i, (low | (raw[104 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
  }
  std::memset(group->codes, 0, 256);
  add_crumbs(raw + 32, 0, group->codes);
  add_run_bits(raw, 2, group->codes);
}

void read_q4_k(const uint8_t* raw, Group* group) {
  set_header(group, raw, raw + 2);
  read_scales_and_mins(raw + 4, group);
  for (int i = 0; i < 4; ++i) read_nibbles(raw + 16 + 32 * i, 32, group->codes + 64 * i);
}

void read_q5_k(const uint8_t* raw, Group* group) {
  set_header(group, raw, raw + 2);
  read_scales_and_mins(raw + 4, group);
  for (int i = 0; i < 4; ++i) read_nibbles(raw + 48 + 32 * i, 32, group->codes + 64 * i);
  add_run_bits(raw + 16, 4, group->codes);
}

void read_q6_k(const uint8_t* raw, Group* group) {
  set_header(group, raw + 208, nullptr);
  for (int i = 0; i < 16; ++i) set_pair(group, i, raw[192 + i]);
  for (int i = 0; i < 2; ++i) read_nibbles(raw + 64 * i, 64, group->codes + 128 * i);
  add_crumbs(raw + 128, 4, group->codes);
}

void read_iq4_xs(const uint8_t* raw, Group* group) {
  set_header(group, raw, nullptr);
  for (int i = 0; i < 8; ++i) {
    const int low = raw[4 + i / 2] >> (4 * (i % 2)) & 15;
    const int high = raw[2 + i / 4] >> (2 * (i % 4)) & 3;
    group->first_sub[i] = static_cast<uint8_t>((low | high << 4) - 32);
    read_nibbles(raw + 8 + 16 * i, 16, group->codes + 32 * i);
  }
}

void read_group(WeightKind kind, const uint8_t* raw, Group* group) {
  switch (kind) {
    case WeightKind::q8_0:
      set_header(group, raw, nullptr);
      std::memcpy(group->codes, raw + 2, kBlock);
      break;
    case WeightKind::q4_0:
    case WeightKind::iq4_nl:
      set_header(group, raw, nullptr);
      read_nibbles(raw + 2, 16, group->codes);
      break;
    case WeightKind::q4_1:
      set_header(group, raw, raw + 2);
      read_nibbles(raw + 4, 16, group->codes);
      break;
    case WeightKind::q5_0:
      set_header(group, raw, nullptr);
      read_nibbles(raw + 6, 16, group->codes);
      add_bits(raw + 2, group->codes);
      break;
    case WeightKind::q5_1:
      set_header(group, raw, raw + 2);
      read_nibbles(raw + 8, 16, group->codes);
      add_bits(raw + 4, group->codes);
      break;
    case WeightKind::mxfp4:
      group->header[0] = raw[0];
      read_nibbles(raw + 1, 16, group->codes);
      break;
    case WeightKind::q2_k: read_q2_k(raw, group); break;
    case WeightKind::q3_k: read_q3_k(raw, group); break;
    case WeightKind::q4_k: read_q4_k(raw, group); break;
    case WeightKind::q5_k: read_q5_k(raw, group); break;
    case WeightKind::q6_k: read_q6_k(raw, group); break;
    case WeightKind::iq4_xs: read_iq4_xs(raw, group); break;
    default: break;
  }
}

// ---------------------------------------------------------------- planes

// Stores bits [from_bit, from_bit + bits) of 32 codes in a plane.
void write_plane(const uint8_t* codes, int from_bit, int bits, int lane, uint8_t* plane) {
  const int per_byte = 8 / bits;
  const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  for (int piece = 0; piece < bits; ++piece) {
    uint32_t word = 0;
    for (int field = 0; field < per_byte; ++field) {
      uint32_t quad = 0;
      std::memcpy(&quad, codes + 4 * (piece * per_byte + field), 4);
      word |= (quad >> from_bit & mask) << (field * bits);
    }
    std::memcpy(plane + (piece * kTileRows + lane) * 4, &word, 4);
  }
}

void read_plane(const uint8_t* plane, int lane, int bits, int to_bit, uint8_t* codes) {
  const int per_byte = 8 / bits;
  for (int i = 0; i < kBlock; ++i) {
    const int piece = i / 4 / per_byte, field = i / 4 % per_byte;
    const uint8_t byte = plane[(piece * kTileRows + lane) * 4 + i % 4];
    codes[i] |= static_cast<uint8_t>((byte >> (field * bits) & ((1 << bits) - 1)) << to_bit);
  }
}

void write_group(WeightKind kind, const Group& group, int lane, uint8_t* packed) {
  const BlockForm form = block_form(kind);
  const size_t sub_bytes = sub_scale_bytes(form.scale);
  if (form.scale == ScaleForm::exponent) {
    packed[lane] = group.header[0];
  } else {
    std::memcpy(packed + 2 * lane, group.header, 2);
    if (has_mins(form.scale)) std::memcpy(packed + 2 * (kTileRows + lane), group.header + 2, 2);
  }
  packed += header_bytes(form.scale);
  for (int block = 0; block < form.raw_values / kBlock; ++block, packed += packed_block_bytes(kind)) {
    const uint8_t* codes = group.codes + kBlock * block;
    if (has_pairs(form.scale)) {
      packed[2 * lane] = group.first_sub[block];
      packed[2 * lane + 1] = group.second_sub[block];
    } else if (sub_bytes != 0) {
      packed[lane] = group.first_sub[block];
      if (sub_bytes > kTileRows) packed[kTileRows + lane] = group.second_sub[block];
    }
    write_plane(codes, 0, form.first_bits, lane, packed + sub_bytes);
    if (form.second_bits != 0) {
      write_plane(codes, form.first_bits, form.second_bits, lane, packed + sub_bytes + form.first_bits * 4 * kTileRows);
    }
  }
}

// ---------------------------------------------------------------- reading back

float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return float_from_fp16(half);
}

struct Scale {
  float scale;
  float min;  // added
};

// Scale and min of one half (16 k's) of a block.
Scale scale_of(ScaleForm form, const uint8_t* header, const uint8_t* sub, int lane, int half) {
  if (form == ScaleForm::exponent) return {float_from_exponent(header[lane]), 0.0f};
  const float scale = half_at(header + 2 * lane);
  const float min = has_mins(form) ? half_at(header + 2 * (kTileRows + lane)) : 0.0f;
  const uint8_t pair = sub[2 * lane + half];
  switch (form) {
    case ScaleForm::super32: return {scale * static_cast<int8_t>(sub[lane]), 0.0f};
    case ScaleForm::super32_min: return {scale * sub[lane], -(min * sub[kTileRows + lane])};
    case ScaleForm::super16: return {scale * static_cast<int8_t>(pair), 0.0f};
    case ScaleForm::super16_min: return {scale * (pair & 15), -(min * (pair >> 4))};
    default: return {scale, min};
  }
}

void read_block(WeightKind kind, const uint8_t* header, const uint8_t* packed, int lane, float* out) {
  const BlockForm form = block_form(kind);
  const uint8_t* planes = packed + sub_scale_bytes(form.scale);
  uint8_t codes[kBlock] = {};
  read_plane(planes, lane, form.first_bits, 0, codes);
  if (form.second_bits != 0) {
    read_plane(planes + form.first_bits * 4 * kTileRows, lane, form.second_bits, form.first_bits, codes);
  }
  const Scale scales[2] = {scale_of(form.scale, header, packed, lane, 0), scale_of(form.scale, header, packed, lane, 1)};
  for (int i = 0; i < kBlock; ++i) {
    int value = form.first_bits == 8 ? static_cast<int8_t>(codes[i]) : codes[i];
    if (form.table != nullptr) value = form.table[codes[i]];
    const Scale& s = scales[i / 16];
    const float product = s.scale * static_cast<float>(value - form.offset);
    out[i] = has_mins(form.scale) ? product + s.min : product;
  }
}

float read_dense(WeightKind kind, const uint8_t* packed, int lane) {
  if (kind == WeightKind::f32) {
    float value;
    std::memcpy(&value, packed + 4 * lane, 4);
    return value;
  }
  if (kind == WeightKind::f16) return half_at(packed + 2 * lane);
  uint16_t half;
  std::memcpy(&half, packed + 2 * lane, 2);
  return float_from_bf16(half);
}

}  // namespace

void pack_tile(WeightKind kind, const uint8_t* raw, size_t raw_row, int rows, int k, uint8_t* tile) {
  if (kind == WeightKind::int8) return pack_int8_tile(raw, raw_row, rows, k, tile);
  const BlockForm form = block_form(kind);
  const size_t step = packed_group_bytes(kind), raw_step = static_cast<size_t>(form.raw_bytes);
  Group group;
  for (int at = 0; at < k / form.raw_values; ++at, tile += step, raw += raw_step) {
    for (int lane = 0; lane < rows; ++lane) {
      const uint8_t* from = raw + lane * raw_row;
      if (is_block_kind(kind)) {
        read_group(kind, from, &group);
        write_group(kind, group, lane, tile);
      } else {
        std::memcpy(tile + lane * raw_step, from, raw_step);
      }
    }
  }
}

void read_row(WeightKind kind, const uint8_t* tile, int lane, int k, float* out) {
  if (kind == WeightKind::int8) return read_int8_row(tile, lane, k, out);
  const BlockForm form = block_form(kind);
  for (int at = 0; at < k / form.raw_values; ++at, tile += packed_group_bytes(kind)) {
    if (!is_block_kind(kind)) {
      out[at] = read_dense(kind, tile, lane);
      continue;
    }
    const uint8_t* packed = tile + header_bytes(form.scale);
    for (int block = 0; block < form.raw_values / kBlock; ++block, packed += packed_block_bytes(kind), out += kBlock) {
      read_block(kind, tile, packed, lane, out);
    }
  }
}

}  // namespace trireme
