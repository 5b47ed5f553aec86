// The draw of sampling.h compiled for portable.
#include "sampling_impl.h"

namespace trireme {

int race_portable(const RaceArgs& a) { return TRIREME_VARIANT::race(a); }

}  // namespace trireme
