// The ops of ops.h compiled for avx2.
#include "cpu/attention/attention_impl.h"
#include "cpu/elementwise/elementwise_impl.h"

namespace trireme {

const OpsKernels& ops_kernels_avx2() {
  namespace kernels = TRIREME_VARIANT;
  static constexpr OpsKernels table = {kernels::norm_rows, kernels::rope_tokens, kernels::swiglu_span, kernels::attend,
                                       kernels::fold_parts};
  return table;
}

}  // namespace trireme
