// Views of tensors in the memory of the host, and how the bindings of models._native check and pass them on. A check that a kernel's
// header asks for ("not checked here", "must be in range") is made here, but for what index arrays hold.
#pragma once

#include <cstdint>

#include "bind/tensor_view.h"
#include "cpu/elementwise/ops.h"

namespace trireme::cpu {

inline Operand operand(const char* op, const char* name, const TensorView& view) { return {op, name, view, Device::cpu}; }

// Where the values of an int32 vector of `count` lie.
inline const int32_t* int32_vector(const char* op, const char* name, const TensorView& view, int64_t count) {
  operand(op, name, view).is(DType::i32).dense({count});
  return view.as<const int32_t>();
}

// Where the values of an optional float32 vector of `count` lie: null for none.
inline const float* optional_floats(const char* op, const char* name, const TensorView& view, int64_t count) {
  if (!view.is_given) return nullptr;
  operand(op, name, view).is(DType::f32).dense({count});
  return view.as<const float>();
}

// The paged cache of one layer (layout: cpu/elementwise/ops.h). numpy holds the bits of bfloat16 as uint16.
inline KvView to_kv(const char* op, const TensorView& k, const TensorView& v) {
  operand(op, "k_cache", k).is({DType::f32, DType::f16, DType::bf16, DType::u16, DType::i8, DType::i16}).dense({kAny, kAny, kAny, kAny});
  operand(op, "v_cache", v).is(k.dtype).dense({k.shape[0], k.shape[1], k.shape[3], k.shape[2]});
  KvView kv{k.data, v.data, KvType::bf16, to_int(k.shape[1]), to_int(k.shape[2]), to_int(k.shape[3])};
  switch (k.dtype) {
    case DType::f32: kv.type = KvType::f32; break;
    case DType::f16: kv.type = KvType::f16; break;
    case DType::i8: kv.type = KvType::i8; break;
    case DType::i16: kv.type = KvType::i16; break;
    default: break;
  }
  if (is_integer(kv.type)) kv.dim -= static_cast<int>(sizeof(float)) / k.item_bytes;  // rows that hold the scales
  need(kv.dim >= 1 && kv.dim <= kMaxHeadDim && kv.heads >= 1 && kv.block_size >= 1, op,
       "a KV cache of ", kv.heads, " heads, head_dim ", kv.dim, ", block_size ", kv.block_size, "; head_dim may be at most ", kMaxHeadDim);
  need(!is_integer(kv.type) || (kv.dim % 2 == 0 && kv.block_size % 2 == 0), op,
       "a KV cache of integers needs an even head_dim and block_size, not ", kv.dim, " and ", kv.block_size);
  return kv;
}

}  // namespace trireme::cpu
