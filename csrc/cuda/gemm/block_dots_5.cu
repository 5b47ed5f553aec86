// Kernels of GGUF's 5- and 8-bit types with a float16 scale per 32 values.
#include "cuda/gemm/block_dots.cuh"

namespace trireme::cuda {

TRIREME_BLOCK_KERNELS(, Q5_0)
TRIREME_BLOCK_KERNELS(, Q5_1)
TRIREME_BLOCK_KERNELS(, Q8_0)

}  // namespace trireme::cuda
