// What only the CUDA compiler knows of the build; module.cpp shows it to Python.
#pragma once

namespace apex_mp::cuda {

// The architectures that there is code for, as nvcc spells them: "800,900".
const char* built_archs();

// The toolkit's version as CUDART_VERSION spells it: 13000 is 13.0.
int built_version();

}  // namespace apex_mp::cuda
