// The table of CPU kernels that this process uses: for the best level of the processor, or the one
// that was set.
#include "cpu/kernels/kernels.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/level.h"

namespace apex_mp::cpu {

#if defined(__x86_64__) && defined(__GNUC__)
#define APEX_MP_X86_LEVELS 1
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif
namespace baseline {
extern const Kernels kKernels;
}

namespace {

// Best first.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> tables;
#if defined(APEX_MP_X86_LEVELS)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) tables.push_back(&avx512::kKernels);
  if (has_avx2) tables.push_back(&avx2::kKernels);
#endif
  tables.push_back(&baseline::kKernels);
  return tables;
}

const Kernels* find(const std::string& name) {
  std::string names;
  for (const Kernels* table : supported()) {
    if (name == table->level) return table;
    names += std::string(names.empty() ? "" : ", ") + table->level;
  }
  throw std::invalid_argument(
      "CPU level '" + name +
      "' (APEX_MP_CPU_LEVEL) is not to be had here; it must be one of: " + names);
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table = [] {
    const char* wish = std::getenv("APEX_MP_CPU_LEVEL");
    return wish != nullptr && *wish != '\0' ? find(wish) : supported().front();
  }();
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

const char* level_name() { return kernels().level; }

void set_level(const std::string& name) { current().store(find(name)); }

std::vector<std::string> supported_levels() {
  std::vector<std::string> names;
  for (const Kernels* table : supported()) names.emplace_back(table->level);
  return names;
}

}  // namespace apex_mp::cpu
