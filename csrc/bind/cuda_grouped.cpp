// Products with grouped weights in models._cuda. models/cuda_grouped.py checks shapes and dtypes.
#include <pybind11/pybind11.h>

#include "bind/address.h"
#include "cuda/gemm/grouped.h"

namespace py = pybind11;
using namespace trireme::cuda;

namespace {

template <void (*Op)(const GroupedArgs&, Stream)>
void call(Address x, int64_t x_stride, Address w, Address groups, int64_t group_stride, int group, Address out, int64_t out_stride, Address bias,
          int rows, int n, int k, int type, Address stream) {
  GroupedArgs args{};
  args.product.x = at(x);
  args.product.x_stride = x_stride;
  args.product.w = at(w);
  args.product.out = at(out);
  args.product.out_stride = out_stride;
  args.product.bias = at(bias);
  args.product.m = rows;
  args.product.n = n;
  args.product.k = k;
  args.product.type = static_cast<Type>(type);
  args.groups = at(groups);
  args.group_stride = group_stride;
  args.group = group;
  Op(args, at(stream));
}

}  // namespace

void bind_grouped(py::module_& m) {
  m.def("skinny_w4", &call<skinny_w4>);
  m.def("expand_w4", &call<expand_w4>);
  m.def("skinny_fp8_blocks", &call<skinny_fp8_blocks>);
  m.def("expand_fp8_blocks", &call<expand_fp8_blocks>);
}
