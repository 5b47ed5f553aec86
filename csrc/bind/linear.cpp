// Bindings of cpu/linear/linear.h. models/weights/packed.py and models/cpu/packed_ops.py give them their names and defaults.
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "bind/cpu_views.h"
#include "cpu/linear/linear.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cpu;

namespace {

// Short calls keep the interpreter lock: giving it away and queueing for it again costs more than they take.
constexpr int64_t kReleaseGilWork = int64_t{8} << 20;  // multiply-adds

WeightKind to_kind(const char* op, int kind, int64_t n, int64_t k) {
  const auto to = static_cast<WeightKind>(kind);
  const bool is_known = kind >= 0 && kind < kNumWeightKinds && n >= 0 && k >= 1;
  const bool fits = is_known && (to == WeightKind::int8 ? k <= kMaxInt8Length : k % block_form(to).raw_values == 0);
  need(fits, op, "kind ", kind, ", n ", n, ", k ", k);
  return to;
}

std::unique_ptr<PackedWeight> call_pack(int kind, const TensorView& raw, int n, int k) {
  constexpr const char* op = "pack_weight";
  const WeightKind to = to_kind(op, kind, n, k);
  operand(op, "raw", raw).is(DType::u8).dense({n * static_cast<int64_t>(raw_row_bytes(to, k))});
  py::gil_scoped_release release;
  return pack_weight(to, raw.as<const uint8_t>(), n, k);
}

void call_quantize(int kind, const TensorView& values, const TensorView& raw) {
  constexpr const char* op = "quantize_weight";
  const int64_t n = values.shape[0], k = values.shape[1];
  operand(op, "values", values).is(DType::f32).dense({kAny, kAny});
  const WeightKind to = to_kind(op, kind, n, k);
  need(to == WeightKind::q8_0 || to == WeightKind::q4_0 || to == WeightKind::int8, op, "nothing is rounded to kind ", kind);
  operand(op, "raw", raw).is(DType::u8).dense({n, static_cast<int64_t>(raw_row_bytes(to, to_int(k)))});
  py::gil_scoped_release release;
  quantize_weight(to, values.as<const float>(), to_int(n), to_int(k), raw.as<uint8_t>());
}

void call_linear(const PackedWeight& weight, const TensorView& x, const TensorView& out, const TensorView& bias, bool accumulate) {
  constexpr const char* op = "linear";
  operand(op, "x", x).is(DType::f32).rows(kAny, weight.k);
  operand(op, "out", out).is(DType::f32).rows(x.shape[0], weight.n);
  const LinearArgs args{x.as<const float>(), x.stride[0], to_int(x.shape[0]), out.as<float>(), out.stride[0],
                        optional_floats(op, "bias", bias, weight.n), accumulate};
  std::optional<py::gil_scoped_release> release;
  if (int64_t{weight.n} * weight.k * args.m >= kReleaseGilWork) release.emplace();
  linear(weight, args);
}

void call_gather(const PackedWeight& weight, const TensorView& ids, const TensorView& out) {
  constexpr const char* op = "gather_rows";
  const int64_t count = ids.shape[0];
  const int32_t* rows = int32_vector(op, "ids", ids, kAny);
  operand(op, "out", out).is(DType::f32).rows(count, weight.k);
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= weight.n) {
      throw py::index_error("row " + std::to_string(rows[i]) + " of a matrix of " + std::to_string(weight.n) + " rows");
    }
  }
  gather_rows(weight, rows, to_int(count), out.as<float>(), out.stride[0]);
}

}  // namespace

void bind_linear(py::module_& m) {
  using py::arg;
  py::class_<PackedWeight>(m, "PackedWeight").def_property_readonly("nbytes", &PackedWeight::nbytes);
  m.def("pack_weight", &call_pack, arg("kind"), arg("raw"), arg("n"), arg("k"));
  m.def("quantize_weight", &call_quantize, arg("kind"), arg("values"), arg("raw"));
  m.def("linear", &call_linear, arg("weight"), arg("x"), arg("out"), arg("bias"), arg("accumulate"));
  m.def("gather_rows", &call_gather, arg("weight"), arg("ids"), arg("out"));
}
