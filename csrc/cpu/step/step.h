// A whole optimizer step on the CPU. plan/plan.cpp calls it.
#pragma once

#include <vector>

#include "cpu/kernels/kernels.h"
#include "launch_plan.h"
#include "math/step_scalars.h"
#include "plan/task.h"

namespace apex_mp::cpu {

// Memory that is kept from step to step: for a small model, to allocate and free it would take
// longer than the step.
struct Workspace {
  std::vector<Chunk> chunks;
  std::vector<CheckResult> results;      // of each chunk
  std::vector<math::SumSq> sums;         // of each group
  std::vector<math::Measured> measured;  // of each chunk, if the rule needs it
  std::vector<math::Norms> norms;  // of each row, what the rule needs; the gradient's as it lies
  std::vector<math::GroupOutcome> groups;
  math::AllRules::FactorsOfEach factors;  // rows that have the same share them
  std::vector<int32_t> factors_of_row;
  std::vector<math::Rounding> rounding;  // of each row
  step::Outcome outcome;                 // of pass 1
  double scale;                          // the divisor of scaled gradients, which may clip them
};

// Takes the step, or these passes of it. Writes nothing if the task has a check and gradients hold
// inf or NaN.
step::Outcome run(const step::Task& task, step::Passes passes, Workspace& workspace);

}  // namespace apex_mp::cpu
