// Kernels of GGUF's types of 5 and 8 bits with a float16 scale for 32 values.
#include "cuda/gemm/block_dots.cuh"

namespace trireme::cuda {

TRIREME_BLOCK_KERNELS(, Q5_0)
TRIREME_BLOCK_KERNELS(, Q5_1)
TRIREME_BLOCK_KERNELS(, Q8_0)

}  // namespace trireme::cuda
