// The fused optimizer step on CUDA, on raw memory and a stream: a pass that checks gradients, then
// one that steps; between them, if the rule asks for norms of parameters, one that measures. It
// waits for nothing, allocates nothing on the device, and can be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "math/step_scalars.h"
#include "math/update_scale.h"
#include "step/task.h"

namespace apex_mp::cuda {

// Of the rows whose gradients hold inf or NaN, as many are named.
constexpr int kRowsNamed = 8;

// What a step leaves in device memory; behind it lies one math::GroupOutcome for each group.
struct StepOutcome {
  float found_inf;                     // 1: nothing was stepped
  math::LossScaleState loss_scale;     // for the next step; 0 if there is none
  double scale;                        // what scaled gradients were divided by
  double norm;                         // of all gradients, unscaled; NaN if norms were not wanted
  int32_t nonfinite_rows[kRowsNamed];  // the first ones, of those that have a gradient, then -1;
                                       // none if norms were not wanted
};

static_assert(sizeof(StepOutcome) % 16 == 0);  // Nothing lies between it and the groups'.

struct StepRun {
  void* memory;  // StepTable::bytes() of it on the device, after StepTable::upload()
  step::LossScale loss_scale;
  bool norms = false;     // take norms even without clipping
  bool captured = false;  // groups stay in memory as they are: a replay must read them there
};
// A graph keeps what is not in memory: gradients' addresses, whether to check and to take norms,
// numbers of the task that are no pointers, and the rule of the loss scale. So who may begin to
// clip between replays captures with norms.

struct StepMemory;

// What the device must know of a task, but for gradients' addresses, which move from step to step.
// One table serves one stream at a time: ordering steps on parameters orders them on it.
class StepTable {
 public:
  // A row whose grad.data is nullptr has no gradient yet. Throws std::length_error for more than
  // 2**31 chunks.
  explicit StepTable(const step::Task& task);

  // Whether this table serves the task: same memory, dtypes, sizes and groups of rows. Gradients
  // may have moved, come or gone; options of groups may have changed.
  bool fits(const step::Task& task) const;

  // Of device memory, aligned to 16.
  int64_t bytes() const { return bytes_; }

  // Writes the table there, groups included: before the first step. By kernels that carry it as an
  // argument, so that a graph may capture it.
  void upload(void* memory, cudaStream_t stream) const;

  // Whether groups in device memory are those of the task, after what has been launched.
  bool knows_groups(const step::Task& task) const;

  // Updates groups in device memory: between replays of a graph. Not under capture.
  void refresh_groups(const step::Task& task, void* memory, cudaStream_t stream);

  // Launches the step. The table must fit the task.
  void run(const step::Task& task, const StepRun& run, cudaStream_t stream);

  // Where in the memory the StepOutcome lies, and how many bytes it and the groups' take.
  int64_t outcome_offset() const;
  int64_t outcome_bytes() const;

 private:
  StepMemory memory_at(const void* memory) const;
  void build_image();
  void remember(const std::vector<step::Group>& groups);
  void upload_groups(void* memory, cudaStream_t stream) const;

  int32_t rule_;
  std::vector<step::Row> rows_;
  std::vector<step::Group> groups_;  // as device memory holds them
  int64_t chunk_size_;
  bool has_wide_state_ = false;
  bool has_narrow_state_ = false;
  std::vector<int32_t> first_chunk_;  // of each row, and the number of all
  std::vector<char> image_;           // the first part of device memory
  int64_t bytes_ = 0;
};

}  // namespace apex_mp::cuda
