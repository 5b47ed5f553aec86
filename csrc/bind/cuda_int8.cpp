// Products of int8 in models._cuda. models/cuda/ops.py gives them their names and defaults.
#include <pybind11/pybind11.h>

#include "bind/cuda_views.h"
#include "cuda/gemm/int8.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cuda;

namespace {

Int8Scaling read_scaling(const char* op, const TensorView& x_scale, const TensorView& w_scale, const TensorView& bias, const TensorView& out, int64_t m,
                         int64_t n) {
  operand(op, "x_scale", x_scale).is(DType::f32).holds(m);
  operand(op, "scale", w_scale).is(DType::f32).holds(n);
  operand(op, "out", out).is(kHalves).rows(m, n);
  if (bias.is_given) operand(op, "bias", bias).is(out.dtype).dense({n});
  return {x_scale.as<const float>(), w_scale.as<const float>(), bias.data, out.data, out.stride[0], to_int(m), to_int(n), to_type(out)};
}

}  // namespace

void bind_int8(py::module_& m) {
  m.def("skinny_int8", [](const TensorView& x, const TensorView& x_scale, const TensorView& w, const TensorView& scale, const TensorView& out,
                          const TensorView& bias, int ways, StreamAddress stream) {
    constexpr const char* op = "skinny_int8";
    operand(op, "weight", w).is(DType::i8).dense({kAny, kAny}).aligned(kPackBytes);
    operand(op, "x", x).is(DType::i8).rows(kAny, w.shape[1]).aligned(kPackBytes);
    skinny_int8({x.as<const int8_t>(), x.stride[0], w.as<const int8_t>(), to_int(w.shape[1]),
                 read_scaling(op, x_scale, scale, bias, out, x.shape[0], w.shape[0]), ways}, to_stream(stream));
  });
  m.def("scale_int8", [](const TensorView& sums, const TensorView& x_scale, const TensorView& scale, const TensorView& out, const TensorView& bias,
                         StreamAddress stream) {
    constexpr const char* op = "scale_int8";
    operand(op, "sums", sums).is(DType::i32).dense({kAny, kAny}).aligned(kPackBytes);
    scale_int8(sums.as<const int32_t>(), read_scaling(op, x_scale, scale, bias, out, sums.shape[0], sums.shape[1]), to_stream(stream));
  });
}
