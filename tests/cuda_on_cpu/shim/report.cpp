// Names of kernels, and a last line after a sanitizer's report. Not instrumented itself.
#include "report.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>

#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_cpu {
namespace {

std::string kernel_name;
long long blocks;

// A kernel lies in an anonymous namespace, so that only its debug information has its name.
std::string name_of([[maybe_unused]] const void* kernel) {
#ifdef CUDA_ON_CPU_ASAN
  static std::map<const void*, std::string> names;
  std::string& name = names[kernel];
  if (name.empty()) {
    char text[256] = "";
    // One byte further: it looks at what stands before a return address.
    void* inside = const_cast<char*>(static_cast<const char*>(kernel) + 1);
    __sanitizer_symbolize_pc(inside, "%f", text, sizeof(text));
    name = text;
    name = name.substr(name.rfind(':') + 1);  // The name alone, without namespaces.
  }
  return name;
#else
  return "(unknown: built without sanitizers)";
#endif
}

void say_where_and_abort(int) {
  char text[512];
  const int length =
      std::snprintf(text, sizeof(text),
                    "\ncuda_on_cpu: the error above is one of %s, block %u of %lld, thread %u\n",
                    kernel_name.c_str(), blockIdx.x, blocks, threadIdx.x);
  if (length > 0 && write(STDERR_FILENO, text, length) < 0) _exit(1);
  std::signal(SIGABRT, SIG_DFL);
  std::raise(SIGABRT);
}

void (*old_handler)(int) = SIG_DFL;

}  // namespace

Reporting::Reporting(const Grid& grid) {
  kernel_name = name_of(grid.kernel);
  blocks = grid.blocks;
  old_handler = std::signal(SIGABRT, &say_where_and_abort);
}

Reporting::~Reporting() { std::signal(SIGABRT, old_handler); }

void fail(const std::string& what) {
  throw std::runtime_error("cuda_on_cpu: " + kernel_name + ", block " + std::to_string(blockIdx.x) +
                           " of " + std::to_string(blocks) + ": " + what);
}

std::string place(std::source_location where) {
  const char* file = where.file_name();
  const char* slash = std::strrchr(file, '/');
  return std::string(slash == nullptr ? file : slash + 1) + ':' + std::to_string(where.line());
}

}  // namespace cuda_on_cpu
