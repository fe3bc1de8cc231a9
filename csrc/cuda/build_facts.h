// Facts of the build that only the CUDA compiler knows; module.cpp shows them to Python.
#pragma once

namespace apex_mp::cuda {

// The architectures that there is code for, as nvcc spells them: "800,900".
const char* built_archs();

// The toolkit's version as CUDART_VERSION spells it: 13000 is 13.0.
int built_version();

}  // namespace apex_mp::cuda
