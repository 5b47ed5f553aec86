// Bindings of the shared-memory collectives. CommError reaches Python as RuntimeError; workers/collectives/shm.py turns it
// into CollectiveError. All calls release the interpreter lock, since they wait for other processes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <numeric>

#include "bind/cpu_views.h"
#include "cpu/collectives/collectives.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cpu;

namespace {

using Columns = std::vector<size_t>;  // of each rank

// A worker's end of the arena, and its place among the ranks, by which operands are checked.
class BoundComm : public Comm {
 public:
  BoundComm(const std::string& path, int tp_rank, int pp_rank, double timeout_s, double step_timeout_s)
      : Comm(path, tp_rank, pp_rank, timeout_s, step_timeout_s), rank_(static_cast<size_t>(tp_rank)) {}

  int64_t own_of(const Columns& columns) const {
    need(rank_ < columns.size(), "columns", "there are ", columns.size(), ", and none for rank ", rank_);
    return static_cast<int64_t>(columns[rank_]);
  }

 private:
  size_t rank_;
};

// Rows of `width` in all but the last dimension of a tensor without gaps.
size_t rows_of(const Operand& tensor, int64_t width) {
  const TensorView& view = tensor.holds(0).view();
  if (view.rank < 1 || view.shape[view.rank - 1] != width) tensor.fail("of " + std::to_string(width) + " columns");
  int64_t rows = 1;
  for (int i = 0; i + 1 < view.rank; ++i) rows *= view.shape[i];
  return static_cast<size_t>(rows);
}

// Checks x [rows, own] against out [rows, all], or the other way round.
size_t read_rows(const char* op, const TensorView& x, int64_t x_width, const TensorView& out, int64_t out_width) {
  const size_t rows = rows_of(operand(op, "x", x), x_width);
  const Operand result = operand(op, "out", out);
  if (rows_of(result, out_width) != rows) result.fail("of " + std::to_string(rows) + " rows");
  if (out.dtype != x.dtype || out.item_bytes != x.item_bytes) result.fail("of the type of x");
  return rows;
}

int64_t sum_of(const Columns& columns) { return static_cast<int64_t>(std::accumulate(columns.begin(), columns.end(), size_t{0})); }

void call_all_reduce(BoundComm& comm, const TensorView& x) {
  operand("all_reduce", "x", x).is(DType::f32).holds(0);
  comm.all_reduce(x.as<float>(), static_cast<size_t>(x.numel()));
}

void call_all_gather(BoundComm& comm, const TensorView& x, const TensorView& out, const Columns& columns) {
  const size_t rows = read_rows("all_gather", x, comm.own_of(columns), out, sum_of(columns));
  Columns bytes = columns;
  for (size_t& width : bytes) width *= static_cast<size_t>(x.item_bytes);
  comm.all_gather(x.as<const char>(), out.as<char>(), rows, bytes);
}

void call_reduce_scatter(BoundComm& comm, const TensorView& x, const TensorView& out, const Columns& columns) {
  constexpr const char* op = "reduce_scatter";
  operand(op, "x", x).is(DType::f32);
  const size_t rows = read_rows(op, x, sum_of(columns), out, comm.own_of(columns));
  comm.reduce_scatter(x.as<const float>(), out.as<float>(), rows, columns);
}

void call_broadcast(BoundComm& comm, const TensorView& x, int root) {
  operand("broadcast", "x", x).holds(0);
  comm.broadcast(x.as<char>(), static_cast<size_t>(x.nbytes()), root);
}

void call_send(BoundComm& comm, const TensorView& x) {
  operand("send_next", "x", x).holds(0);
  comm.send_next(x.as<const char>(), static_cast<size_t>(x.nbytes()));
}

void call_receive(BoundComm& comm, const TensorView& x) {
  operand("recv_prev", "x", x).holds(0);
  comm.recv_prev(x.as<char>(), static_cast<size_t>(x.nbytes()));
}

}  // namespace

void bind_collectives(py::module_& m) {
  using py::arg;
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<BoundComm>(m, "Comm", "One worker's end of its engine's arena; see csrc/cpu/collectives/collectives.h.")
      .def(py::init<const std::string&, int, int, double, double>(), arg("path"), arg("tp_rank"), arg("pp_rank"), arg("timeout_s"),
           arg("step_timeout_s"))
      .def("all_reduce", &call_all_reduce, Released(), arg("x"))
      .def("all_gather", &call_all_gather, Released(), arg("x"), arg("out"), arg("columns"))
      .def("reduce_scatter", &call_reduce_scatter, Released(), arg("x"), arg("out"), arg("columns"))
      .def("broadcast", &call_broadcast, Released(), arg("x"), arg("root"))
      .def("barrier", [](BoundComm& comm) { comm.barrier(); }, Released())
      .def("send_next", &call_send, Released(), arg("x"))
      .def("recv_prev", &call_receive, Released(), arg("x"))
      .def("abort", [](BoundComm& comm) { comm.abort(); });
}
