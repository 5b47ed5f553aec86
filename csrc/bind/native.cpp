// The extension module models._native: threads and instruction set here, kernels in bind/*.cpp. Bindings take raw
// addresses and sizes (no torch headers below the Python layer); the Python side checks shapes and dtypes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/cpuinfo.h"
#include "cpu/threads.h"

namespace py = pybind11;

void bind_linear(py::module_& m);
void bind_ops(py::module_& m);
void bind_collectives(py::module_& m);
void bind_decoder(py::module_& m);
void bind_sampling(py::module_& m);

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of Trireme.";
  m.def("num_threads", &trireme::num_threads, "Threads of the pool, the caller included.");
  m.def("set_num_threads", &trireme::set_num_threads, py::arg("count"), py::call_guard<py::gil_scoped_release>());
  m.def("set_cores", &trireme::set_cores, py::arg("cores"), "Keeps thread i on cores[i % size]; empty: anywhere.");
  m.def("set_spin_us", &trireme::set_spin_us, py::arg("spin_us"));
  m.def("isa", [] { return std::string(trireme::isa_name(trireme::isa())); }, "Instruction set in use.");
  m.def("best_isa", [] { return std::string(trireme::isa_name(trireme::best_isa())); }, "Best set of this machine.");
  m.def(
      "isas",
      [] {
        py::list names;
        for (int i = 0; i < trireme::kNumIsas; ++i) {
          if (trireme::has_isa(static_cast<trireme::Isa>(i))) names.append(trireme::kIsaNames[i]);
        }
        return names;
      },
      "Instruction sets of this machine, the best one last.");
  m.def("set_isa", [](const std::string& name) { trireme::set_isa(trireme::isa_from_name(name)); }, py::arg("name"));
  // Adds task numbers into a sum, `rounds` times; used by tests and to time the wake-up of the pool.
  m.def(
      "parallel_probe",
      [](int num_tasks, int rounds, std::uintptr_t counts) {
        auto* out = reinterpret_cast<int*>(counts);
        for (int round = 0; round < rounds; ++round) {
          trireme::parallel(num_tasks, [&](int task, int) { out[task] += 1; });
        }
      },
      py::arg("num_tasks"), py::arg("rounds"), py::arg("counts"), py::call_guard<py::gil_scoped_release>());
  bind_linear(m);
  bind_ops(m);
  bind_collectives(m);
  bind_decoder(m);
  bind_sampling(m);
}
