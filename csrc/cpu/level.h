// Which instruction set the CPU kernels use. module.cpp shows it to Python.
#pragma once

#include <string>
#include <vector>

namespace apex_mp::cpu {

// The level that kernels() uses: "baseline", "avx2" or "avx512". At first it is the best one of the
// processor, or the one in the environment variable APEX_MP_CPU_LEVEL.
const char* level_name();

// Choose a level by name; throws std::invalid_argument if this build or this
// processor does not support it.
void set_level(const std::string& name);

// The levels that this build and this processor support, best first.
std::vector<std::string> supported_levels();

}  // namespace apex_mp::cpu
