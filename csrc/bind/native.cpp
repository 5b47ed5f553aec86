// The extension module models._native: threads and instruction set here, kernels in bind/*.cpp. Each function checks its operands and
// raises ValueError where one does not fit.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/cpu_views.h"
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
  m.def(
      "parallel_probe",
      [](const trireme::TensorView& counts, int rounds) {
        trireme::cpu::operand("parallel_probe", "counts", counts).is(trireme::DType::i32).dense({trireme::kAny});
        auto* out = counts.as<int32_t>();
        for (int round = 0; round < rounds; ++round) {
          trireme::parallel(trireme::to_int(counts.shape[0]), [&](int task, int) { out[task] += 1; });
        }
      },
      py::arg("counts"), py::arg("rounds"), py::call_guard<py::gil_scoped_release>(),
      "Counts a task for each of `counts`, `rounds` times; used by tests and to time the wake-up of the pool.");
  bind_linear(m);
  bind_ops(m);
  bind_collectives(m);
  bind_decoder(m);
  bind_sampling(m);
}
