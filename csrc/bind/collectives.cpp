// Bindings of the shared-memory collectives. CommError reaches Python as RuntimeError; workers/collectives/shm.py turns it
// into CollectiveError. All calls release the interpreter lock, since they wait for other processes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/collectives/collectives.h"

namespace py = pybind11;
using trireme::Comm;

namespace {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_collectives(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  using Address = std::uintptr_t;
  py::class_<Comm>(m, "Comm", "One worker's end of its engine's arena; see csrc/cpu/collectives/collectives.h.")
      .def(py::init<const std::string&, int, int, double, double>(), py::arg("path"), py::arg("tp_rank"),
           py::arg("pp_rank"), py::arg("timeout_s"), py::arg("step_timeout_s"))
      .def("all_reduce", [](Comm& c, Address x, size_t count) { c.all_reduce(at<float>(x), count); }, Released())
      .def("all_gather",
           [](Comm& c, Address x, Address out, size_t rows, const std::vector<size_t>& sizes) {
             c.all_gather(at<const char>(x), at<char>(out), rows, sizes);
           },
           Released(), py::arg("x"), py::arg("out"), py::arg("rows"), py::arg("row_bytes"))
      .def("reduce_scatter",
           [](Comm& c, Address x, Address out, size_t rows, const std::vector<size_t>& sizes) {
             c.reduce_scatter(at<const float>(x), at<float>(out), rows, sizes);
           },
           Released(), py::arg("x"), py::arg("out"), py::arg("rows"), py::arg("row_floats"))
      .def("broadcast", [](Comm& c, Address x, size_t bytes, int root) { c.broadcast(at<char>(x), bytes, root); }, Released())
      .def("barrier", &Comm::barrier, Released())
      .def("send_next", [](Comm& c, Address x, size_t bytes) { c.send_next(at<const char>(x), bytes); }, Released())
      .def("recv_prev", [](Comm& c, Address x, size_t bytes) { c.recv_prev(at<char>(x), bytes); }, Released())
      .def("abort", &Comm::abort);
}
