// How Python gives memory of the device to the bindings: its address as a number.
#pragma once

#include <cstdint>

namespace trireme::cuda {

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) { return reinterpret_cast<T*>(address); }

}  // namespace trireme::cuda
