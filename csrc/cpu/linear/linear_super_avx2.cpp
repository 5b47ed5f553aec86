// GEMMs with the block kinds of 256 values, for AVX2; see linear_blocks_avx2.h.
#include "cpu/linear/linear_blocks_avx2.h"

namespace trireme {

TileFn super_tiles_avx2(WeightKind kind) {
  switch (kind) {
    case WeightKind::q2_k: return block_tiles<WeightKind::q2_k>;
    case WeightKind::q3_k: return block_tiles<WeightKind::q3_k>;
    case WeightKind::q4_k: return block_tiles<WeightKind::q4_k>;
    case WeightKind::q5_k: return block_tiles<WeightKind::q5_k>;
    case WeightKind::q6_k: return block_tiles<WeightKind::q6_k>;
    case WeightKind::iq4_xs: return block_tiles<WeightKind::iq4_xs>;
    default: return nullptr;
  }
}

}  // namespace trireme
