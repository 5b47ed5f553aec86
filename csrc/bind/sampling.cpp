// Binding of the sampler. Addresses come as integers; workers/sampling/sampler.py keeps what they point to alive.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cpu/sampling/sampling.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void check(int vocab, int num_best) {
  if (vocab < 1 || num_best < 0 || num_best > trireme::kMaxBest) {
    throw std::invalid_argument("sampling over " + std::to_string(vocab) + " tokens with " + std::to_string(num_best) +
                                " likeliest; the kernels hold " + std::to_string(trireme::kMaxBest));
  }
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.attr("SAMPLE_JOB_BYTES") = sizeof(trireme::SampleJob);
  m.attr("SAMPLE_MAX_BEST") = trireme::kMaxBest;
  m.def(
      "sample_rows",
      [](Address logits, int64_t stride, int rows, int vocab, Address jobs, Address tokens, Address peaks, int num_best,
         Address best_ids, Address logprobs, Address ranks) {
        check(vocab, num_best);
        const trireme::SampleArgs args{pointer<const float>(logits),
                                       stride,
                                       rows,
                                       vocab,
                                       pointer<const trireme::SampleJob>(jobs),
                                       pointer<int32_t>(tokens),
                                       pointer<float>(peaks),
                                       num_best,
                                       pointer<int32_t>(best_ids),
                                       pointer<float>(logprobs),
                                       pointer<int32_t>(ranks)};
        py::gil_scoped_release release;
        trireme::sample_rows(args);
      },
      "Tokens (or a negative reason) and log-probabilities of all rows; see csrc/cpu/sampling/sampling.h.");
  m.def(
      "logprob_rows",
      [](Address logits, int64_t stride, int rows, int vocab, Address targets, int num_best, Address best_ids,
         Address logprobs, Address ranks) {
        check(vocab, num_best);
        const trireme::LogprobArgs args{pointer<const float>(logits),     stride,   rows,
                                        vocab,                            pointer<const int32_t>(targets),
                                        num_best,                         pointer<int32_t>(best_ids),
                                        pointer<float>(logprobs),         pointer<int32_t>(ranks)};
        py::gil_scoped_release release;
        trireme::logprob_rows(args);
      },
      "Log-probabilities of one target per row and of the likeliest tokens; see csrc/cpu/sampling/sampling.h.");
  m.def(
      "race",
      [](Address logits, int size, float peak, double temperature, uint64_t key) {
        return trireme::race(pointer<const float>(logits), size, peak, temperature, key);
      },
      py::arg("logits"), py::arg("size"), py::arg("peak"), py::arg("temperature"), py::arg("key"),
      py::call_guard<py::gil_scoped_release>(), "Winner of the Gumbel race over one row, -1 when two are too close.");
}
