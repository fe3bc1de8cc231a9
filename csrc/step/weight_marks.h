// Remembers weights that are a part of their masters, so that one that was written since is told.
#pragma once

#include <cstdint>
#include <vector>

#include "step/row_memory.h"

namespace apex_mp::step {

// On the CPU a few numbers of each weight are compared, on other devices, where the host would
// wait, its version, which writes through .data do not count up.
class WeightMarks {
 public:
  // Remembers the weights of rows that were stepped; those of others stay as they were.
  void take(const std::vector<RowTensors>& rows);

  // Whether the weight of a row that is about to be stepped is another than it was, and its
  // remainder the same.
  bool differs(const RowTensors& row) const;

 private:
  struct Mark {
    const at::TensorImpl* weight = nullptr;  // these two: addresses to compare, not owned
    const at::TensorImpl* remainder = nullptr;
    int64_t remainder_version = 0;
    uint64_t weight_facts = 0;
  };

  std::vector<Mark> marks_;  // by the position of the parameter
};

}  // namespace apex_mp::step
