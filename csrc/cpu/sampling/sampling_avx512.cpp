// The sampler of sampling.h compiled for avx512.
#include "cpu/sampling/sampling_impl.h"

namespace trireme {

const SampleKernels& sample_kernels_avx512() {
  namespace variant = TRIREME_VARIANT;
  static constexpr SampleKernels table = {variant::sample_row, variant::logprob_row, variant::race_all};
  return table;
}

}  // namespace trireme
