// Products with grouped weights in models._cuda. models/cuda/ops.py gives them their names and defaults.
#include <pybind11/pybind11.h>

#include "bind/cuda_views.h"
#include "cuda/gemm/grouped.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cuda;

namespace {

// What a weight is made of: its type, values to a byte, and the type of what a group shares.
struct Form {
  DType weight;
  int values;
  DType group;
};
constexpr Form kW4{DType::u8, 2, DType::i32};
constexpr Form kFp8{DType::fp8, 1, DType::f32};

// A weight [N, K] and its groups [K / group, N].
GroupedArgs read_weight(const char* op, const Form& form, const TensorView& w, const TensorView& groups) {
  operand(op, "weight", w).is(form.weight).dense({kAny, kAny}).aligned(kPackBytes);
  const int64_t n = w.shape[0], k = w.shape[1] * form.values;
  const Operand shared = operand(op, "groups", groups);
  shared.is(form.group).rows(kAny, n);
  if (groups.shape[0] < 1 || k % groups.shape[0] != 0) shared.fail("of rows whose number divides the weight's " + std::to_string(k) + " inputs");
  GroupedArgs args{};
  args.product.w = w.data;
  args.product.n = to_int(n);
  args.product.k = to_int(k);
  args.groups = groups.data;
  args.group_stride = groups.stride[0];
  args.group = to_int(k / groups.shape[0]);
  return args;
}

using GroupedOp = void (*)(const GroupedArgs&, Stream);

auto product(const char* op, GroupedOp run, const Form& form) {
  return [op, run, form](const TensorView& x, const TensorView& w, const TensorView& groups, const TensorView& out, const TensorView& bias,
                         StreamAddress stream) {
    GroupedArgs args = read_weight(op, form, w, groups);
    operand(op, "out", out).is(kHalves).rows(kAny, args.product.n);
    operand(op, "x", x).is(out.dtype).rows(out.shape[0], args.product.k);
    if (bias.is_given) operand(op, "bias", bias).is(out.dtype).dense({args.product.n});
    args.product.x = x.data;
    args.product.x_stride = x.stride[0];
    args.product.out = out.data;
    args.product.out_stride = out.stride[0];
    args.product.bias = bias.data;
    args.product.m = to_int(out.shape[0]);
    args.product.type = to_type(out);
    run(args, to_stream(stream));
  };
}

auto expansion(const char* op, GroupedOp run, const Form& form) {
  return [op, run, form](const TensorView& w, const TensorView& groups, const TensorView& out, StreamAddress stream) {
    GroupedArgs args = read_weight(op, form, w, groups);
    operand(op, "out", out).is(kHalves).dense({args.product.n, args.product.k});
    args.product.out = out.data;
    args.product.out_stride = out.stride[0];
    args.product.type = to_type(out);
    run(args, to_stream(stream));
  };
}

}  // namespace

void bind_grouped(py::module_& m) {
  m.def("skinny_w4", product("skinny_w4", &skinny_w4, kW4));
  m.def("expand_w4", expansion("expand_w4", &expand_w4, kW4));
  m.def("skinny_fp8_blocks", product("skinny_fp8_blocks", &skinny_fp8_blocks, kFp8));
  m.def("expand_fp8_blocks", expansion("expand_fp8_blocks", &expand_fp8_blocks, kFp8));
}
