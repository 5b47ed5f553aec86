// Bindings of the layer ops. They run several times per layer and token, so they are plain C functions that read integers
// (addresses, sizes) from the argument vector: a call costs well under a microsecond. Large calls release the interpreter
// lock; small ones keep it, since getting it back can cost more than the work.
#include <pybind11/pybind11.h>

#include "cpu/elementwise/ops.h"

namespace py = pybind11;

namespace {

using namespace trireme;

// Reads the arguments of one call in order.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t given) : values_(values), given_(given) {}

  // Sets the Python error and returns false when the count is wrong.
  bool expect(const char* name, Py_ssize_t count) const {
    if (given_ == count) return true;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, count, given_);
    return false;
  }
  int64_t integer() { return PyLong_AsLongLong(values_[next_++]); }
  int size() { return static_cast<int>(integer()); }
  float real() { return static_cast<float>(PyFloat_AsDouble(values_[next_++])); }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(integer());
  }

 private:
  PyObject* const* values_;
  Py_ssize_t given_;
  Py_ssize_t next_ = 0;
};

KvView read_kv(Arguments& in) {
  KvView kv;
  kv.k = in.pointer<void>();
  kv.v = in.pointer<void>();
  kv.type = static_cast<KvType>(in.integer());
  kv.heads = in.size();
  kv.dim = in.size();
  kv.block_size = in.size();
  if (kv.dim < 1 || kv.dim > kMaxHeadDim || kv.heads < 1 || kv.block_size < 1) {
    PyErr_Format(PyExc_ValueError, "a KV cache of %d heads, head_dim %d, block_size %d; head_dim may be at most %d",
                 kv.heads, kv.dim, kv.block_size, kMaxHeadDim);
  } else if (is_integer(kv.type) && (kv.dim % 2 != 0 || kv.block_size % 2 != 0)) {
    PyErr_Format(PyExc_ValueError, "a KV cache of integers needs an even head_dim and block_size, not %d and %d", kv.dim,
                 kv.block_size);
  }
  return kv;
}

// Runs op(args) unless reading the arguments failed.
template <class Args>
PyObject* run(void (*op)(const Args&), const Args& args) {
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (is_large(args)) {
    PyThreadState* state = PyEval_SaveThread();
    op(args);
    PyEval_RestoreThread(state);
  } else {
    op(args);
  }
  Py_RETURN_NONE;
}

PyObject* call_rms_norm(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments in(values, given);
  if (!in.expect("rms_norm", 8)) return nullptr;
  NormArgs a{};
  a.x = in.pointer<float>();
  a.x_stride = in.integer();
  a.weight = in.pointer<float>();
  a.out = in.pointer<float>();
  a.out_stride = in.integer();
  a.rows = in.size();
  a.width = in.size();
  a.eps = in.real();
  return run(rms_norm, a);
}

PyObject* call_add_rms_norm(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments in(values, given);
  if (!in.expect("add_rms_norm", 10)) return nullptr;
  NormArgs a{};
  a.x = in.pointer<float>();
  a.x_stride = in.integer();
  a.residual = in.pointer<float>();
  a.residual_stride = in.integer();
  a.weight = in.pointer<float>();
  a.out = in.pointer<float>();
  a.out_stride = in.integer();
  a.rows = in.size();
  a.width = in.size();
  a.eps = in.real();
  return run(rms_norm, a);
}

PyObject* call_rope_and_cache(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments in(values, given);
  if (!in.expect("rope_and_cache", 21)) return nullptr;
  RopeArgs a{};
  a.q = in.pointer<float>();
  a.q_stride = in.integer();
  a.k = in.pointer<float>();
  a.k_stride = in.integer();
  a.v = in.pointer<float>();
  a.v_stride = in.integer();
  a.tokens = in.size();
  a.q_heads = in.size();
  a.cos_sin = in.pointer<float>();
  a.rot = in.size();
  a.positions = in.pointer<int32_t>();
  a.slots = in.pointer<int32_t>();
  a.kv = read_kv(in);
  a.q_norm = in.pointer<float>();
  a.k_norm = in.pointer<float>();
  a.eps = in.real();
  return run(rope_and_cache, a);
}

// query_start, context_len, block_table, rows, table_stride, scale, window, softcap
void read_batch(Arguments& in, AttentionArgs& a) {
  a.query_start = in.pointer<int32_t>();
  a.context_len = in.pointer<int32_t>();
  a.block_table = in.pointer<int32_t>();
  a.rows = in.size();
  a.table_stride = in.integer();
  a.scale = in.real();
  a.window = in.size();
  a.softcap = in.real();
}

PyObject* call_paged_attention(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments in(values, given);
  if (!in.expect("paged_attention", 19)) return nullptr;
  AttentionArgs a{};
  a.q = in.pointer<float>();
  a.q_stride = in.integer();
  a.q_heads = in.size();
  a.kv = read_kv(in);
  read_batch(in, a);
  a.out = in.pointer<float>();
  a.out_stride = in.integer();
  return run(paged_attention, a);
}

struct FusedArgs {
  RopeArgs rope;
  AttentionArgs attention;
};
bool is_large(const FusedArgs& a) { return trireme::is_large(a.rope) || trireme::is_large(a.attention); }
void rope_cache_attention(const FusedArgs& a) {
  rope_and_cache(a.rope);
  paged_attention(a.attention);
}

PyObject* call_rope_cache_attention(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments in(values, given);
  if (!in.expect("rope_cache_attention", 27)) return nullptr;
  FusedArgs a{};
  float* qkv = in.pointer<float>();
  const int64_t stride = in.integer();
  a.rope.tokens = in.size();
  a.rope.q_heads = a.attention.q_heads = in.size();
  a.rope.kv = a.attention.kv = read_kv(in);
  const int64_t q_width = static_cast<int64_t>(a.rope.q_heads) * a.rope.kv.dim;
  const int64_t kv_width = static_cast<int64_t>(a.rope.kv.heads) * a.rope.kv.dim;
  a.rope.q = qkv;
  a.rope.k = qkv + q_width;
  a.rope.v = qkv + q_width + kv_width;
  a.rope.q_stride = a.rope.k_stride = a.rope.v_stride = a.attention.q_stride = stride;
  a.rope.cos_sin = in.pointer<float>();
  a.rope.rot = in.size();
  a.rope.positions = in.pointer<int32_t>();
  a.rope.slots = in.pointer<int32_t>();
  a.attention.q = qkv;
  read_batch(in, a.attention);
  a.rope.q_norm = in.pointer<float>();
  a.rope.k_norm = in.pointer<float>();
  a.rope.eps = in.real();
  a.attention.out = in.pointer<float>();
  a.attention.out_stride = in.integer();
  return run(rope_cache_attention, a);
}

PyObject* call_gated(const char* name, Activation activation, PyObject* const* values, Py_ssize_t given) {
  Arguments in(values, given);
  if (!in.expect(name, 6)) return nullptr;
  SwigluArgs a{};
  a.gate_up = in.pointer<float>();
  a.gate_up_stride = in.integer();
  a.out = in.pointer<float>();
  a.out_stride = in.integer();
  a.rows = in.size();
  a.width = in.size();
  a.activation = activation;
  return run(swiglu, a);
}

PyObject* call_swiglu(PyObject*, PyObject* const* values, Py_ssize_t given) {
  return call_gated("swiglu", Activation::silu, values, given);
}

PyObject* call_geglu(PyObject*, PyObject* const* values, Py_ssize_t given) {
  return call_gated("geglu", Activation::gelu_tanh, values, given);
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef define(const char* name, FastCall function, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, doc};
}

PyMethodDef methods[] = {
    define("rms_norm", call_rms_norm, "x, x_stride, weight, out, out_stride, rows, width, eps"),
    define("add_rms_norm", call_add_rms_norm,
           "x, x_stride, residual, residual_stride, weight, out, out_stride, rows, width, eps"),
    define("rope_and_cache", call_rope_and_cache,
           "q, q_stride, k, k_stride, v, v_stride, tokens, q_heads, cos_sin, rot, positions, slots, "
           "kv_k, kv_v, kv_type, kv_heads, dim, block_size, q_norm, k_norm, eps"),
    define("paged_attention", call_paged_attention,
           "q, q_stride, q_heads, kv_k, kv_v, kv_type, kv_heads, dim, block_size, "
           "query_start, context_len, block_table, rows, table_stride, scale, window, softcap, out, out_stride"),
    define("rope_cache_attention", call_rope_cache_attention,
           "qkv, qkv_stride, tokens, q_heads, kv_k, kv_v, kv_type, kv_heads, dim, block_size, cos_sin, rot, positions, "
           "slots, query_start, context_len, block_table, rows, table_stride, scale, window, softcap, q_norm, k_norm, eps, out, "
           "out_stride"),
    define("swiglu", call_swiglu, "gate_up, gate_up_stride, out, out_stride, rows, width"),
    define("geglu", call_geglu, "gate_up, gate_up_stride, out, out_stride, rows, width"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_ops(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}
