// Gradients that several parameters share, where the step writes gradients. For the plan.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "plan/row_memory.h"
#include "plan/task.h"

namespace apex_mp::step {

// If several rows write one gradient, only the first one still does; the others read copies, which
// are added to `kept`. Throws a sentence if gradients overlap in another way. `rows[i]` is the
// memory of `tensors[i]`, and `caller` begins the sentence.
void separate_shared_grads(const std::string& caller, std::vector<RowTensors>& tensors,
                           std::vector<Row>& rows, std::deque<at::Tensor>& kept);

}  // namespace apex_mp::step
