// Binding of the draw over a vocabulary.
#include <pybind11/pybind11.h>

#include "cpu/sampling.h"

namespace py = pybind11;

void bind_sampling(py::module_& m) {
  m.def(
      "race",
      [](std::uintptr_t logits, int size, float peak, float inverse_temperature, uint64_t key, std::uintptr_t rivals,
         int capacity) {
        trireme::RaceArgs args{};
        args.logits = reinterpret_cast<const float*>(logits);
        args.size = size;
        args.peak = peak;
        args.inverse_temperature = inverse_temperature;
        args.key_low = static_cast<uint32_t>(key);
        args.key_high = static_cast<uint32_t>(key >> 32);
        args.rivals = reinterpret_cast<int32_t*>(rivals);
        args.capacity = capacity;
        return trireme::race(args);
      },
      py::arg("logits"), py::arg("size"), py::arg("peak"), py::arg("inverse_temperature"), py::arg("key"),
      py::arg("rivals"), py::arg("capacity"), py::call_guard<py::gil_scoped_release>(),
      "Tokens that can win the Gumbel race (int32 ids to `rivals`); returns their number, -1 when over `capacity`.");
}
