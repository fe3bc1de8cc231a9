// Facts of the build that only the CUDA compiler knows.
#include "cuda/build_facts.h"

#include <cuda_runtime_api.h>

#define APEX_MP_SPELL_EXPANDED(...) #__VA_ARGS__
#define APEX_MP_SPELL(...) APEX_MP_SPELL_EXPANDED(__VA_ARGS__)

namespace apex_mp::cuda {

const char* built_archs() { return APEX_MP_SPELL(__CUDA_ARCH_LIST__); }

int built_version() { return CUDART_VERSION; }

}  // namespace apex_mp::cuda
