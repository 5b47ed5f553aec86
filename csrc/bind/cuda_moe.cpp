// Mixtures of experts in models._cuda. models/cuda/layers/moe_ops.py checks shapes and dtypes.
#include <pybind11/pybind11.h>

#include "bind/address.h"
#include "cuda/moe/moe.h"

namespace py = pybind11;
using namespace trireme::cuda;

void bind_experts(py::module_& m) {
  m.attr("MOST_EXPERTS") = kMostExperts;
  m.attr("MOST_CHOSEN") = kMostChosen;
  m.def("route_experts", [](Address logits, int64_t stride, Address chosen, Address scores, int tokens, int experts, int top_k, int type,
                            Address stream) {
    route_experts({at<const void>(logits), stride, at<int32_t>(chosen), at<float>(scores), tokens, experts, top_k, static_cast<Type>(type)},
                  at<void>(stream));
  });
  m.def("sort_pairs", [](Address chosen, Address sorted, Address tiles, int pairs, int experts, int tile_rows, Address stream) {
    sort_pairs({at<const int32_t>(chosen), at<int32_t>(sorted), at<int32_t>(tiles), pairs, experts, tile_rows}, at<void>(stream));
  });
  m.def("expert_product", [](bool is_gated, Address x, int64_t x_stride, Address w, Address bias, Address out, Address sorted, Address tiles,
                             int most_tiles, int tile_rows, int top_k, int n, int k, float limit, float alpha, int type, Address stream) {
    const ExpertArgs args{at<const void>(x), x_stride, at<const void>(w), at<const void>(bias), at<void>(out), at<const int32_t>(sorted),
                          at<const int32_t>(tiles), most_tiles, tile_rows, top_k, n, k, limit, alpha, static_cast<Type>(type)};
    is_gated ? expert_gates(args, at<void>(stream)) : expert_outputs(args, at<void>(stream));
  });
  m.def("mix_experts", [](Address results, Address scores, Address out, int64_t out_stride, int tokens, int top_k, int hidden, int type,
                          Address stream) {
    mix_experts({at<const void>(results), at<const float>(scores), at<void>(out), out_stride, tokens, top_k, hidden, static_cast<Type>(type)},
                at<void>(stream));
  });
}
