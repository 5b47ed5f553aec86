// Which instruction set the kernels use: found once at start, overridable for tests. Kernel files ask isa() per call.
#pragma once

#include <string>

namespace trireme {

// Ordered: a machine that supports one supports all before it.
enum class Isa { portable = 0, avx2 = 1, avx512vnni = 2 };

// The best set this machine has (AVX2 means AVX2 + FMA + F16C; AVX-512 VNNI means F + BW + VL + DQ + VNNI on top).
Isa best_isa();

// The set in use: best_isa() unless set_isa was called.
Isa isa();

// Throws std::invalid_argument when this machine lacks it. For tests; not while kernels run.
void set_isa(Isa value);

const char* isa_name(Isa value);

// Throws std::invalid_argument on an unknown name.
Isa isa_from_name(const std::string& name);

}  // namespace trireme
