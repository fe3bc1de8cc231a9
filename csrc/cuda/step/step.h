// The fused optimizer step on CUDA, on raw memory and a stream: a pass that checks gradients, then
// one that steps; between them, if the rule needs norms of parameters, one that measures them. The
// host does not wait, nothing is allocated on the device, and a graph can capture the step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "math/step_scalars.h"
#include "math/update_scale.h"
#include "plan/task.h"

namespace apex_mp::cuda {

// The most rows that are reported if gradients hold inf or NaN.
constexpr int kRowsNamed = 8;

// The result of a step in device memory; a math::GroupOutcome for each group follows it.
struct StepOutcome {
  float found_inf;                     // 1: nothing was stepped
  math::LossScaleState loss_scale;     // for the next step; 0 if there is none
  double scale;                        // what scaled gradients were divided by
  double norm;                         // of all gradients, unscaled, before clipping; NaN if norms
                                       // were not wanted
  int32_t nonfinite_rows[kRowsNamed];  // the first ones, of those that have a gradient, then -1;
                                       // none if norms were not wanted
};

static_assert(sizeof(StepOutcome) % 16 == 0);  // Nothing lies between it and the groups'.

struct StepRun {
  void* memory;  // StepTable::bytes() of it on the device, after StepTable::upload()
  step::LossScale loss_scale;
  bool norms = false;     // take norms even without clipping
  bool captured = false;  // groups stay in memory as they are: a replay must read them there
  step::Passes passes = step::Passes::kAll;
};
// A graph fixes what is not in memory: gradients' addresses, whether to check and to measure norms,
// numbers of the task that are not pointers, and the rule of the loss scale. To begin to clip
// between replays, capture with norms.

struct StepMemory;

// The data of a task in device memory, except gradients' addresses, which change from step to step.
// Only one stream may use a table at a time, as is so for the parameters.
class StepTable {
 public:
  // A row with grad.data == nullptr has no gradient yet. Throws std::length_error for more than
  // 2**31 chunks.
  explicit StepTable(const step::Task& task);

  // Whether this table serves the task: same memory, dtypes, sizes and groups of rows. Gradients
  // may have moved, come or gone; options of groups may have changed.
  bool fits(const step::Task& task) const;

  // The bytes of device memory that the table needs, at an address aligned to 16.
  int64_t bytes() const { return bytes_; }

  // Writes the table to the device, groups included, before the first step. Kernels carry it as an
  // argument, so that a graph can capture it.
  void upload(void* memory, cudaStream_t stream) const;

  // Whether groups in device memory are those of the task, once the launched work is done.
  bool knows_groups(const step::Task& task) const;

  // Updates groups in device memory: between replays of a graph. Not under capture.
  void refresh_groups(const step::Task& task, void* memory, cudaStream_t stream);

  // Launches the step, or some of its passes. The table must fit the task.
  void run(const step::Task& task, const StepRun& run, cudaStream_t stream);

  // Where in the memory the StepOutcome lies, and how many bytes it and the groups' take.
  int64_t outcome_offset() const;
  int64_t outcome_bytes() const;

 private:
  StepMemory memory_at(const void* memory) const;
  void build_image();
  void check(const step::Task& task, const StepRun& run, cudaStream_t stream);
  void remember(const std::vector<step::Group>& groups);
  void upload_groups(void* memory, cudaStream_t stream) const;

  int32_t rule_;
  std::vector<step::Row> rows_;
  std::vector<step::Group> groups_;  // as device memory holds them
  int64_t chunk_size_;
  bool has_wide_state_ = false;
  bool has_narrow_state_ = false;
  bool has_coded_state_ = false;
  std::vector<int32_t> first_chunk_;  // of each row, and the number of all
  std::vector<char> image_;           // the first part of device memory
  int64_t bytes_ = 0;
};

}  // namespace apex_mp::cuda
