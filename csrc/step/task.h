// One optimizer step on raw memory: the plan builds it, cpu/step/ and cuda/step/ execute it. Plain
// C++, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "dtype.h"
#include "math/rules.h"
#include "math/update_scale.h"

namespace apex_mp::step {

// The memory of one tensor and its dtype.
struct Array {
  void* data;
  DType dtype;
};

// One parameter. Element i of one array belongs to element i of the others.
struct Row {
  Array param;
  Array grad;  // on CUDA, data == nullptr: there is none now, and nothing is stepped
  Array copy;  // receives the new parameter; data == nullptr: there is none. A kRemainder is read,
               // too: then what is stepped is the float that it and the parameter are parts of
  Array tensors[math::kMaxTensors];   // of state; data == nullptr: there is none
  float* numbers[math::kMaxNumbers];  // of state; nullptr: there is none
  int64_t size;
  int32_t group;
  int32_t position;          // of the parameter in the optimizer
  bool scaled;               // the gradient is scaled by the loss scale
  bool writes_grad = false;  // write the unscaled gradient over it; else it is only read
};

// A number that the host knows (pointer == nullptr), or a factor on one in the device's memory.
struct Number {
  const void* pointer = nullptr;
  bool is_double = false;  // what pointer points to; else a float
  double value = 1.0;
};

// The options of one parameter group.
struct Group {
  double options[math::kMaxOptions];  // of the rule; the rest is 0
  Number lr;
  double max_norm;  // 0: do not clip
  bool maximize;
  bool stochastic_rounding;  // of state in bfloat16, see math/rounding.h
  bool has_norm;             // whether the caller has given the norm of the gradients, as they lie
  Number norm;
};

// A dynamic loss scale in the device's memory, which the step updates after it has read
// Task::scale, the divisor of gradients.
struct LossScale {
  float* scale = nullptr;  // nullptr: there is none
  int* good_steps = nullptr;
  int* overflows = nullptr;
  math::LossScaleRule rule = {};
};

// All rows lie on one device and are sorted by group.
struct Task {
  int32_t rule = 0;         // number in math::AllRules
  const char* caller = "";  // the optimizer's name, for messages
  std::vector<Row> rows;
  std::vector<Group> groups;
  Number scale;                      // the loss scale: scaled gradients are divided by it
  bool clip_by_global_norm = false;  // by the norm of all groups, not by each group's own
  bool check = false;                // look for inf and NaN; if there is any, do nothing
  const float* found_inf = nullptr;  // the same, already known; nullptr: nothing is known
};

// The outcome of a step.
struct Outcome {
  bool is_known = true;  // else the host has not waited for it, and the rest says nothing
  bool found_inf = false;
  std::vector<double> norms;  // of each group's unscaled gradients; empty if none was measured
  // The first ones, by number among the rows with a gradient; on CUDA only.
  std::vector<int32_t> nonfinite_rows;
};

}  // namespace apex_mp::step
