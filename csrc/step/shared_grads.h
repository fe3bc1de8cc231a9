// Gradients that several parameters share, where the step writes gradients. For the plan.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "step/row_memory.h"
#include "step/task.h"

namespace apex_mp::step {

// Of rows that write one gradient the first one keeps doing so; the others read copies, which are
// added to `kept`. Throws a sentence if gradients overlap otherwise. `rows[i]` is the memory of
// `tensors[i]`, and `caller` begins the sentence.
void separate_shared_grads(const std::string& caller, std::vector<RowTensors>& tensors,
                           std::vector<Row>& rows, std::deque<at::Tensor>& kept);

}  // namespace apex_mp::step
