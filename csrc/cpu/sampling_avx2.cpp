// The draw of sampling.h compiled for avx2.
#include "sampling_impl.h"

namespace trireme {

int race_avx2(const RaceArgs& a) { return TRIREME_VARIANT::race(a); }

}  // namespace trireme
