// Binding of cpu/decoder.h. Addresses come as integers; models/cpu/decoder.py keeps what they point to alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/decoder.h"

namespace py = pybind11;

namespace {

using namespace trireme;
using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// [(weight, bias address), ...] side by side.
LinearPieces read_pieces(const py::list& given) {
  LinearPieces pieces;
  int column = 0;
  for (const py::handle item : given) {
    const auto pair = item.cast<std::pair<py::object, Address>>();
    const auto* weight = pair.first.cast<const PackedWeight*>();
    pieces.push_back(LinearPiece{weight, pointer<const float>(pair.second), column});
    column += weight->n;
  }
  return pieces;
}

void add_layer(DecoderStage& stage, const std::array<Address, 6>& norms, int window,
               Address cos_sin, int rot, const std::array<py::list, 4>& linears) {
  DecoderLayer layer{};
  layer.attn_norm = pointer<const float>(norms[0]);
  layer.ffn_norm = pointer<const float>(norms[1]);
  layer.q_norm = pointer<const float>(norms[2]);
  layer.k_norm = pointer<const float>(norms[3]);
  layer.attn_post = pointer<const float>(norms[4]);
  layer.ffn_post = pointer<const float>(norms[5]);
  layer.window = window;
  layer.cos_sin = pointer<const float>(cos_sin);
  layer.rot = rot;
  layer.qkv = read_pieces(linears[0]);
  layer.o = read_pieces(linears[1]);
  layer.gate_up = read_pieces(linears[2]);
  layer.down = read_pieces(linears[3]);
  stage.add_layer(std::move(layer));
}

void bind_kv(DecoderStage& stage, int type, int block_size, const std::vector<std::pair<Address, Address>>& caches) {
  if (caches.size() != stage.num_layers()) {
    throw std::invalid_argument("bind_kv: " + std::to_string(caches.size()) + " caches for " +
                                std::to_string(stage.num_layers()) + " layers");
  }
  std::vector<std::pair<void*, void*>> pointers;
  for (const auto& [k, v] : caches) pointers.emplace_back(pointer<void>(k), pointer<void>(v));
  stage.bind_kv(static_cast<KvType>(type), block_size, pointers);
}

}  // namespace

void bind_decoder(py::module_& m) {
  m.attr("FEED_FORWARD_ROWS") = kFeedForwardRows;
  py::class_<DecoderStage>(m, "DecoderStage")
      .def(py::init([](const std::array<int, 5>& sizes, const std::array<float, 4>& scales, bool wide_qk_norm,
                       int activation) {
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
             return DecoderStage(shape);
           }),
           py::arg("sizes"), py::arg("scales"), py::arg("wide_qk_norm"), py::arg("activation"))
      .def("add_layer", &add_layer, py::arg("norms"), py::arg("window"), py::arg("cos_sin"), py::arg("rot"),
           py::arg("linears"))
      .def("bind_kv", &bind_kv, py::arg("type"), py::arg("block_size"), py::arg("caches"))
      .def(
          "run",
          [](const DecoderStage& stage, int tokens, int rows, const std::array<Address, 5>& inputs, int64_t table_stride,
             const std::array<Address, 6>& buffers) {
            const StepInputs in{tokens,
                                rows,
                                pointer<const int32_t>(inputs[0]),
                                pointer<const int32_t>(inputs[1]),
                                pointer<const int32_t>(inputs[2]),
                                pointer<const int32_t>(inputs[3]),
                                pointer<const int32_t>(inputs[4]),
                                table_stride};
            const StepBuffers out{pointer<float>(buffers[0]), pointer<float>(buffers[1]), pointer<float>(buffers[2]),
                                  pointer<float>(buffers[3]), pointer<float>(buffers[4]), pointer<float>(buffers[5])};
            py::gil_scoped_release release;
            stage.run(in, out);
          },
          py::arg("tokens"), py::arg("rows"), py::arg("inputs"), py::arg("table_stride"), py::arg("buffers"));
}
