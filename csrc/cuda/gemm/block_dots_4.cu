// Kernels of GGUF's 4-bit types with a float16 scale per 32 values.
#include "cuda/gemm/block_dots.cuh"

namespace trireme::cuda {

TRIREME_BLOCK_KERNELS(, Q4_0)
TRIREME_BLOCK_KERNELS(, Q4_1)
TRIREME_BLOCK_KERNELS(, IQ4NL)

}  // namespace trireme::cuda
