// The extension module serving._native: the SentencePiece encoder. No tensors, no threads of its own.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>

#include "text/spm.h"

namespace py = pybind11;

namespace {

using trireme::text::Spm;

std::unique_ptr<Spm> make_spm(std::vector<std::string> tokens,
                              const py::array_t<double, py::array::c_style | py::array::forcecast>& scores,
                              const py::array_t<uint8_t, py::array::c_style | py::array::forcecast>& kinds,
                              int32_t unknown, bool space_prefix) {
  const auto count = static_cast<py::ssize_t>(tokens.size());
  if (scores.size() != count || kinds.size() != count || unknown >= count) {
    throw std::invalid_argument(std::to_string(count) + " tokens, " + std::to_string(scores.size()) + " scores, " +
                                std::to_string(kinds.size()) + " kinds");
  }
  return std::make_unique<Spm>(std::move(tokens), scores.data(), kinds.data(), unknown, space_prefix);
}

py::array_t<int32_t> encode(const Spm& spm, std::string_view text, bool allow_special) {
  std::vector<int32_t> ids;
  {
    py::gil_scoped_release release;
    ids = spm.encode(text, allow_special);
  }
  return py::array_t<int32_t>(static_cast<py::ssize_t>(ids.size()), ids.data());
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native text parts of Trireme's front end.";
  py::class_<Spm>(m, "Spm", "SentencePiece BPE with byte fallback; see csrc/text/spm.h.")
      .def(py::init(&make_spm), py::arg("tokens"), py::arg("scores"), py::arg("kinds"), py::arg("unknown"),
           py::arg("space_prefix"))
      .def("encode", &encode, py::arg("text"), py::arg("allow_special"), "Ids (int32) of a text.")
      .def("find", &Spm::find, py::arg("token"), "Id of the token spelled exactly so, or -1.");
}
