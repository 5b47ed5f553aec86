// The draw of sampling.h compiled for avx512.
#include "sampling_impl.h"

namespace trireme {

int race_avx512(const RaceArgs& a) { return TRIREME_VARIANT::race(a); }

}  // namespace trireme
