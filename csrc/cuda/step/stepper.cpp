// The table on the device: when it is built, the streams that use it, and captures.
#include "cuda/step/stepper.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/step/step.h"

namespace apex_mp::cuda {
namespace {

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, "apex_mp: ", what, " failed: ", cudaGetErrorString(error));
}

// Later work on `stream` waits for the present work on `other`.
void wait_for(cudaStream_t other, cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventRecord(event, other), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
  check(cudaEventDestroy(event), "cudaEventDestroy");
}

}  // namespace

// A table and its memory on the device.
struct Resident {
  StepTable table;
  at::Tensor memory;
  at::Tensor outcome;    // a part of it
  at::Tensor found_inf;  // these two: a part of that
  at::Tensor norm;
  size_t groups;
  bool captured = false;  // a graph replays it
  bool ready = false;     // the memory holds what the table says
};

struct Stepper::Impl {
  std::optional<Resident> resident;
  // Tables that steps no longer use, but graphs may. One is used again when it fits, so that there
  // are no more of them than kinds of captured steps.
  std::vector<Resident> replayed;
  std::optional<c10::cuda::CUDAStream> stream;
  bool checked_in_capture = false;  // whether the last check was captured

  bool fits(const step::Task& task) const {
    return resident.has_value() && resident->table.fits(task);
  }
  void follow(const c10::cuda::CUDAStream& current);
  void leave();
  bool take_back(const step::Task& task);
  void build(const step::Task& task, const c10::cuda::CUDAStream& current);
  void refresh(Resident& old, const step::Task& task, cudaStream_t current);
};

// Steps of one table must come one after another, whatever streams they are on.
void Stepper::Impl::follow(const c10::cuda::CUDAStream& current) {
  if (stream.has_value() && *stream != current) {
    wait_for(*stream, current);
    if (resident.has_value()) resident->memory.record_stream(current);
    for (const Resident& old : replayed) old.memory.record_stream(current);
  }
  stream = current;
}

void Stepper::Impl::leave() {
  if (resident.has_value() && resident->captured) replayed.push_back(std::move(*resident));
  resident.reset();
}

bool Stepper::Impl::take_back(const step::Task& task) {
  for (Resident& old : replayed) {
    if (!old.table.fits(task)) continue;
    Resident taken = std::move(old);
    replayed.erase(replayed.begin() + (&old - replayed.data()));
    leave();
    resident.emplace(std::move(taken));
    return true;
  }
  return false;
}

void Stepper::Impl::build(const step::Task& task, const c10::cuda::CUDAStream& current) {
  leave();
  StepTable table(task);
  const auto options = at::TensorOptions().dtype(at::kByte).device(current.device());
  const at::Tensor memory = at::empty({table.bytes()}, options);
  const at::Tensor outcome = memory.narrow(0, table.outcome_offset(), table.outcome_bytes());
  const auto number = [&](size_t offset, at::ScalarType dtype) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
    return outcome.narrow(0, static_cast<int64_t>(offset), bytes).view(dtype).squeeze(0);
  };
  resident.emplace(Resident{std::move(table), memory, outcome,
                            number(offsetof(StepOutcome, found_inf), at::kFloat),
                            number(offsetof(StepOutcome, norm), at::kDouble), task.groups.size()});
}

// Groups do not depend on which parameters have a gradient now.
void Stepper::Impl::refresh(Resident& old, const step::Task& task, cudaStream_t current) {
  if (old.groups != task.groups.size()) return;
  old.table.refresh_groups(task, old.memory.mutable_data_ptr(), current);
}

Stepper::Stepper() : impl_(std::make_unique<Impl>()) {}
Stepper::~Stepper() = default;
// Usually the table fits, and nothing is built, allocated or copied.
step::Outcome Stepper::run(const step::Task& task, step::Passes passes,
                           const step::LossScale& loss_scale, bool wait, bool once,
                           const c10::Device& device) {
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device.index());
  const bool fits = impl_->fits(task);
  StepRun run;
  run.loss_scale = loss_scale;
  run.norms = task.check;  // They cost nothing then, and say which rows are not finite.
  run.captured = is_capturing();
  // Pass 2 reads the groups in memory, and a graph replays both passes or none.
  const bool is_checked = passes == step::Passes::kUpdate && fits && impl_->resident->ready &&
                          impl_->resident->table.knows_groups(task) &&
                          run.captured == impl_->checked_in_capture;
  run.passes = passes == step::Passes::kUpdate && !is_checked ? step::Passes::kAll : passes;
  if (passes == step::Passes::kCheck) impl_->checked_in_capture = run.captured;
  if (run.captured && !once) {
    TORCH_CHECK(!wait, task.caller,
                ": this step cannot be captured in a CUDA graph, because the host waits "
                "to hear whether it found inf or NaN");
    TORCH_CHECK(fits && impl_->resident->ready && impl_->resident->table.knows_groups(task),
                task.caller,
                ": this step cannot be captured in a CUDA graph. Take one step like it "
                "outside of the capture first, with the same parameters, state and options");
    impl_->resident->captured = true;
  } else {
    if (!run.captured) impl_->follow(current);
    if (!fits && !impl_->take_back(task)) impl_->build(task, current);
    Resident& built = *impl_->resident;
    if (!built.ready) built.table.upload(built.memory.mutable_data_ptr(), current);
  }
  Resident& resident = *impl_->resident;
  run.memory = resident.memory.mutable_data_ptr();
  // Stays false if a launch fails: then some blocks have been counted, but the last one never runs.
  resident.ready = false;
  resident.table.run(task, run, current);
  resident.ready = true;
  if (wait) return read_outcome(outcome().to(at::kCPU));
  step::Outcome unknown;
  unknown.is_known = false;
  return unknown;
}

at::Tensor Stepper::outcome() const {
  TORCH_CHECK(impl_->resident.has_value(), "apex_mp: there has been no step with an outcome");
  return impl_->resident->outcome;
}

at::Tensor Stepper::found_inf() const {
  outcome();  // Throws if there is none.
  return impl_->resident->found_inf;
}

at::Tensor Stepper::norm() const {
  outcome();
  return impl_->resident->norm;
}

void Stepper::refresh_groups(const step::Task& task, const c10::Device& device) {
  if (!impl_->resident.has_value()) return;
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device.index());
  impl_->follow(current);
  impl_->refresh(*impl_->resident, task, current);
  for (Resident& old : impl_->replayed) impl_->refresh(old, task, current);
}

step::Outcome read_outcome(const at::Tensor& bytes) {
  const char* begin = static_cast<const char*>(bytes.const_data_ptr());
  StepOutcome outcome;
  std::memcpy(&outcome, begin, sizeof(outcome));
  step::Outcome result;
  result.found_inf = outcome.found_inf != 0.0f;
  result.norm = outcome.norm;
  for (const int32_t row : outcome.nonfinite_rows) {
    if (row >= 0) result.nonfinite_rows.push_back(row);
  }
  if (std::isnan(outcome.norm) && !result.found_inf) return result;  // Norms were not measured.
  const char* end = begin + bytes.numel();
  for (const char* at = begin + sizeof(outcome); at < end; at += sizeof(math::GroupOutcome)) {
    math::GroupOutcome group;
    std::memcpy(&group, at, sizeof(group));
    result.norms.push_back(group.norm);
  }
  return result;
}

}  // namespace apex_mp::cuda
