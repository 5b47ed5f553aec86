// Chooses the kernel of the draw by instruction set.
#include "sampling.h"

#include "cpuinfo.h"

namespace trireme {

int race(const RaceArgs& a) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::avx512vnni: return race_avx512(a);
    case Isa::avx2: return race_avx2(a);
    case Isa::portable: break;
  }
#endif
  return race_portable(a);
}

}  // namespace trireme
