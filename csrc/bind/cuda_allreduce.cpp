// Collectives over peer memory in the extension module models._cuda. The Python side is workers/collectives/peer.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>

#include "bind/cuda_views.h"
#include "cuda/comm/allreduce.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cuda;

void bind_peers(py::module_& m) {
  m.attr("MAX_PEERS") = kMaxPeers;
  py::class_<Peers>(m, "Peers")
      .def(py::init<int, int, int64_t, int64_t, double>(), py::arg("rank"), py::arg("size"), py::arg("pushed_bytes"), py::arg("staged_bytes"),
           py::arg("deadline_s"))
      .def("handle", [](const Peers& self) { return py::bytes(self.handle()); })
      .def("open", [](Peers& self, const std::vector<py::bytes>& handles) {
        std::vector<std::string> found(handles.begin(), handles.end());
        self.open(found);
      })
      .def("all_reduce",
           [](Peers& self, const TensorView& x, const TensorView& out, int way, StreamAddress stream) {
             constexpr const char* op = "all_reduce";
             operand(op, "x", x).is(kFloats).holds(0).aligned(kPackBytes);
             operand(op, "out", out).is(x.dtype).holds(x.numel()).aligned(kPackBytes);
             self.all_reduce(x.data, out.data, x.numel(), to_type(x), static_cast<Way>(way), to_stream(stream));
           })
      .def("all_gather",
           [](Peers& self, const TensorView& x, const TensorView& out, const std::vector<int64_t>& row_bytes, StreamAddress stream) {
             constexpr const char* op = "all_gather";
             const Operand own = operand(op, "x", x);
             own.dense({kAny, kAny});
             const int64_t bytes = size_of(x.dtype), own_bytes = x.shape[1] * bytes;
             if (x.dtype == DType::other || std::find(row_bytes.begin(), row_bytes.end(), own_bytes) == row_bytes.end()) {
               own.fail("rows of a rank's number of bytes");
             }
             operand(op, "out", out).is(x.dtype).dense({x.shape[0], std::accumulate(row_bytes.begin(), row_bytes.end(), int64_t{0}) / bytes});
             self.all_gather(x.data, out.data, x.shape[0], row_bytes, to_stream(stream));
           })
      .def("abort", &Peers::abort)
      .def("status", [](const Peers& self) { return static_cast<uint32_t>(self.status()); });
}
