// GEMMs with the block kinds that have a scale per 32 values, for AVX2; see linear_blocks_avx2.h.
#include "cpu/linear/linear_blocks_avx2.h"

namespace trireme {

TileFn plain_tiles_avx2(WeightKind kind) {
  switch (kind) {
    case WeightKind::q8_0: return block_tiles<WeightKind::q8_0>;
    case WeightKind::q4_0: return block_tiles<WeightKind::q4_0>;
    case WeightKind::q4_1: return block_tiles<WeightKind::q4_1>;
    case WeightKind::q5_0: return block_tiles<WeightKind::q5_0>;
    case WeightKind::q5_1: return block_tiles<WeightKind::q5_1>;
    case WeightKind::iq4_nl: return block_tiles<WeightKind::iq4_nl>;
    case WeightKind::mxfp4: return block_tiles<WeightKind::mxfp4>;
    default: return nullptr;
  }
}

}  // namespace trireme
