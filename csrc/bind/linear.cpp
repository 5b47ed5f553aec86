// Bindings of cpu/linear.h. Addresses come as integers; models/cpu/packed_ops.py has checked shapes and dtypes.
#include <pybind11/pybind11.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "cpu/linear/linear.h"

namespace py = pybind11;
using trireme::PackedWeight;

namespace {

// Short calls keep the interpreter lock: giving it away and queueing for it again costs more than they take.
constexpr int64_t kReleaseGilWork = int64_t{8} << 20;  // multiply-adds

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::unique_ptr<PackedWeight> pack(int kind, std::uintptr_t raw, int n, int k) {
  const bool is_too_long = kind == static_cast<int>(trireme::WeightKind::int8) && k > trireme::kMaxInt8Length;
  if (kind < 0 || kind >= trireme::kNumWeightKinds || n < 0 || k < 1 || is_too_long) {
    throw std::invalid_argument("pack_weight: kind " + std::to_string(kind) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
  }
  py::gil_scoped_release release;
  return trireme::pack_weight(static_cast<trireme::WeightKind>(kind), pointer<const uint8_t>(raw), n, k);
}

void quantize(int kind, std::uintptr_t values, int n, int k, std::uintptr_t raw) {
  using trireme::WeightKind;
  const auto to = static_cast<WeightKind>(kind);
  const bool is_block = (to == WeightKind::q8_0 || to == WeightKind::q4_0) && k % trireme::kBlock == 0;
  if ((!is_block && to != WeightKind::int8) || n < 0 || k < 1) {
    throw std::invalid_argument("quantize_weight: kind " + std::to_string(kind) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
  }
  py::gil_scoped_release release;
  trireme::quantize_weight(to, pointer<const float>(values), n, k, pointer<uint8_t>(raw));
}

void linear(const PackedWeight& weight, std::uintptr_t x, std::ptrdiff_t x_stride, int m, std::uintptr_t out,
            std::ptrdiff_t out_stride, std::uintptr_t bias, bool accumulate) {
  const trireme::LinearArgs args{pointer<const float>(x),   x_stride, m, pointer<float>(out), out_stride,
                                 pointer<const float>(bias), accumulate};
  std::optional<py::gil_scoped_release> release;
  if (static_cast<int64_t>(weight.n) * weight.k * m >= kReleaseGilWork) release.emplace();
  trireme::linear(weight, args);
}

void gather_rows(const PackedWeight& weight, std::uintptr_t ids, int count, std::uintptr_t out, std::ptrdiff_t out_stride) {
  const auto* rows = pointer<const int32_t>(ids);
  for (int i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= weight.n) {
      throw py::index_error("row " + std::to_string(rows[i]) + " of a matrix of " + std::to_string(weight.n) + " rows");
    }
  }
  trireme::gather_rows(weight, rows, count, pointer<float>(out), out_stride);
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<PackedWeight>(m, "PackedWeight").def_property_readonly("nbytes", &PackedWeight::nbytes);
  m.def("pack_weight", &pack, py::arg("kind"), py::arg("raw"), py::arg("n"), py::arg("k"));
  m.def("quantize_weight", &quantize, py::arg("kind"), py::arg("values"), py::arg("n"), py::arg("k"), py::arg("raw"));
  m.def("linear", &linear, py::arg("weight"), py::arg("x"), py::arg("x_stride"), py::arg("m"), py::arg("out"),
        py::arg("out_stride"), py::arg("bias"), py::arg("accumulate"));
  m.def("gather_rows", &gather_rows, py::arg("weight"), py::arg("ids"), py::arg("count"), py::arg("out"), py::arg("out_stride"));
}
