// Products with dense, float8 and block weights in models._cuda. models/cuda/ops.py gives them their names and defaults.
#include <pybind11/pybind11.h>

#include "bind/cuda_views.h"
#include "cuda/ops.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cuda;

namespace {

constexpr int64_t kSuperValues = 256, kQ4KBytes = 144;  // of a super-block

// x [M, K], out [M, N] and bias [N], of one type of 16 bits.
SkinnyArgs read_product(const char* op, const TensorView& x, const TensorView& w, const TensorView& out, const TensorView& bias, int64_t k) {
  const int64_t n = w.shape[0];
  operand(op, "out", out).is(kHalves).rows(kAny, n);
  operand(op, "x", x).is(out.dtype).rows(out.shape[0], k);
  if (bias.is_given) operand(op, "bias", bias).is(out.dtype).dense({n});
  SkinnyArgs args{};
  args.x = x.data;
  args.x_stride = x.stride[0];
  args.w = w.data;
  args.out = out.data;
  args.out_stride = out.stride[0];
  args.bias = bias.data;
  args.m = to_int(out.shape[0]);
  args.n = to_int(n);
  args.k = to_int(k);
  args.type = to_type(out);
  return args;
}

// The inputs of a weight of super-blocks, uint8 [N, K / 256 * bytes].
int64_t inputs_of_blocks(const char* op, const TensorView& w, int64_t bytes) {
  const Operand weight = operand(op, "weight", w);
  weight.is(DType::u8).dense({kAny, kAny}).aligned(kPackBytes);
  if (w.shape[1] % bytes != 0) weight.fail("rows of blocks of " + std::to_string(bytes) + " bytes");
  return w.shape[1] / bytes * kSuperValues;
}

// How many super-blocks are to become as many values as `out` has room for.
int64_t count_blocks(const char* op, const TensorView& blocks, const TensorView& out, int64_t bytes) {
  const Operand from = operand(op, "blocks", blocks);
  from.is(DType::u8).holds(0).aligned(kPackBytes);
  if (blocks.numel() % bytes != 0) from.fail("whole blocks of " + std::to_string(bytes) + " bytes");
  const int64_t count = blocks.numel() / bytes;
  operand(op, "out", out).is(kHalves).holds(count * kSuperValues).aligned(kPackBytes);
  return count;
}

void call_skinny(const TensorView& x, const TensorView& w, const TensorView& out, const TensorView& bias, const TensorView& scale, int ways,
                 StreamAddress stream) {
  constexpr const char* op = "skinny_linear";
  int64_t k = w.shape[1];
  Weight weight = Weight::dense;
  if (w.dtype == DType::u8) {
    weight = Weight::q4_k;
    k = inputs_of_blocks(op, w, kQ4KBytes);
  } else {
    operand(op, "weight", w).is({DType::fp8, out.dtype}).dense({kAny, kAny}).aligned(kPackBytes);
    if (w.dtype == DType::fp8) weight = Weight::fp8;
  }
  SkinnyArgs args = read_product(op, x, w, out, bias, k);
  if (scale.is_given) {
    const Operand factors = operand(op, "scale", scale);
    factors.is(DType::f32).holds(1);
    if (scale.numel() != 1 && scale.numel() != w.shape[0]) factors.fail("1 or " + std::to_string(w.shape[0]) + " values");
  }
  args.scale = scale.as<const float>();
  args.scale_step = scale.is_given && scale.numel() > 1;
  args.weight = weight;
  args.ways = ways;
  skinny_linear(args, to_stream(stream));
}

void call_fp8(const TensorView& x, const TensorView& w, const TensorView& scale, const TensorView& out, const TensorView& bias, StreamAddress stream) {
  constexpr const char* op = "fp8_linear";
  operand(op, "weight", w).is(DType::fp8).dense({kAny, kAny}).aligned(kPackBytes);
  const SkinnyArgs product = read_product(op, x, w, out, bias, w.shape[1]);
  operand(op, "x", x).rows_aligned(kPackBytes);
  operand(op, "scale", scale).is(DType::f32).holds(w.shape[0]);
  fp8_linear({product.x, product.x_stride, product.w, scale.as<const float>(), product.bias, product.out, product.out_stride, product.m, product.n,
              product.k, product.type}, to_stream(stream));
}

void call_block_linear(const TensorView& x, const TensorView& w, const TensorView& out, const TensorView& bias, int blocks, StreamAddress stream) {
  constexpr const char* op = "block_linear";
  const auto kind = static_cast<Blocks>(blocks);
  block_linear(read_product(op, x, w, out, bias, inputs_of_blocks(op, w, block_bytes(kind))), kind, to_stream(stream));
}

}  // namespace

void bind_products(py::module_& m) {
  m.def("skinny_linear", &call_skinny);
  m.def("skinny_max_rows", &skinny_max_rows);
  m.def("fp8_linear", &call_fp8);
  m.def("fp8_linear_rows", &fp8_linear_rows);
  m.def("expand_q4_k", [](const TensorView& blocks, const TensorView& out, StreamAddress stream) {
    const int64_t count = count_blocks("expand_q4_k", blocks, out, kQ4KBytes);
    expand_q4_k(blocks.data, out.data, count, to_type(out), to_stream(stream));
  });
  m.def("block_linear", &call_block_linear);
  m.def("block_linear_rows", [](int blocks, int n, int k) { return block_linear_rows(static_cast<Blocks>(blocks), n, k); });
  m.def("expand_blocks", [](const TensorView& blocks, const TensorView& out, int kind, StreamAddress stream) {
    const auto form = static_cast<Blocks>(kind);
    const int64_t count = count_blocks("expand_blocks", blocks, out, block_bytes(form));
    expand_blocks(blocks.data, out.data, count, form, to_type(out), to_stream(stream));
  });
  m.def("block_bytes", [](int blocks) { return block_bytes(static_cast<Blocks>(blocks)); });
}
