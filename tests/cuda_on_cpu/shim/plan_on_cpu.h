// Before each source of csrc/plan/: to it, and to its own headers, CPU tensors are on a CUDA
// device. First everything of torch that they include: the macros below are for csrc/ alone.
// Compiled once for all of them; so nothing of csrc/ may be included here.
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "execution.h"

// Asked of devices.
#define is_cuda() type() == c10::kCPU
// No memory is pinned where there is no CUDA.
#define pinned_memory(wanted) pinned_memory(false && (wanted))
// Asked of lr, the loss scale and the like, as in operators_on_cpu.cpp; and of the device then.
#define is_cpu() is_cpu() && cuda_on_cpu::settings.numbers_on_host
