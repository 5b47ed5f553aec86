// How objects of Python become views; see tensor_view.h.
#include "bind/tensor_view.h"

namespace py = pybind11;

namespace trireme {
namespace {

// By DType, as torch and numpy call them.
constexpr const char* kTypeNames[] = {"float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8",
                                      "int16",   "uint16",  "int32",    "int64",         "another type"};

// ---- DLPack: what is used of its header, version 1 (https://github.com/dmlc/dlpack)

struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};
using ReadTensor = int (*)(void* object, DLTensor* out);

struct ExchangeTable {
  uint32_t major, minor;
  void* older;
  void* others[3];
  ReadTensor read_tensor;  // null where the class does not offer it
  void* current_stream;
};
constexpr uint32_t kMajor = 1;

// The function of a class, null for one without. Classes are few and live as long as the process, so they are remembered; callers
// hold the interpreter lock.
ReadTensor find_reader(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type;
    ReadTensor read;
  };
  static Known known[8];
  static int count = 0;
  for (int i = 0; i < count; ++i) {
    if (known[i].type == type) return known[i].read;
  }
  ReadTensor read = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr) {
    const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (table != nullptr && table->major == kMajor) read = table->read_tensor;
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  if (count < 8) {
    Py_INCREF(type);
    known[count++] = {type, read};
  }
  return read;
}

DType type_of(uint8_t code, uint8_t bits) {
  enum : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kFloat8E4m3fn = 10 };
  switch (code) {
    case kInt: return bits == 8 ? DType::i8 : bits == 16 ? DType::i16 : bits == 32 ? DType::i32 : bits == 64 ? DType::i64 : DType::other;
    case kUInt: return bits == 8 ? DType::u8 : bits == 16 ? DType::u16 : DType::other;
    case kFloat: return bits == 32 ? DType::f32 : bits == 16 ? DType::f16 : DType::other;
    case kBfloat: return bits == 16 ? DType::bf16 : DType::other;
    case kFloat8E4m3fn: return bits == 8 ? DType::fp8 : DType::other;
    default: return DType::other;
  }
}

void check_rank(int64_t rank) {
  if (rank > kMaxRank) throw std::invalid_argument("a tensor of " + std::to_string(rank) + " dimensions; kernels take up to " + std::to_string(kMaxRank));
}

TensorView read_exchanged(const DLTensor& found) {
  check_rank(found.ndim);
  TensorView view;
  view.data = static_cast<char*>(found.data) + found.byte_offset;
  view.rank = found.ndim;
  for (int i = 0; i < found.ndim; ++i) {
    view.shape[i] = found.shape[i];
    view.stride[i] = found.strides[i];
  }
  view.item_bytes = (found.bits * found.lanes + 7) / 8;
  view.dtype = found.lanes == 1 ? type_of(found.code, found.bits) : DType::other;
  view.device = found.device_type == 1 || found.device_type == 3 ? Device::cpu : found.device_type == 2 ? Device::cuda : Device::other;
  view.is_given = true;
  return view;
}

// ---- numpy

TensorView read_buffer(PyObject* value) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(value, &buffer, PyBUF_FORMAT | PyBUF_STRIDES) != 0) throw py::error_already_set();
  TensorView view;
  view.data = buffer.buf;
  view.rank = buffer.ndim <= kMaxRank ? buffer.ndim : 0;
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = buffer.shape[i];
    view.stride[i] = buffer.itemsize ? buffer.strides[i] / buffer.itemsize : 0;
  }
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  const auto bits = static_cast<uint8_t>(8 * buffer.itemsize);
  if (format[0] != '\0' && format[1] == '\0') {
    switch (format[0]) {
      case 'f':
      case 'e': view.dtype = type_of(2, bits); break;
      case 'b':
      case 'h':
      case 'i':
      case 'l':
      case 'q': view.dtype = type_of(0, bits); break;
      case 'B':
      case 'H': view.dtype = type_of(1, bits); break;
      default: break;
    }
  }
  view.item_bytes = static_cast<int>(buffer.itemsize);
  view.device = Device::cpu;
  view.is_given = true;
  const int rank = buffer.ndim;
  PyBuffer_Release(&buffer);
  check_rank(rank);
  return view;
}

// ---- classes like torch.Tensor without the table

DType type_named(const std::string& name) {
  for (int i = 0; i < static_cast<int>(DType::other); ++i) {
    if (name == std::string("torch.") + kTypeNames[i]) return static_cast<DType>(i);
  }
  return DType::other;
}

TensorView read_attributes(py::handle value) {
  if (!py::hasattr(value, "data_ptr") || !py::hasattr(value, "stride")) {
    throw py::type_error(std::string("a tensor is needed, not ") + Py_TYPE(value.ptr())->tp_name);
  }
  const py::tuple shape(value.attr("shape")), strides(value.attr("stride")());
  check_rank(static_cast<int64_t>(shape.size()));
  TensorView view;
  view.data = reinterpret_cast<void*>(value.attr("data_ptr")().cast<std::uintptr_t>());
  view.rank = static_cast<int>(shape.size());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = shape[i].cast<int64_t>();
    view.stride[i] = strides[i].cast<int64_t>();
  }
  view.item_bytes = value.attr("element_size")().cast<int>();
  view.dtype = type_named(py::str(value.attr("dtype")));
  view.device = value.attr("is_cuda").cast<bool>() ? Device::cuda : value.attr("is_cpu").cast<bool>() ? Device::cpu : Device::other;
  view.is_given = true;
  return view;
}

// ---- texts of errors

const char* name_of(DType type) { return kTypeNames[static_cast<int>(type)]; }

std::string list_of(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + (values[i] == kAny ? std::string("any") : std::to_string(values[i]));
  return text + "]";
}

}  // namespace

TensorView view_of(PyObject* value) {
  if (value == Py_None) return {};
  if (const ReadTensor read = find_reader(Py_TYPE(value))) {
    DLTensor found;
    if (read(value, &found) == 0) return read_exchanged(found);
    PyErr_Clear();  // DLPack has no word for its device or its type; no kernel takes it either, and its check says so
    return read_attributes(value);
  }
  if (PyObject_CheckBuffer(value)) return read_buffer(value);
  return read_attributes(value);
}

void Operand::fail(const std::string& needed) const {
  std::string found = "None";
  if (view_.is_given) {
    found = std::string(name_of(view_.dtype)) + " " + list_of(view_.shape, view_.rank) + " with strides " + list_of(view_.stride, view_.rank);
    if (view_.device != Device::cpu) found += view_.device == Device::cuda ? " on a GPU" : " on another device";
  }
  throw std::invalid_argument(std::string(op_) + ": " + name_ + " is " + found + "; it must be " + needed);
}

void Operand::fail_type(std::initializer_list<DType> types) const {
  std::string names;
  for (const DType type : types) names += (names.empty() ? "" : " or ") + std::string(name_of(type));
  fail(names);
}

void Operand::fail_rows(int64_t m, int64_t n, bool more_rows) const {
  const int64_t shape[] = {m, n};
  fail(list_of(shape, 2) + (more_rows ? " or more rows" : "") + " with the values of a row side by side");
}

void Operand::fail_heads(int64_t t, int64_t h, int64_t d) const {
  const int64_t shape[] = {t, h, d};
  fail(list_of(shape, 3) + " with the heads of a token side by side");
}

void Operand::fail_dense(std::initializer_list<int64_t> shape) const {
  fail(list_of(shape.begin(), static_cast<int>(shape.size())) + " without gaps");
}

}  // namespace trireme
