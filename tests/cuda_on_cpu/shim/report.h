// Says which kernel, block and thread it was, in errors of the shim's own and of sanitizers.
#pragma once

#include <source_location>
#include <string>

#include "execution.h"

namespace cuda_on_cpu {

// While it lives, errors are said to be in this grid.
class Reporting {
 public:
  explicit Reporting(const Grid& grid);
  ~Reporting();
  Reporting(const Reporting&) = delete;
  Reporting& operator=(const Reporting&) = delete;
};

// Ends the grid: throws std::runtime_error, which torch shows as a RuntimeError. Not for fibers.
[[noreturn]] void fail(const std::string& what);

// "reduce.h:24"
std::string place(std::source_location where);

}  // namespace cuda_on_cpu
