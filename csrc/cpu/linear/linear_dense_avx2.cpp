// GEMMs with dense weights, the avx2 variant; see linear_dense_impl.h.
#include "cpu/linear/linear_dense_impl.h"

namespace trireme {

TileFn dense_tiles_avx2(WeightKind kind) { return TRIREME_VARIANT::dense_kernel(kind); }

}  // namespace trireme
