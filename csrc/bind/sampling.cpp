// Bindings of cpu/sampling/sampling.h. The arrays of logits processors, whose addresses are in the jobs, are kept alive by
// workers/sampling/native_sampler.py during the call.
#include <pybind11/pybind11.h>

#include <string>

#include "bind/cpu_views.h"
#include "cpu/sampling/sampling.h"

namespace py = pybind11;
using namespace trireme;
using namespace trireme::cpu;

namespace {

// Where a row's log-probabilities go: its token's and then those of the likeliest ones.
struct Best {
  int count;  // of the likeliest
  int32_t* ids;
  float* logprobs;
  int32_t* ranks;
};

Best read_best(const char* op, int64_t rows, const TensorView& best_ids, const TensorView& logprobs, const TensorView& ranks) {
  const Operand ids = operand(op, "best_ids", best_ids);
  ids.is(DType::i32).dense({rows, kAny});
  const int64_t width = best_ids.shape[1];
  if (width < 1 || width > 1 + kMaxBest) ids.fail("1 to " + std::to_string(1 + kMaxBest) + " wide");
  operand(op, "logprobs", logprobs).is(DType::f32).dense({rows, width});
  operand(op, "ranks", ranks).is(DType::i32).dense({rows});
  return {to_int(width) - 1, best_ids.as<int32_t>(), logprobs.as<float>(), ranks.as<int32_t>()};
}

void read_logits(const char* op, const TensorView& logits) {
  const Operand values = operand(op, "logits", logits);
  values.is(DType::f32).rows(kAny, kAny);
  if (logits.shape[1] < 1) values.fail("of a vocabulary that is not empty");
}

void call_sample(const TensorView& logits, const TensorView& jobs, const TensorView& tokens, const TensorView& peaks, const TensorView& best_ids,
                 const TensorView& logprobs, const TensorView& ranks) {
  constexpr const char* op = "sample_rows";
  const int64_t rows = logits.shape[0];
  read_logits(op, logits);
  operand(op, "jobs", jobs).is(DType::u8).dense({rows * static_cast<int64_t>(sizeof(SampleJob))}).aligned(alignof(SampleJob));
  operand(op, "tokens", tokens).is(DType::i32).dense({rows});
  operand(op, "peaks", peaks).is(DType::f32).dense({rows});
  const Best best = read_best(op, rows, best_ids, logprobs, ranks);
  const SampleArgs args{logits.as<const float>(), logits.stride[0],    to_int(rows), to_int(logits.shape[1]), jobs.as<const SampleJob>(),
                        tokens.as<int32_t>(),     peaks.as<float>(),   best.count,   best.ids,                best.logprobs,
                        best.ranks};
  py::gil_scoped_release release;
  sample_rows(args);
}

void call_logprobs(const TensorView& logits, const TensorView& targets, const TensorView& best_ids, const TensorView& logprobs,
                   const TensorView& ranks) {
  constexpr const char* op = "logprob_rows";
  const int64_t rows = logits.shape[0];
  read_logits(op, logits);
  const int32_t* wanted = int32_vector(op, "targets", targets, rows);
  const Best best = read_best(op, rows, best_ids, logprobs, ranks);
  const LogprobArgs args{logits.as<const float>(), logits.stride[0], to_int(rows), to_int(logits.shape[1]), wanted,
                         best.count,               best.ids,         best.logprobs, best.ranks};
  py::gil_scoped_release release;
  logprob_rows(args);
}

int call_race(const TensorView& logits, float peak, double temperature, uint64_t key) {
  operand("race", "logits", logits).is(DType::f32).dense({kAny});
  py::gil_scoped_release release;
  return race(logits.as<const float>(), to_int(logits.shape[0]), peak, temperature, key);
}

}  // namespace

void bind_sampling(py::module_& m) {
  using py::arg;
  m.attr("SAMPLE_JOB_BYTES") = sizeof(SampleJob);
  m.attr("SAMPLE_MAX_BEST") = kMaxBest;
  m.def("sample_rows", &call_sample, arg("logits"), arg("jobs"), arg("tokens"), arg("peaks"), arg("best_ids"), arg("logprobs"), arg("ranks"),
        "Tokens (or a negative reason) and log-probabilities of all rows; see csrc/cpu/sampling/sampling.h.");
  m.def("logprob_rows", &call_logprobs, arg("logits"), arg("targets"), arg("best_ids"), arg("logprobs"), arg("ranks"),
        "Log-probabilities of one target per row and of the likeliest tokens; see csrc/cpu/sampling/sampling.h.");
  m.def("race", &call_race, arg("logits"), arg("peak"), arg("temperature"), arg("key"),
        "Winner of the Gumbel race over one row, -1 when two are too close.");
}
