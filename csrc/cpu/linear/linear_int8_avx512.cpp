// GEMMs with int8 weights for AVX-512 VNNI; see linear_int8_impl.h.
#define TRIREME_INT8_VECTORS 512
#include "cpu/linear/linear_int8_impl.h"

namespace trireme {

Int8Kernels int8_kernels_avx512() { return {quantize_whole_row<Quad::flip>, int8_tiles}; }

}  // namespace trireme
