// Tensors of Python as launchers see them, and the checks on operands. Included by all of bind/; knows no torch header and no kernel.
//
// A view owns nothing: it is valid during the call whose arguments it was read from. Three kinds of objects become one:
//   torch tensors    by the table of functions that their class offers (DLPack 1.3, `__dlpack_c_exchange_api__`): no Python object
//                    is made. A class without the table is asked for its attributes, which is slow.
//   numpy arrays     by the buffer protocol
//   None             a view without a tensor
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace trireme {

enum class DType : uint8_t { f32, f16, bf16, fp8, i8, u8, i16, u16, i32, i64, other };  // fp8: e4m3fn
enum class Device : uint8_t { cpu, cuda, other };

inline constexpr int kMaxRank = 4;

struct TensorView {
  void* data = nullptr;
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};  // in elements
  int rank = 0;
  int item_bytes = 0;
  DType dtype = DType::other;
  Device device = Device::other;
  bool is_given = false;  // false: None

  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[i];
    return count;
  }
  int64_t nbytes() const { return numel() * item_bytes; }
  bool is_contiguous() const {
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && stride[i] != step) return numel() == 0;
      step *= shape[i];
    }
    return true;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

constexpr int64_t size_of(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16: return 2;
    case DType::i64: return 8;
    default: return 1;
  }
}

// Reads `value`. Throws pybind11::type_error for what is no tensor and std::invalid_argument for more than kMaxRank dimensions.
TensorView view_of(PyObject* value);

constexpr int64_t kAny = -1;  // a size that may be anything

inline int to_int(int64_t size) {
  if (size > std::numeric_limits<int>::max()) throw std::invalid_argument("a size of " + std::to_string(size) + " is too large for a kernel");
  return static_cast<int>(size);
}

template <class Part>
std::string text_of(const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    return std::to_string(part);
  } else {
    return part;
  }
}

// Refuses a call where `is_so` is false; the text is put together only then, out of strings and numbers.
template <class... Parts>
void need(bool is_so, const char* op, const Parts&... parts) {
  if (!is_so) throw std::invalid_argument(((std::string(op) + ": ") + ... + text_of(parts)));
}

// One operand under its name. Each check throws std::invalid_argument (ValueError) that names it, what it is and what is needed.
class Operand {
 public:
  Operand(const char* op, const char* name, const TensorView& view, Device device) : op_(op), name_(name), view_(view), device_(device) {}

  const Operand& is(DType type) const {
    if (view_.dtype != type) fail_type({type});
    return *this;
  }
  const Operand& is(std::initializer_list<DType> types) const {
    for (const DType type : types) {
      if (view_.dtype == type) return *this;
    }
    fail_type(types);
  }
  // [m, n] whose rows may lie apart; the values of a row are adjacent. At least m rows with `more_rows`.
  const Operand& rows(int64_t m, int64_t n, bool more_rows = false) const {
    const bool fits = view_.rank == 2 && (m == kAny || view_.shape[0] == m || (more_rows && view_.shape[0] > m)) &&
                      (n == kAny || view_.shape[1] == n);
    if (!fits || (view_.stride[1] != 1 && view_.shape[1] > 1 && view_.shape[0] > 0)) fail_rows(m, n, more_rows);
    return on_device();
  }
  // [t, h, d] whose tokens may lie apart; the heads of a token are adjacent, and so are the values of a head.
  const Operand& heads(int64_t t, int64_t h, int64_t d) const {
    const int64_t sizes[] = {t, h, d};
    bool fits = view_.rank == 3;
    for (int i = 0; fits && i < 3; ++i) fits = sizes[i] == kAny || view_.shape[i] == sizes[i];
    if (fits && view_.numel() > 0) {
      fits = (view_.shape[2] == 1 || view_.stride[2] == 1) && (view_.shape[1] == 1 || view_.stride[1] == view_.shape[2]);
    }
    if (!fits) fail_heads(t, h, d);
    return on_device();
  }
  // Without gaps, of this shape.
  const Operand& dense(std::initializer_list<int64_t> shape) const {
    bool fits = view_.is_given && view_.rank == static_cast<int>(shape.size()) && view_.is_contiguous();
    for (int i = 0; fits && i < view_.rank; ++i) fits = shape.begin()[i] == kAny || shape.begin()[i] == view_.shape[i];
    if (!fits) fail_dense(shape);
    return on_device();
  }
  // Without gaps, at least so many values in any shape.
  const Operand& holds(int64_t count) const {
    if (!view_.is_given || !view_.is_contiguous() || view_.numel() < count) fail("without gaps, of at least " + std::to_string(count) + " values");
    return on_device();
  }
  // Where it begins.
  const Operand& aligned(int bytes) const {
    if (reinterpret_cast<std::uintptr_t>(view_.data) % bytes != 0) fail("at a multiple of " + std::to_string(bytes) + " bytes");
    return *this;
  }
  // Where each row of a matrix begins.
  const Operand& rows_aligned(int bytes) const {
    if (view_.shape[0] > 1 && view_.stride[0] * size_of(view_.dtype) % bytes != 0) fail("with rows that begin at multiples of " + std::to_string(bytes) + " bytes");
    return aligned(bytes);
  }
  [[noreturn]] void fail(const std::string& needed) const;

  const TensorView& view() const { return view_; }

 private:
  const Operand& on_device() const {
    if (view_.device != device_) fail(device_ == Device::cuda ? "on a GPU" : "in the memory of the host");
    return *this;
  }
  [[noreturn]] void fail_type(std::initializer_list<DType> types) const;
  [[noreturn]] void fail_rows(int64_t m, int64_t n, bool more_rows) const;
  [[noreturn]] void fail_heads(int64_t t, int64_t h, int64_t d) const;
  [[noreturn]] void fail_dense(std::initializer_list<int64_t> shape) const;

  const char* op_;
  const char* name_;
  const TensorView& view_;
  Device device_;
};

}  // namespace trireme

// Arguments of bound functions: any object; an unfit one raises, so that no other overload is tried.
template <>
struct pybind11::detail::type_caster<trireme::TensorView> {
  PYBIND11_TYPE_CASTER(trireme::TensorView, const_name("Tensor | None"));
  bool load(handle source, bool) {
    value = trireme::view_of(source.ptr());
    return true;
  }
};
