// Kernels of GGUF's K types.
#include "cuda/gemm/block_dots.cuh"

namespace trireme::cuda {

TRIREME_BLOCK_KERNELS(, Q4K)
TRIREME_BLOCK_KERNELS(, Q5K)
TRIREME_BLOCK_KERNELS(, Q6K)

}  // namespace trireme::cuda
