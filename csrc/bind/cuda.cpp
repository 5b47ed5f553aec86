// The extension module models._cuda: CUDA kernels by raw address. The Python side (models/cuda/ops.py) checks shapes and dtypes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "bind/address.h"
#include "cuda/ops.h"

namespace py = pybind11;
using namespace trireme::cuda;

namespace {

const int32_t* ints(Address address) { return at<const int32_t>(address); }
const float* floats(Address address) { return at<const float>(address); }

using Addresses = std::pair<Address, Address>;  // of Scales
Scales scales_at(const Addresses& pair) { return {floats(pair.first), floats(pair.second)}; }

}  // namespace

void bind_peers(py::module_& m);
void bind_grouped(py::module_& m);
void bind_int8(py::module_& m);
void bind_experts(py::module_& m);

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "Native CUDA kernels of Trireme.";
  py::class_<PagedCache>(m, "PagedCache")
      .def(py::init([](Address k, Address v, int type, float k_scale, float v_scale, int heads, int dim, int block_size) {
             return PagedCache{at(k), at(v), static_cast<Type>(type), k_scale, v_scale, heads, dim, block_size};
           }),
           py::arg("k"), py::arg("v"), py::arg("type"), py::arg("k_scale"), py::arg("v_scale"), py::arg("heads"), py::arg("dim"), py::arg("block_size"));
  const auto norm = [](auto run) {
    return [run](Address x, int64_t x_stride, const Addresses& x_scales, Address residual, int64_t residual_stride, Address weight, Address out,
                 int64_t out_stride, int tokens, int hidden, float eps, float weight_offset, int type, Address scale, int narrow, Address bias,
                 Address stream) {
      run({at(x), x_stride, scales_at(x_scales), at(residual), residual_stride, at(weight), at(out), out_stride, tokens, hidden, eps, weight_offset,
           static_cast<Type>(type), reinterpret_cast<float*>(scale), static_cast<Type>(narrow), at(bias)}, at(stream));
    };
  };
  m.def("rms_norm", norm(&rms_norm));
  m.def("layer_norm", norm(&layer_norm));
  m.def("quantize_rows", [](Address x, int64_t x_stride, Address out, int64_t out_stride, int tokens, int hidden, int type, Address scale, int narrow,
                            Address largest, Address stream) {
    NormArgs args{};
    args.x = at(x);
    args.x_stride = x_stride;
    args.out = at(out);
    args.out_stride = out_stride;
    args.tokens = tokens;
    args.hidden = hidden;
    args.type = static_cast<Type>(type);
    args.scale = reinterpret_cast<float*>(scale);
    args.narrow = static_cast<Type>(narrow);
    args.largest = floats(largest);
    quantize_rows(args, at(stream));
  });
  m.def(
      "rotary_and_cache",
      [](Address q, int64_t q_stride, Address k, int64_t k_stride, Address v, int64_t v_stride, int type, Address cos_sin, int64_t cos_sin_stride,
         int rotary, Address positions, Address slots, Address q_norm, Address k_norm, const Addresses& scales, int tokens, int q_heads, float eps,
         const PagedCache& cache, Address stream) {
        rotary_and_cache({at(q), at(k), at(v), q_stride, k_stride, v_stride, static_cast<Type>(type), floats(cos_sin), cos_sin_stride,
                          ints(positions), ints(slots), at(q_norm), at(k_norm), scales_at(scales), tokens, q_heads, rotary, eps, cache}, at(stream));
      });
  const auto act = [](auto run) {
    return [run](Address x, int64_t stride, const Addresses& scales, Address out, int64_t out_stride, int tokens, int width, int gate, int type,
                 Address largest, Address stream) {
      run({at(x), stride, scales_at(scales), at(out), out_stride, tokens, width, static_cast<Gate>(gate), static_cast<Type>(type),
           reinterpret_cast<float*>(largest)}, at(stream));
    };
  };
  m.def("gated_activation", act(&gated_activation));
  m.def("activation", act(&activation));
  m.def("decode_attention",
        [](Address q, int64_t q_stride, Address out, int64_t out_stride, int type, Address block_table, int table_stride, Address context_len,
           int rows, int q_heads, float scale, int window, float softcap, Address sinks, const PagedCache& cache, int splits, Address partial,
           Address largest, Address stream) {
          decode_attention({at(q), q_stride, at(out), out_stride, static_cast<Type>(type), ints(block_table), table_stride, ints(context_len),
                            rows, q_heads, scale, window, softcap, floats(sinks), cache, splits, reinterpret_cast<float*>(partial),
                            reinterpret_cast<float*>(largest)}, at(stream));
        });
  m.def("decode_scratch_floats", &decode_scratch_floats);
  m.def("skinny_linear",
        [](Address x, int64_t x_stride, Address w, int weight, Address scale, int scale_step, Address out, int64_t out_stride,
           Address bias, int rows, int n, int k, int type, int ways, Address stream) {
          skinny_linear({at(x), x_stride, at(w), at(out), out_stride, at(bias), floats(scale), scale_step, rows, n, k,
                         static_cast<Type>(type), static_cast<Weight>(weight), ways}, at(stream));
        });
  m.def("skinny_max_rows", &skinny_max_rows);
  m.def("fp8_linear", [](Address x, int64_t x_stride, Address w, Address scale, Address bias, Address out, int64_t out_stride, int rows, int n,
                         int k, int type, Address stream) {
    fp8_linear({at(x), x_stride, at(w), floats(scale), at(bias), at(out), out_stride, rows, n, k, static_cast<Type>(type)}, at(stream));
  });
  m.def("fp8_linear_rows", &fp8_linear_rows);
  m.def("expand_q4_k", [](Address blocks, Address out, int64_t count, int type, Address stream) {
    expand_q4_k(at(blocks), at(out), count, static_cast<Type>(type), at(stream));
  });
  m.def("block_linear", [](Address x, int64_t x_stride, Address w, int blocks, Address out, int64_t out_stride, Address bias, int rows, int n, int k,
                           int type, Address stream) {
    SkinnyArgs args{};
    args.x = at(x);
    args.x_stride = x_stride;
    args.w = at(w);
    args.out = at(out);
    args.out_stride = out_stride;
    args.bias = at(bias);
    args.m = rows;
    args.n = n;
    args.k = k;
    args.type = static_cast<Type>(type);
    block_linear(args, static_cast<Blocks>(blocks), at(stream));
  });
  m.def("block_linear_rows", [](int blocks, int n, int k) { return block_linear_rows(static_cast<Blocks>(blocks), n, k); });
  m.def("expand_blocks", [](Address blocks, Address out, int64_t count, int kind, int type, Address stream) {
    expand_blocks(at(blocks), at(out), count, static_cast<Blocks>(kind), static_cast<Type>(type), at(stream));
  });
  m.def("block_bytes", [](int blocks) { return block_bytes(static_cast<Blocks>(blocks)); });
  m.def("gather_rows",
        [](Address table, Address ids, Address out, int tokens, int hidden, int first, int count, float scale, int type, Address stream) {
          gather_rows(at(table), ints(ids), at(out), tokens, hidden, first, count, scale, static_cast<Type>(type), at(stream));
        });
  m.def("copy_blocks", [](Address cache, Address pairs, int count, int64_t block_bytes, Address stream) {
    copy_blocks(at(cache), ints(pairs), count, block_bytes, at(stream));
  });
  m.attr("SAMPLE_JOB_BYTES") = sizeof(SampleJob);
  m.attr("LOGPROBS_BYTES") = sizeof(Logprobs);
  m.def("sample_rows", [](Address logits, int64_t logits_stride, int type, int rows, int vocab, Address jobs, Address slots, Address positions,
                          Address tokens, Address logprobs, Address stream) {
    sample_rows({at(logits), logits_stride, static_cast<Type>(type), rows, vocab, reinterpret_cast<const SampleJob*>(jobs), ints(slots),
                 ints(positions), reinterpret_cast<int32_t*>(tokens), reinterpret_cast<Logprobs*>(logprobs)}, at(stream));
  });
  bind_peers(m);
  bind_grouped(m);
  bind_int8(m);
  bind_experts(m);
}
