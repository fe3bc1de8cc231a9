// The Python module apex_mp._C: facts of the build, and the objects of the step plan. Importing it
// registers the operators.
#include "plan/module.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>

#include "cpu/level.h"
#ifdef APEX_MP_WITH_CUDA
#include "cuda/build_facts.h"
#endif

#define APEX_MP_SPELL_EXPANDED(x) #x
#define APEX_MP_SPELL(x) APEX_MP_SPELL_EXPANDED(x)

namespace apex_mp {
namespace {

namespace py = pybind11;

#ifdef APEX_MP_WITH_CUDA
constexpr bool kWithCuda = true;

py::object cuda_version() {
  const int version = cuda::built_version();
  return py::str(std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10));
}

// "800,1210" becomes "8.0 12.1", the spelling of TORCH_CUDA_ARCH_LIST.
std::string cuda_archs() {
  std::istringstream list(cuda::built_archs());
  std::string spelled;
  for (std::string arch; std::getline(list, arch, ',');) {
    const int number = std::stoi(arch);
    if (!spelled.empty()) spelled += ' ';
    spelled += std::to_string(number / 100) + "." + std::to_string(number / 10 % 10);
  }
  return spelled;
}
#else
constexpr bool kWithCuda = false;

py::object cuda_version() { return py::none(); }

std::string cuda_archs() { return ""; }
#endif

std::string compiler() {
#if defined(__clang__)
  return __VERSION__;
#elif defined(__GNUC__)
  return std::string("GCC ") + __VERSION__;
#elif defined(_MSC_VER)
  return "MSVC " + std::to_string(_MSC_VER);
#else
  return "unknown";
#endif
}

#ifdef NDEBUG
constexpr bool kDebug = false;
#else
constexpr bool kDebug = true;
#endif

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("with_cuda") = kWithCuda;
  module.attr("cuda_version") = cuda_version();
  module.attr("cuda_archs") = cuda_archs();
  module.attr("torch_version") = APEX_MP_SPELL(APEX_MP_TORCH_VERSION);
  module.attr("compiler") = compiler();
  module.attr("debug") = kDebug;
  module.def("cpu_level", &cpu::level_name);
  module.def("cpu_levels", &cpu::supported_levels);
  module.def("set_cpu_level", &cpu::set_level, py::arg("level"));
  step::define_classes(module);
}

}  // namespace apex_mp
