// Binding of cpu/decoder.h. The stage keeps addresses of norms, tables, weights, biases and caches beyond the call that brings them:
// models/cpu/native_stage.py holds their owners as long as the stage. What `run` gets is read during the call alone.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "bind/cpu_views.h"
#include "cpu/decoder.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cpu;

namespace {

// A stage, and what its operands are checked against.
class BoundStage {
 public:
  explicit BoundStage(const DecoderShape& shape)
      : shape_(shape), q_width_(int64_t{shape.q_heads} * shape.dim), kv_width_(int64_t{shape.kv_heads} * shape.dim), stage_(shape) {}

  void add_layer(const std::array<TensorView, 6>& norms, int window, const TensorView& cos_sin, const std::array<py::list, 4>& linears);
  void bind_kv(const std::vector<std::pair<TensorView, TensorView>>& caches);
  void run(const std::array<TensorView, 5>& inputs, const std::array<TensorView, 6>& buffers) const;

 private:
  StepInputs read_inputs(const std::array<TensorView, 5>& views) const;
  StepBuffers read_buffers(const std::array<TensorView, 6>& views, int64_t tokens) const;

  DecoderShape shape_;
  int64_t q_width_, kv_width_;
  DecoderStage stage_;
  bool has_kv_ = false;
};

// ---- weights

// [(weight, bias or None), ...] side by side, n outputs of k inputs in all.
LinearPieces read_pieces(const char* name, const py::list& given, int64_t n, int64_t k) {
  constexpr const char* op = "add_layer";
  LinearPieces pieces;
  int column = 0;
  for (const py::handle item : given) {
    const auto [held, bias] = item.cast<std::pair<py::object, TensorView>>();
    const auto* weight = held.cast<const PackedWeight*>();
    need(weight != nullptr && weight->k == k, op, name, " has a weight that does not take ", k, " inputs");
    pieces.push_back(LinearPiece{weight, optional_floats(op, (std::string(name) + " bias").c_str(), bias, weight->n), column});
    column += weight->n;
  }
  need(column == n, op, name, " has ", column, " outputs; it must have ", n);
  return pieces;
}

void BoundStage::add_layer(const std::array<TensorView, 6>& norms, int window, const TensorView& cos_sin, const std::array<py::list, 4>& linears) {
  constexpr const char* op = "add_layer";
  const Operand table = operand(op, "cos_sin", cos_sin);
  table.is(DType::f32).dense({kAny, kAny});
  if (cos_sin.shape[1] > shape_.dim) table.fail("at most " + std::to_string(shape_.dim) + " wide");
  const int64_t hidden = shape_.hidden, q_norm = shape_.wide_qk_norm ? q_width_ : shape_.dim, k_norm = shape_.wide_qk_norm ? kv_width_ : shape_.dim;
  DecoderLayer layer{};
  layer.attn_norm = optional_floats(op, "attn_norm", norms[0], hidden);
  layer.ffn_norm = optional_floats(op, "ffn_norm", norms[1], hidden);
  layer.q_norm = optional_floats(op, "q_norm", norms[2], q_norm);
  layer.k_norm = optional_floats(op, "k_norm", norms[3], k_norm);
  layer.attn_post = optional_floats(op, "attn_post", norms[4], hidden);
  layer.ffn_post = optional_floats(op, "ffn_post", norms[5], hidden);
  need(!shape_.wide_qk_norm || (layer.q_norm != nullptr && layer.k_norm != nullptr), op, "q_norm and k_norm must be given");
  layer.window = window;
  layer.cos_sin = cos_sin.as<const float>();
  layer.rot = to_int(cos_sin.shape[1]);
  layer.qkv = read_pieces("qkv", linears[0], q_width_ + 2 * kv_width_, hidden);
  layer.o = read_pieces("o", linears[1], hidden, q_width_);
  layer.gate_up = read_pieces("gate_up", linears[2], int64_t{2} * shape_.ffn, hidden);
  layer.down = read_pieces("down", linears[3], hidden, shape_.ffn);
  stage_.add_layer(std::move(layer));
  has_kv_ = false;
}

void BoundStage::bind_kv(const std::vector<std::pair<TensorView, TensorView>>& caches) {
  constexpr const char* op = "bind_kv";
  need(caches.size() == stage_.num_layers(), op, caches.size(), " caches for ", stage_.num_layers(), " layers");
  if (caches.empty()) return;
  const KvView first = to_kv(op, caches[0].first, caches[0].second);
  need(first.heads == shape_.kv_heads && first.dim == shape_.dim, op,
       "caches of ", first.heads, " heads of ", first.dim, " values; the stage has ", shape_.kv_heads, " of ", shape_.dim);
  std::vector<std::pair<void*, void*>> pointers;
  for (const auto& [k, v] : caches) {
    const KvView kv = to_kv(op, k, v);
    const bool is_alike = kv.type == first.type && kv.heads == first.heads && kv.dim == first.dim && kv.block_size == first.block_size;
    need(is_alike, op, "cache ", pointers.size(), " is unlike the first");
    pointers.emplace_back(kv.k, kv.v);
  }
  stage_.bind_kv(first.type, first.block_size, pointers);
  has_kv_ = true;
}

// ---- one step

StepInputs BoundStage::read_inputs(const std::array<TensorView, 5>& views) const {
  constexpr const char* op = "run";
  const auto& [positions, slots, query_start, context_len, block_table] = views;
  const int64_t tokens = positions.shape[0], rows = block_table.shape[0];
  const int32_t* where = int32_vector(op, "positions", positions, kAny);
  operand(op, "block_table", block_table).is(DType::i32).rows(kAny, kAny);
  return {to_int(tokens),
          to_int(rows),
          where,
          int32_vector(op, "slots", slots, tokens),
          int32_vector(op, "query_start", query_start, rows + 1),
          int32_vector(op, "context_len", context_len, rows),
          block_table.as<const int32_t>(),
          block_table.stride[0]};
}

StepBuffers BoundStage::read_buffers(const std::array<TensorView, 6>& views, int64_t tokens) const {
  const int64_t some = std::min(tokens, int64_t{kFeedForwardRows});
  const auto at = [&views](int i, const char* name, int64_t rows, int64_t width) {
    operand("run", name, views[i]).is(DType::f32).dense({kAny, width}).holds(rows * width);
    return views[i].as<float>();
  };
  return {at(0, "hidden", tokens, shape_.hidden),
          at(1, "normed", tokens, shape_.hidden),
          at(2, "qkv", tokens, q_width_ + 2 * kv_width_),
          at(3, "attended", tokens, q_width_),
          at(4, "gate_up", some, int64_t{2} * shape_.ffn),
          at(5, "product", some, shape_.ffn)};
}

void BoundStage::run(const std::array<TensorView, 5>& inputs, const std::array<TensorView, 6>& buffers) const {
  need(has_kv_ || stage_.num_layers() == 0, "run", "bind_kv comes first");
  const StepInputs in = read_inputs(inputs);
  const StepBuffers out = read_buffers(buffers, in.tokens);
  py::gil_scoped_release release;
  stage_.run(in, out);
}

BoundStage make_stage(const std::array<int, 5>& sizes, const std::array<float, 4>& scales, bool wide_qk_norm, int activation) {
  DecoderShape shape{};
  shape.hidden = sizes[0];
  shape.q_heads = sizes[1];
  shape.kv_heads = sizes[2];
  shape.dim = sizes[3];
  shape.ffn = sizes[4];
  shape.eps = scales[0];
  shape.scale = scales[1];
  shape.softcap = scales[2];
  shape.residual_scale = scales[3];
  shape.wide_qk_norm = wide_qk_norm;
  shape.activation = static_cast<Activation>(activation);
  return BoundStage(shape);
}

}  // namespace

void bind_decoder(py::module_& m) {
  using py::arg;
  m.attr("FEED_FORWARD_ROWS") = kFeedForwardRows;
  py::class_<BoundStage>(m, "DecoderStage", "Layers in one call; what add_layer and bind_kv get must outlive it.")
      .def(py::init(&make_stage), arg("sizes"), arg("scales"), arg("wide_qk_norm"), arg("activation"))
      .def("add_layer", &BoundStage::add_layer, arg("norms"), arg("window"), arg("cos_sin"), arg("linears"))
      .def("bind_kv", &BoundStage::bind_kv, arg("caches"))
      .def("run", &BoundStage::run, arg("inputs"), arg("buffers"));
}
