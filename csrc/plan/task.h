// One optimizer step on raw memory: the plan builds it, cpu/step/ and cuda/step/ execute it. Plain
// C++, no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
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

inline bool operator==(const Array& one, const Array& other) {
  return one.data == other.data && one.dtype == other.dtype;
}

// One parameter. Element i of one array belongs to element i of the others.
struct Row {
  Array param;
  Array grad;  // on CUDA, data == nullptr: there is none now, and nothing is stepped
  Array copy;  // receives the new parameter; data == nullptr: there is none. A kRemainder is read,
               // too: then what is stepped is the float that it and the parameter are parts of
  Array tensors[math::kMaxTensors];       // of state; data == nullptr: there is none
  uint8_t* exponents[math::kMaxTensors];  // of tensors of kCode, see math/codes.h; else nullptr
  float* numbers[math::kMaxNumbers];      // of state; nullptr: there is none
  int64_t size;
  int32_t group;
  int32_t position;          // of the parameter in the optimizer
  bool scaled;               // the gradient is scaled by the loss scale
  bool writes_grad = false;  // write the unscaled gradient over it; else it is only read
  bool copy_counts = false;  // the parameter is a whole master of the copy, see math/split.h
};

inline bool operator==(const Row& one, const Row& other) {
  return one.param == other.param && one.grad == other.grad && one.copy == other.copy &&
         std::equal(one.tensors, std::end(one.tensors), other.tensors) &&
         std::equal(one.exponents, std::end(one.exponents), other.exponents) &&
         std::equal(one.numbers, std::end(one.numbers), other.numbers) && one.size == other.size &&
         one.group == other.group && one.position == other.position && one.scaled == other.scaled &&
         one.writes_grad == other.writes_grad && one.copy_counts == other.copy_counts;
}

// A number that the host knows (pointer == nullptr), or a factor on one in the device's memory.
struct Number {
  const void* pointer = nullptr;
  bool is_double = false;  // what pointer points to; else a float
  double value = 1.0;
};

inline bool operator==(const Number& one, const Number& other) {
  return one.pointer == other.pointer && one.is_double == other.is_double &&
         one.value == other.value;
}

// The options of one parameter group.
struct Group {
  double options[math::kMaxOptions];  // of the rule; the rest is 0
  Number lr;
  double max_norm;  // 0: do not clip
  bool maximize;
  bool stochastic_rounding;  // of state in bfloat16 or one byte, see math/rounding.h
  bool has_norm;             // whether the caller has given the norm of the gradients, as they lie
  Number norm;
};

inline bool operator==(const Group& one, const Group& other) {
  return std::equal(one.options, std::end(one.options), other.options) && one.lr == other.lr &&
         one.max_norm == other.max_norm && one.maximize == other.maximize &&
         one.stochastic_rounding == other.stochastic_rounding && one.has_norm == other.has_norm &&
         one.norm == other.norm;
}

// A dynamic loss scale in the device's memory, which the step updates after it has read
// Task::scale, the divisor of gradients.
struct LossScale {
  math::LossScaleState* state = nullptr;  // nullptr: there is none
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
  double clip_to = -1.0;             // all scaled gradients are clipped to this norm before groups
                                     // are; negative: they are not
  bool has_clip_norm = false;        // whether the caller has given their norm, unscaled
  Number clip_norm;
};

// The parts of a step. kCheck may come some time before kUpdate, which must follow it with an equal
// task.
enum class Passes { kAll, kCheck, kUpdate };

// The outcome of a step, or of its check.
struct Outcome {
  bool is_known = true;  // else the host has not waited for it, and the rest says nothing
  bool found_inf = false;
  double norm = 0.0;          // of all unscaled gradients before clipping, if norms were measured
  std::vector<double> norms;  // likewise of each group's; empty if none was measured
  // The first ones, by number among the rows with a gradient; on CUDA only.
  std::vector<int32_t> nonfinite_rows;
};

}  // namespace apex_mp::step
