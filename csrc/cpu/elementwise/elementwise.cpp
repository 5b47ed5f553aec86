// Drivers of the norms, rotary embedding and activation: split the tokens over the pool if the work is worth it.
#include <algorithm>

#include "cpu/cpuinfo.h"
#include "cpu/elementwise/ops.h"
#include "cpu/threads.h"

namespace trireme {
namespace {

constexpr int64_t kLargeElements = 32768;  // below, one thread is faster than waking others

// f(first, last) over [0, count) in a few spans per thread.
template <class F>
void in_spans(int count, F&& f) {
  const int num_spans = std::min(count, 4 * num_threads());
  parallel(num_spans, [&](int span, int) {
    const auto cut = [&](int64_t i) { return static_cast<int>(count * i / num_spans); };
    f(cut(span), cut(span + 1));
  });
}

}  // namespace

const OpsKernels& ops_kernels() {
#if defined(__x86_64__)
  switch (vectors()) {
    case Vectors::avx512: return ops_kernels_avx512();
    case Vectors::avx2: return ops_kernels_avx2();
    case Vectors::portable: break;
  }
#endif
  return ops_kernels_portable();
}

bool is_large(const NormArgs& a) { return static_cast<int64_t>(a.rows) * a.width >= kLargeElements; }
bool is_large(const SwigluArgs& a) { return static_cast<int64_t>(a.rows) * a.width * 4 >= kLargeElements; }
bool is_large(const RopeArgs& a) {
  return static_cast<int64_t>(a.tokens) * (a.q_heads + 4 * a.kv.heads) * a.kv.dim >= kLargeElements;
}

void rms_norm(const NormArgs& a) {
  const OpsKernels& kernels = ops_kernels();
  if (!is_large(a)) return kernels.norm_rows(a, 0, a.rows);
  in_spans(a.rows, [&](int first, int last) { kernels.norm_rows(a, first, last); });
}

void rope_and_cache(const RopeArgs& a) {
  const OpsKernels& kernels = ops_kernels();
  if (!is_large(a)) return kernels.rope_tokens(a, 0, a.tokens);
  in_spans(a.tokens, [&](int first, int last) { kernels.rope_tokens(a, first, last); });
}

void swiglu(const SwigluArgs& a) {
  const OpsKernels& kernels = ops_kernels();
  if (!is_large(a)) {
    for (int row = 0; row < a.rows; ++row) kernels.swiglu_span(a, row, 0, a.width);
    return;
  }
  in_spans(a.rows, [&](int first, int last) {
    for (int row = first; row < last; ++row) kernels.swiglu_span(a, row, 0, a.width);
  });
}

}  // namespace trireme
