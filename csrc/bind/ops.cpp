// Bindings of the layer ops. They run several times per layer and token: large calls release the interpreter lock; small ones
// keep it, since getting it back can cost more than the work. models/cpu/ops.py gives them their defaults.
#include <pybind11/pybind11.h>

#include <optional>

#include "bind/cpu_views.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cpu;

namespace {

template <class Args>
void run(void (*op)(const Args&), const Args& args) {
  std::optional<py::gil_scoped_release> release;
  if (is_large(args)) release.emplace();
  op(args);
}

// ---- norms

NormArgs read_norm(const char* op, const TensorView& x, const TensorView& weight, float eps, const TensorView& out) {
  const int64_t tokens = x.shape[0], width = x.shape[1];
  operand(op, "x", x).is(DType::f32).rows(kAny, kAny);
  operand(op, "weight", weight).is(DType::f32).dense({width});
  operand(op, "out", out).is(DType::f32).rows(tokens, width);
  NormArgs args{};
  args.x = x.as<const float>();
  args.x_stride = x.stride[0];
  args.weight = weight.as<const float>();
  args.out = out.as<float>();
  args.out_stride = out.stride[0];
  args.rows = to_int(tokens);
  args.width = to_int(width);
  args.eps = eps;
  return args;
}

void call_rms_norm(const TensorView& x, const TensorView& weight, float eps, const TensorView& out) {
  run(rms_norm, read_norm("rms_norm", x, weight, eps, out));
}

void call_add_rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, float eps, const TensorView& out) {
  constexpr const char* op = "add_rms_norm";
  NormArgs args = read_norm(op, x, weight, eps, out);
  operand(op, "residual", residual).is(DType::f32).rows(x.shape[0], x.shape[1]);
  args.residual = residual.as<float>();
  args.residual_stride = residual.stride[0];
  run(rms_norm, args);
}

// ---- rotary embedding and attention

// Operands of the rotation but q, k and v; `tokens` and `kv` are known.
void read_rotation(const char* op, RopeArgs& args, const TensorView& cos_sin, const TensorView& positions, const TensorView& slots,
                   const TensorView& q_norm, const TensorView& k_norm, float eps) {
  const Operand table = operand(op, "cos_sin", cos_sin);
  table.is(DType::f32).dense({kAny, kAny});
  if (cos_sin.shape[1] > args.kv.dim) table.fail("at most " + std::to_string(args.kv.dim) + " wide");
  args.cos_sin = cos_sin.as<const float>();
  args.rot = to_int(cos_sin.shape[1]);
  args.positions = int32_vector(op, "positions", positions, args.tokens);
  args.slots = int32_vector(op, "slots", slots, args.tokens);
  args.q_norm = optional_floats(op, "q_norm", q_norm, args.kv.dim);
  args.k_norm = optional_floats(op, "k_norm", k_norm, args.kv.dim);
  args.eps = eps;
}

// The sequences of a step, and how they are attended to.
void read_batch(const char* op, AttentionArgs& args, const TensorView& query_start, const TensorView& context_len, const TensorView& block_table,
                float scale, int window, float softcap) {
  need(args.q_heads > 0 && args.q_heads % args.kv.heads == 0, op,
       args.q_heads, " query heads are no multiple of the cache's ", args.kv.heads);
  operand(op, "block_table", block_table).is(DType::i32).rows(kAny, kAny);
  args.block_table = block_table.as<const int32_t>();
  args.rows = to_int(block_table.shape[0]);
  args.table_stride = block_table.stride[0];
  args.query_start = int32_vector(op, "query_start", query_start, block_table.shape[0] + 1);
  args.context_len = int32_vector(op, "context_len", context_len, block_table.shape[0]);
  args.scale = scale;
  args.window = window;
  args.softcap = softcap;
}

void read_out(const char* op, AttentionArgs& args, const TensorView& out, int64_t tokens) {
  operand(op, "out", out).is(DType::f32).rows(tokens, int64_t{args.q_heads} * args.kv.dim);
  args.out = out.as<float>();
  args.out_stride = out.stride[0];
}

void call_rope_and_cache(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cos_sin, const TensorView& positions,
                         const TensorView& slots, const TensorView& k_cache, const TensorView& v_cache, const TensorView& q_norm,
                         const TensorView& k_norm, float eps) {
  constexpr const char* op = "rope_and_cache";
  RopeArgs args{};
  args.kv = to_kv(op, k_cache, v_cache);
  operand(op, "q", q).is(DType::f32).heads(kAny, kAny, args.kv.dim);
  operand(op, "k", k).is(DType::f32).heads(q.shape[0], args.kv.heads, args.kv.dim);
  operand(op, "v", v).is(DType::f32).heads(q.shape[0], args.kv.heads, args.kv.dim);
  args.q = q.as<float>();
  args.q_stride = q.stride[0];
  args.k = k.as<const float>();
  args.k_stride = k.stride[0];
  args.v = v.as<const float>();
  args.v_stride = v.stride[0];
  args.tokens = to_int(q.shape[0]);
  args.q_heads = to_int(q.shape[1]);
  read_rotation(op, args, cos_sin, positions, slots, q_norm, k_norm, eps);
  run(rope_and_cache, args);
}

void call_paged_attention(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache, const TensorView& query_start,
                          const TensorView& context_len, const TensorView& block_table, float scale, int window, float softcap,
                          const TensorView& out) {
  constexpr const char* op = "paged_attention";
  AttentionArgs args{};
  args.kv = to_kv(op, k_cache, v_cache);
  operand(op, "q", q).is(DType::f32).heads(kAny, kAny, args.kv.dim);
  args.q = q.as<const float>();
  args.q_stride = q.stride[0];
  args.q_heads = to_int(q.shape[1]);
  read_batch(op, args, query_start, context_len, block_table, scale, window, softcap);
  read_out(op, args, out, q.shape[0]);
  run(paged_attention, args);
}

struct FusedArgs {
  RopeArgs rope;
  AttentionArgs attention;
};
bool is_large(const FusedArgs& args) { return trireme::is_large(args.rope) || trireme::is_large(args.attention); }
void rope_cache_attention(const FusedArgs& args) {
  rope_and_cache(args.rope);
  paged_attention(args.attention);
}

// q, k and v side by side in the rows of qkv; `kv` is known, the head counts follow from it.
void split_qkv(const char* op, FusedArgs& args, const TensorView& qkv) {
  const KvView& kv = args.rope.kv;
  const Operand fused = operand(op, "qkv", qkv);
  fused.is(DType::f32).rows(kAny, kAny);
  const int64_t kv_width = int64_t{kv.heads} * kv.dim, q_width = qkv.shape[1] - 2 * kv_width;
  if (q_width <= 0 || q_width % kv.dim != 0) {
    fused.fail("of heads of " + std::to_string(kv.dim) + " values, " + std::to_string(2 * kv.heads) + " of them for keys and values");
  }
  args.rope.q = qkv.as<float>();
  args.rope.k = args.rope.q + q_width;
  args.rope.v = args.rope.k + kv_width;
  args.attention.q = args.rope.q;
  args.rope.q_stride = args.rope.k_stride = args.rope.v_stride = args.attention.q_stride = qkv.stride[0];
  args.rope.tokens = to_int(qkv.shape[0]);
  args.rope.q_heads = args.attention.q_heads = to_int(q_width / kv.dim);
}

void call_rope_cache_attention(const TensorView& qkv, const TensorView& k_cache, const TensorView& v_cache, const TensorView& cos_sin,
                               const TensorView& positions, const TensorView& slots, const TensorView& query_start,
                               const TensorView& context_len, const TensorView& block_table, float scale, int window, float softcap,
                               const TensorView& q_norm, const TensorView& k_norm, float eps, const TensorView& out) {
  constexpr const char* op = "rope_cache_attention";
  FusedArgs args{};
  args.rope.kv = args.attention.kv = to_kv(op, k_cache, v_cache);
  split_qkv(op, args, qkv);
  read_rotation(op, args.rope, cos_sin, positions, slots, q_norm, k_norm, eps);
  read_batch(op, args.attention, query_start, context_len, block_table, scale, window, softcap);
  read_out(op, args.attention, out, qkv.shape[0]);
  run(rope_cache_attention, args);
}

// ---- activations

auto gated(const char* op, Activation activation) {
  return [op, activation](const TensorView& gate_up, const TensorView& out) {
    const int64_t tokens = out.shape[0], width = out.shape[1];
    operand(op, "out", out).is(DType::f32).rows(kAny, kAny);
    operand(op, "gate_up", gate_up).is(DType::f32).rows(tokens, 2 * width);
    run(swiglu, SwigluArgs{gate_up.as<const float>(), gate_up.stride[0], out.as<float>(), out.stride[0], to_int(tokens), to_int(width),
                           activation});
  };
}

}  // namespace

void bind_ops(py::module_& m) {
  using py::arg;
  m.def("rms_norm", &call_rms_norm, arg("x"), arg("weight"), arg("eps"), arg("out"));
  m.def("add_rms_norm", &call_add_rms_norm, arg("x"), arg("residual"), arg("weight"), arg("eps"), arg("out"));
  m.def("rope_and_cache", &call_rope_and_cache, arg("q"), arg("k"), arg("v"), arg("cos_sin"), arg("positions"), arg("slots"), arg("k_cache"),
        arg("v_cache"), arg("q_norm"), arg("k_norm"), arg("eps"));
  m.def("paged_attention", &call_paged_attention, arg("q"), arg("k_cache"), arg("v_cache"), arg("query_start"), arg("context_len"),
        arg("block_table"), arg("scale"), arg("window"), arg("softcap"), arg("out"));
  m.def("rope_cache_attention", &call_rope_cache_attention, arg("qkv"), arg("k_cache"), arg("v_cache"), arg("cos_sin"), arg("positions"),
        arg("slots"), arg("query_start"), arg("context_len"), arg("block_table"), arg("scale"), arg("window"), arg("softcap"), arg("q_norm"),
        arg("k_norm"), arg("eps"), arg("out"));
  m.def("swiglu", gated("swiglu", Activation::silu), arg("gate_up"), arg("out"));
  m.def("geglu", gated("geglu", Activation::gelu_tanh), arg("gate_up"), arg("out"));
}
