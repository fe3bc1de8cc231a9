// Detects weights under masters that were written since their last step. For the step plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/row_memory.h"
#include "plan/task.h"

namespace apex_mp::step {

// A weight is known by its version and address, and on the CPU by a few of its numbers: a write
// through .data changes neither version nor address, and on other devices the host would wait.
// Different positions may be compared and recorded by several threads.
class WeightVersions {
 public:
  enum class Change {
    kNone,
    kWritten,     // the weight was written, perhaps its master too
    kHidden,      // it was written, but version and address are as they were
    kNotCompared  // the master is new, or the weight has another dtype; not of split masters
  };

  // Grows the table to `count` parameters; it never shrinks.
  void resize(size_t count) { entries_.resize(std::max(count, entries_.size())); }

  // Compares the weight of a row with what was recorded; `change` returns the result.
  void compare(const RowTensors& row, const Row& memory);
  Change change(const RowTensors& row) const { return entries_[row.position].change; }

  // Records the weight of a row that was stepped; those of other rows stay.
  void record(const RowTensors& row, const Row& memory);

 private:
  struct Entry {
    const at::TensorImpl* master = nullptr;  // or remainder; an address to compare, not owned
    int64_t master_version = 0;
    DType dtype = DType::kHalf;
    uint64_t sample = 0;  // of the weight, as what follows
    int64_t weight_version = 0;
    const void* address = nullptr;
    Change change = Change::kNone;
  };

  static Entry entry_of(const RowTensors& row, const Row& memory);
  static Change change_between(const Entry& before, const Entry& now, bool split);

  std::vector<Entry> entries_;  // by the position of the parameter
};

}  // namespace apex_mp::step
