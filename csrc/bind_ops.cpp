// Bindings of the ops kernels.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_ops(py::module_& m) { (void)m; }
