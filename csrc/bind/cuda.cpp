// The extension module models._cuda: CUDA kernels of tensors. Each function checks its operands and raises ValueError where one does
// not fit; models/cuda/ops.py gives them their names and defaults.
#include <pybind11/pybind11.h>

#include "bind/cuda_views.h"
#include "cuda/ops.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cuda;

void bind_peers(py::module_& m);
void bind_products(py::module_& m);
void bind_grouped(py::module_& m);
void bind_int8(py::module_& m);
void bind_experts(py::module_& m);

namespace {

PagedCache make_cache(const TensorView& k, const TensorView& v, float k_scale, float v_scale) {
  constexpr const char* op = "PagedCache";
  operand(op, "k", k).is({DType::f32, DType::f16, DType::bf16, DType::fp8}).dense({kAny, kAny, kAny, kAny}).aligned(kPackBytes);
  operand(op, "v", v).is(k.dtype).dense({k.shape[0], k.shape[1], k.shape[2], k.shape[3]}).aligned(kPackBytes);
  return {k.data, v.data, to_type(k), k_scale, v_scale, to_int(k.shape[1]), to_int(k.shape[3]), to_int(k.shape[2])};
}

// ---- norms

NormArgs read_rounding(const char* op, const TensorView& x, const TensorView& out, const TensorView& scale) {
  const int64_t tokens = x.shape[0], hidden = x.shape[1];
  NormArgs args{};
  operand(op, "x", x).is(kFloats).rows(kAny, kAny).rows_aligned(kPackBytes);
  if (scale.is_given) {
    operand(op, "out", out).is({DType::fp8, DType::i8}).rows(tokens, hidden).rows_aligned(kPackBytes / static_cast<int>(size_of(x.dtype)));
    operand(op, "scale", scale).is(DType::f32).holds(tokens);
  } else {
    operand(op, "out", out).is(x.dtype).rows(tokens, hidden).rows_aligned(kPackBytes);
  }
  args.x = x.data;
  args.x_stride = x.stride[0];
  args.out = out.data;
  args.out_stride = out.stride[0];
  args.tokens = to_int(tokens);
  args.hidden = to_int(hidden);
  args.type = to_type(x);
  args.scale = scale.as<float>();
  args.narrow = to_type(out);
  return args;
}

using NormOp = void (*)(const NormArgs&, Stream);

auto norm(const char* op, NormOp run) {
  return [op, run](const TensorView& x, const TensorView& weight, const TensorView& bias, float eps, const TensorView& out, const TensorView& residual,
                   float weight_offset, const TensorView& scale, const ScaleViews& scales, StreamAddress stream) {
    NormArgs args = read_rounding(op, x, out, scale);
    const int64_t tokens = x.shape[0], hidden = x.shape[1];
    operand(op, "weight", weight).is(x.dtype).dense({hidden}).aligned(kPackBytes);
    if (bias.is_given) operand(op, "bias", bias).is(x.dtype).dense({hidden}).aligned(kPackBytes);
    if (residual.is_given) operand(op, "residual", residual).is(x.dtype).rows(tokens, hidden).rows_aligned(kPackBytes);
    args.x_scales = to_scales(op, scales, tokens, hidden);
    args.residual = residual.data;
    args.residual_stride = residual.stride[0];
    args.weight = weight.data;
    args.eps = eps;
    args.weight_offset = weight_offset;
    args.bias = bias.data;
    run(args, to_stream(stream));
  };
}

void bind_norms(py::module_& m) {
  m.def("rms_norm", norm("rms_norm", &rms_norm));
  m.def("layer_norm", norm("layer_norm", &layer_norm));
  m.def("quantize_rows",
        [](const TensorView& x, const TensorView& out, const TensorView& scale, const TensorView& largest, StreamAddress stream) {
          constexpr const char* op = "quantize_rows";
          operand(op, "scale", scale).is(DType::f32);
          NormArgs args = read_rounding(op, x, out, scale);
          args.largest = optional_vector<const float>(op, "largest", largest, DType::f32, x.shape[0]);
          quantize_rows(args, to_stream(stream));
        });
}

// ---- rotary embedding and attention

void call_rotary(const TensorView& qkv, int q_heads, const PagedCache& cache, const TensorView& cos_sin, const TensorView& positions,
                 const TensorView& slots, const TensorView& q_norm, const TensorView& k_norm, float eps, const ScaleViews& scales,
                 StreamAddress stream) {
  constexpr const char* op = "rotary_and_cache";
  const int64_t tokens = qkv.shape[0], q_width = int64_t{q_heads} * cache.dim, kv_width = int64_t{cache.heads} * cache.dim;
  need(q_heads > 0, op, "q_heads must be positive");
  operand(op, "qkv", qkv).is(kFloats).rows(kAny, q_width + 2 * kv_width);
  operand(op, "cos_sin", cos_sin).is(DType::f32).rows(kAny, kAny);
  operand(op, "positions", positions).is(DType::i32).holds(tokens);
  operand(op, "slots", slots).is(DType::i32).holds(tokens);
  if (q_norm.is_given) operand(op, "q_norm", q_norm).is(qkv.dtype).dense({cache.dim});
  if (k_norm.is_given) operand(op, "k_norm", k_norm).is(qkv.dtype).dense({cache.dim});
  char* q = qkv.as<char>();
  RotaryArgs args{};
  args.q = q;
  args.k = q + q_width * size_of(qkv.dtype);
  args.v = q + (q_width + kv_width) * size_of(qkv.dtype);
  args.q_stride = args.k_stride = args.v_stride = qkv.stride[0];
  args.type = to_type(qkv);
  args.cos_sin = cos_sin.as<const float>();
  args.cos_sin_stride = cos_sin.stride[0];
  args.positions = positions.as<const int32_t>();
  args.slots = slots.as<const int32_t>();
  args.q_norm = q_norm.data;
  args.k_norm = k_norm.data;
  args.scales = to_scales(op, scales, tokens, q_width + 2 * kv_width);
  args.tokens = to_int(tokens);
  args.q_heads = q_heads;
  args.rotary = to_int(cos_sin.shape[1]);
  args.eps = eps;
  args.cache = cache;
  rotary_and_cache(args, to_stream(stream));
}

void call_decode(const TensorView& q, int q_heads, const PagedCache& cache, const TensorView& block_table, const TensorView& context_len, float scale,
                 const TensorView& out, int window, float softcap, const TensorView& sinks, int splits, const TensorView& scratch,
                 const TensorView& largest, StreamAddress stream) {
  constexpr const char* op = "decode_attention";
  need(q_heads > 0 && q_heads % cache.heads == 0, op,
       q_heads, " query heads are no multiple of the cache's ", cache.heads);
  need(splits > 0, op, "splits must be positive");
  const int64_t rows = block_table.shape[0], width = int64_t{q_heads} * cache.dim;
  operand(op, "block_table", block_table).is(DType::i32).rows(kAny, kAny);
  operand(op, "context_len", context_len).is(DType::i32).holds(rows);
  const Operand queries = operand(op, "q", q), results = operand(op, "out", out);
  queries.is(kHalves).rows(rows, kAny, true);
  results.is(q.dtype).rows(rows, kAny, true);
  if (q.shape[1] < width) queries.fail("at least " + std::to_string(width) + " wide");
  if (out.shape[1] < width) results.fail("at least " + std::to_string(width) + " wide");
  if (sinks.is_given) operand(op, "sinks", sinks).is(DType::f32).dense({q_heads});
  if (splits > 1) operand(op, "scratch", scratch).is(DType::f32).holds(decode_scratch_floats(to_int(rows), q_heads, cache.dim, splits));
  DecodeArgs args{};
  args.q = q.data;
  args.q_stride = q.stride[0];
  args.out = out.data;
  args.out_stride = out.stride[0];
  args.type = to_type(q);
  args.block_table = block_table.as<const int32_t>();
  args.table_stride = to_int(block_table.stride[0]);
  args.context_len = context_len.as<const int32_t>();
  args.rows = to_int(rows);
  args.q_heads = q_heads;
  args.scale = scale;
  args.window = window;
  args.softcap = softcap;
  args.sinks = sinks.as<const float>();
  args.cache = cache;
  args.splits = splits;
  args.partial = scratch.as<float>();
  args.largest = optional_vector<float>(op, "largest", largest, DType::f32, rows);
  decode_attention(args, to_stream(stream));
}

// ---- activations

using GatedOp = void (*)(const GatedArgs&, Stream);

auto act(const char* op, GatedOp run, int halves) {
  return [op, run, halves](const TensorView& x, const TensorView& out, int gate, const ScaleViews& scales, const TensorView& largest,
                           StreamAddress stream) {
    const int64_t tokens = out.shape[0], width = out.shape[1];
    operand(op, "out", out).is(kFloats).rows(kAny, kAny).rows_aligned(kPackBytes);
    operand(op, "x", x).is(out.dtype).rows(tokens, halves * width).rows_aligned(kPackBytes);
    run({x.data, x.stride[0], to_scales(op, scales, tokens, halves * width), out.data, out.stride[0], to_int(tokens), to_int(width),
         static_cast<Gate>(gate), to_type(x), optional_vector<float>(op, "largest", largest, DType::f32, tokens)},
        to_stream(stream));
  };
}

// ---- embedding, blocks, sampling

void call_gather(const TensorView& table, const TensorView& ids, const TensorView& out, int first, int count, float scale, StreamAddress stream) {
  constexpr const char* op = "gather_rows";
  operand(op, "table", table).is(kFloats).dense({kAny, kAny}).aligned(kPackBytes);
  operand(op, "out", out).is(table.dtype).dense({kAny, table.shape[1]}).aligned(kPackBytes);
  operand(op, "ids", ids).is(DType::i32).holds(out.shape[0]);
  need(count <= table.shape[0], op, count, " rows of a table of ", table.shape[0]);
  gather_rows(table.data, ids.as<const int32_t>(), out.data, to_int(out.shape[0]), to_int(out.shape[1]), first,
              count < 0 ? to_int(table.shape[0]) : count, scale, to_type(table), to_stream(stream));
}

void call_copy_blocks(const TensorView& cache, const TensorView& pairs, StreamAddress stream) {
  constexpr const char* op = "copy_blocks";
  const Operand blocks = operand(op, "cache", cache);
  if (cache.rank < 1 || cache.dtype == DType::other) blocks.fail("blocks of a type of the kernels");
  blocks.holds(0).aligned(kPackBytes);
  operand(op, "pairs", pairs).is(DType::i32).dense({kAny, 2});
  if (cache.numel() == 0) return;
  copy_blocks(cache.data, pairs.as<const int32_t>(), to_int(pairs.shape[0]), cache.numel() / cache.shape[0] * size_of(cache.dtype), to_stream(stream));
}

void call_sample(const TensorView& logits, const TensorView& jobs, const TensorView& positions, const TensorView& tokens, const TensorView& slots,
                 const TensorView& logprobs, StreamAddress stream) {
  constexpr const char* op = "sample_rows";
  constexpr int64_t job_bytes = sizeof(SampleJob), logprob_words = sizeof(Logprobs) / sizeof(int32_t);
  const int64_t rows = logits.shape[0];
  operand(op, "logits", logits).is(kFloats).rows(kAny, kAny);
  operand(op, "jobs", jobs).is(DType::u8).holds(slots.is_given ? job_bytes : rows * job_bytes).aligned(alignof(SampleJob));
  operand(op, "positions", positions).is(DType::i32).holds(rows);
  operand(op, "tokens", tokens).is(DType::i32).holds(rows);
  const auto* slot = optional_vector<const int32_t>(op, "slots", slots, DType::i32, rows);
  auto* kept = optional_vector<Logprobs>(op, "logprobs", logprobs, DType::i32, rows * logprob_words);
  sample_rows({logits.data, logits.stride[0], to_type(logits), to_int(rows), to_int(logits.shape[1]), jobs.as<const SampleJob>(), slot,
               positions.as<const int32_t>(), tokens.as<int32_t>(), kept}, to_stream(stream));
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "Native CUDA kernels of Trireme.";
  py::class_<PagedCache>(m, "PagedCache", "Where a layer's keys and values lie; they must outlive it.")
      .def(py::init(&make_cache), py::arg("k"), py::arg("v"), py::arg("k_scale"), py::arg("v_scale"));
  m.attr("SAMPLE_JOB_BYTES") = sizeof(SampleJob);
  m.attr("LOGPROBS_BYTES") = sizeof(Logprobs);
  bind_norms(m);
  m.def("rotary_and_cache", &call_rotary);
  m.def("decode_attention", &call_decode);
  m.def("decode_scratch_floats", &decode_scratch_floats);
  m.def("gated_activation", act("gated_activation", &gated_activation, 2));
  m.def("activation", act("activation", &activation, 1));
  m.def("gather_rows", &call_gather);
  m.def("copy_blocks", &call_copy_blocks);
  m.def("sample_rows", &call_sample);
  bind_peers(m);
  bind_products(m);
  bind_grouped(m);
  bind_int8(m);
  bind_experts(m);
}
