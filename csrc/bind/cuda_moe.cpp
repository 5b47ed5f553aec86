// Mixtures of experts in models._cuda. models/cuda/layers/moe_ops.py gives them their names and defaults.
//
// Legend: that of cuda/moe/moe.h.
#include <pybind11/pybind11.h>

#include <algorithm>

#include "bind/cuda_views.h"
#include "cuda/moe/moe.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cuda;

namespace {

void call_route(const TensorView& logits, const TensorView& chosen, const TensorView& scores, StreamAddress stream) {
  constexpr const char* op = "route_experts";
  operand(op, "logits", logits).is(kFloats).rows(kAny, kAny);
  operand(op, "chosen", chosen).is(DType::i32).dense({logits.shape[0], kAny});
  operand(op, "scores", scores).is(DType::f32).dense({logits.shape[0], chosen.shape[1]});
  route_experts({logits.data, logits.stride[0], chosen.as<int32_t>(), scores.as<float>(), to_int(logits.shape[0]), to_int(logits.shape[1]),
                 to_int(chosen.shape[1]), to_type(logits)}, to_stream(stream));
}

void call_sort(const TensorView& chosen, const TensorView& sorted, const TensorView& tiles, int experts, int tile_rows, StreamAddress stream) {
  constexpr const char* op = "sort_pairs";
  need(experts > 0 && tile_rows > 0, op, "experts and the rows of a tile must be positive");
  operand(op, "chosen", chosen).is(DType::i32).dense({kAny, kAny});
  const int64_t pairs = chosen.numel(), most = (pairs + std::min<int64_t>(experts, pairs) * (tile_rows - 1)) / tile_rows;
  operand(op, "pairs", sorted).is(DType::i32).dense({pairs});
  operand(op, "tiles", tiles).is(DType::i32).holds(1 + 3 * most);
  sort_pairs({chosen.as<const int32_t>(), sorted.as<int32_t>(), tiles.as<int32_t>(), to_int(pairs), experts, tile_rows}, to_stream(stream));
}

void call_product(bool is_gated, const TensorView& x, const TensorView& w, const TensorView& out, const TensorView& sorted, const TensorView& tiles,
                  int tile_rows, int top_k, float limit, float alpha, const TensorView& bias, StreamAddress stream) {
  const char* op = is_gated ? "expert_gates" : "expert_outputs";
  need(top_k > 0, op, "the number of a token's experts must be positive");
  operand(op, "pairs", sorted).is(DType::i32).dense({kAny});
  operand(op, "tiles", tiles).is(DType::i32).holds(1);
  operand(op, "weight", w).is(kHalves).dense({kAny, kAny, kAny}).aligned(kPackBytes);
  const int64_t pairs = sorted.shape[0], n = w.shape[1], k = w.shape[2];
  operand(op, "x", x).is(w.dtype).rows(pairs / top_k, k).rows_aligned(kPackBytes);
  operand(op, "out", out).is(w.dtype).dense({pairs, is_gated ? n / 2 : n}).aligned(kPackBytes);
  if (bias.is_given) operand(op, "bias", bias).is(w.dtype).dense({w.shape[0], n});
  const ExpertArgs args{x.data, x.stride[0], w.data, bias.data, out.data, sorted.as<const int32_t>(), tiles.as<const int32_t>(),
                        to_int(tiles.numel() / 3), tile_rows, top_k, to_int(n), to_int(k), limit, alpha, to_type(w)};
  is_gated ? expert_gates(args, to_stream(stream)) : expert_outputs(args, to_stream(stream));
}

void call_mix(const TensorView& results, const TensorView& scores, const TensorView& out, StreamAddress stream) {
  constexpr const char* op = "mix_experts";
  operand(op, "results", results).is(kFloats).dense({kAny, kAny, kAny}).aligned(kPackBytes);
  const int64_t tokens = results.shape[0], top_k = results.shape[1], hidden = results.shape[2];
  operand(op, "scores", scores).is(DType::f32).dense({tokens, top_k});
  operand(op, "out", out).is(results.dtype).rows(tokens, hidden).rows_aligned(kPackBytes);
  mix_experts({results.data, scores.as<const float>(), out.data, out.stride[0], to_int(tokens), to_int(top_k), to_int(hidden), to_type(out)},
              to_stream(stream));
}

}  // namespace

void bind_experts(py::module_& m) {
  m.attr("MOST_EXPERTS") = kMostExperts;
  m.attr("MOST_CHOSEN") = kMostChosen;
  m.def("route_experts", &call_route);
  m.def("sort_pairs", &call_sort);
  m.def("expert_product", &call_product);
  m.def("mix_experts", &call_mix);
}
