// Detects weights of split masters that were written since their last step. For the step plan.
#pragma once

#include <cstdint>
#include <vector>

#include "step/row_memory.h"

namespace apex_mp::step {

// On the CPU a few numbers of each weight are compared. On other devices, where the host would
// wait, its version is compared, which a write through .data does not increment.
class WeightVersions {
 public:
  // Records the weights of rows that were stepped; entries of other rows stay.
  void record(const std::vector<RowTensors>& rows);

  // Whether the weight of a row was written since it was recorded, and its remainder was not.
  bool changed(const RowTensors& row) const;

 private:
  struct Entry {
    const at::TensorImpl* weight = nullptr;  // these two: addresses to compare, not owned
    const at::TensorImpl* remainder = nullptr;
    int64_t remainder_version = 0;
    uint64_t weight_facts = 0;
  };

  std::vector<Entry> entries_;  // by the position of the parameter
};

}  // namespace apex_mp::step
