// csrc/cuda/operators/operators.cpp, registered for CPU tensors: to its code they are on a CUDA
// device. First everything that it includes, and what these include: the macros below are for it
// alone.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/kernels.h"
#include "execution.h"
#include "op_checks.h"
#include "tensor_facts.h"

#define CUDA CPU
// Asked of lr, inv_scale and the like: does the host know the number, or does the kernel read it?
#define is_cpu() defined() && cuda_on_cpu::settings.numbers_on_host

#include "cuda/operators/operators.cpp"
