// Views of tensors on a GPU, and how the bindings of models._cuda check and pass them on. Checks are made before a launch, on the host:
// they neither wait nor allocate, so that a call can be captured in a graph.
#pragma once

#include <cstdint>

#include "bind/tensor_view.h"
#include "cuda/ops.h"

namespace trireme::cuda {

using StreamAddress = std::uintptr_t;  // as torch gives it

inline Stream to_stream(StreamAddress address) { return reinterpret_cast<Stream>(address); }

inline Operand operand(const char* op, const char* name, const TensorView& view) { return {op, name, view, Device::cuda}; }

// The kernels' codes are the first of the views' types.
static_assert(static_cast<int>(DType::f32) == static_cast<int>(Type::f32) && static_cast<int>(DType::f16) == static_cast<int>(Type::f16) &&
              static_cast<int>(DType::bf16) == static_cast<int>(Type::bf16) && static_cast<int>(DType::fp8) == static_cast<int>(Type::fp8) &&
              static_cast<int>(DType::i8) == static_cast<int>(Type::int8));
inline Type to_type(const TensorView& view) { return static_cast<Type>(view.dtype); }

constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::f16, DType::bf16};
constexpr std::initializer_list<DType> kHalves = {DType::f16, DType::bf16};
constexpr int kPackBytes = 16;  // what a thread loads or stores at once

// None, or the scales of rows and of columns.
struct ScaleViews {
  TensorView rows, columns;
};

// Of an operand of `count` rows and `width` columns.
inline Scales to_scales(const char* op, const ScaleViews& views, int64_t count, int64_t width) {
  if (!views.rows.is_given) return {nullptr, nullptr};
  operand(op, "scales.rows", views.rows).is(DType::f32).holds(count);
  operand(op, "scales.columns", views.columns).is(DType::f32).holds(width);
  return {views.rows.as<const float>(), views.columns.as<const float>()};
}

// Where an optional vector lies, without gaps and of at least `count` values: null for none.
template <class T>
T* optional_vector(const char* op, const char* name, const TensorView& view, DType type, int64_t count) {
  if (!view.is_given) return nullptr;
  operand(op, name, view).is(type).holds(count);
  return view.as<T>();
}

}  // namespace trireme::cuda

template <>
struct pybind11::detail::type_caster<trireme::cuda::ScaleViews> {
  PYBIND11_TYPE_CASTER(trireme::cuda::ScaleViews, const_name("tuple[Tensor, Tensor] | None"));
  bool load(handle source, bool) {
    if (source.is_none()) return true;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 2) return false;
    value.rows = trireme::view_of(PyTuple_GET_ITEM(source.ptr(), 0));
    value.columns = trireme::view_of(PyTuple_GET_ITEM(source.ptr(), 1));
    return true;
  }
};
