// The Python module _plan_on_kernels: the classes of csrc/plan/, whose steps are those of
// csrc/cuda/.
#include <c10/util/Exception.h>

#include "cpu/step/step.h"
#include "plan/module.h"

namespace apex_mp::cpu {

step::Outcome run(const step::Task&, step::Passes, Workspace&) {
  TORCH_CHECK(false, "cuda_on_cpu: this step was taken on the CPU");
}

const Kernels& kernels() { TORCH_CHECK(false, "cuda_on_cpu: this was done on the CPU"); }

}  // namespace apex_mp::cpu

namespace {

std::vector<int64_t> recorded;  // on which streams: the allocator would keep memory for these

void record_stream(at::Tensor&, at::Stream stream) { recorded.push_back(stream.id()); }

std::vector<int64_t> take_recorded() { return std::exchange(recorded, {}); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, library) { library.impl("record_stream", &record_stream); }

PYBIND11_MODULE(_plan_on_kernels, module) {
  apex_mp::step::define_classes(module);
  module.def("take_recorded", &take_recorded);
}
