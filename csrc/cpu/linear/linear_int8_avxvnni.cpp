// GEMMs with int8 weights for AVX2 and AVX-VNNI; see linear_int8_impl.h.
#define TRIREME_INT8_VECTORS 256
#include "cpu/linear/linear_int8_impl.h"

namespace trireme {

Int8Kernels int8_kernels_avxvnni() { return {quantize_whole_row<Quad::flip>, int8_tiles}; }

}  // namespace trireme
