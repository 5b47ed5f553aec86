// Collectives over peer memory in the extension module models._cuda. The Python side is workers/collectives/peer.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/address.h"
#include "cuda/comm/allreduce.h"

namespace py = pybind11;
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
           [](Peers& self, Address x, Address out, int64_t count, int type, int way, Address stream) {
             self.all_reduce(at(x), at(out), count, static_cast<Type>(type), static_cast<Way>(way), at(stream));
           })
      .def("all_gather",
           [](Peers& self, Address x, Address out, int64_t rows, const std::vector<int64_t>& row_bytes, Address stream) {
             self.all_gather(at(x), at(out), rows, row_bytes, at(stream));
           })
      .def("abort", &Peers::abort)
      .def("status", [](const Peers& self) { return static_cast<uint32_t>(self.status()); });
}
