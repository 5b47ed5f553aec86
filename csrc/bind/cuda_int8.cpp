// Products of int8 in models._cuda. models/cuda/ops.py checks shapes and dtypes.
#include <pybind11/pybind11.h>

#include "bind/address.h"
#include "cuda/gemm/int8.h"

namespace py = pybind11;
using namespace trireme::cuda;

namespace {

Int8Scaling scaling_of(Address x_scale, Address w_scale, Address bias, Address out, int64_t out_stride, int rows, int n, int type) {
  return {at<const float>(x_scale), at<const float>(w_scale), at<const void>(bias), at<void>(out), out_stride, rows, n, static_cast<Type>(type)};
}

}  // namespace

void bind_int8(py::module_& m) {
  m.def("skinny_int8", [](Address x, int64_t x_stride, Address w, int k, Address x_scale, Address w_scale, Address bias, Address out,
                          int64_t out_stride, int rows, int n, int type, int ways, Address stream) {
    skinny_int8({at<const int8_t>(x), x_stride, at<const int8_t>(w), k, scaling_of(x_scale, w_scale, bias, out, out_stride, rows, n, type), ways},
                at<void>(stream));
  });
  m.def("scale_int8", [](Address sums, Address x_scale, Address w_scale, Address bias, Address out, int64_t out_stride, int rows, int n, int type,
                         Address stream) {
    scale_int8(at<const int32_t>(sums), scaling_of(x_scale, w_scale, bias, out, out_stride, rows, n, type), at<void>(stream));
  });
}
