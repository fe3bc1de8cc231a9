// The fused step of csrc/cuda/step/step.h for ctypes: inside/step_structs.py mirrors the structs.
#include <cstring>
#include <exception>
#include <string>

#include "cuda/step/step.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using apex_mp::cuda::StepRun;
using apex_mp::cuda::StepTable;
namespace step = apex_mp::step;

namespace {

struct DriverTask {
  int32_t rule;
  const step::Row* rows;
  int64_t row_count;
  const step::Group* groups;
  int64_t group_count;
  step::Number scale;
  bool clip_by_global_norm;
  bool check;
  const float* found_inf;
};

step::Task task_of(const DriverTask& task) {
  return {task.rule,
          "driver",
          {task.rows, task.rows + task.row_count},
          {task.groups, task.groups + task.group_count},
          task.scale,
          task.clip_by_global_norm,
          task.check,
          task.found_inf};
}

std::string error;

// What a C++ exception says, or nullptr if there is none.
template <typename Body>
const char* message_of(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
    return error.c_str();
  }
}

}  // namespace

EXPORT void step_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(step::Row), sizeof(step::Group), sizeof(DriverTask),
                         sizeof(StepRun), sizeof(apex_mp::cuda::StepOutcome)};
  std::memcpy(sizes, all, sizeof(all));
}

EXPORT const char* step_new(const DriverTask* task, StepTable** table) {
  return message_of([&] { *table = new StepTable(task_of(*task)); });
}

EXPORT void step_delete(StepTable* table) { delete table; }

EXPORT int64_t step_bytes(const StepTable* table) { return table->bytes(); }

EXPORT int64_t step_outcome_offset(const StepTable* table) { return table->outcome_offset(); }

EXPORT int64_t step_outcome_bytes(const StepTable* table) { return table->outcome_bytes(); }

EXPORT bool step_fits(const StepTable* table, const DriverTask* task) {
  return table->fits(task_of(*task));
}

EXPORT bool step_knows_groups(const StepTable* table, const DriverTask* task) {
  return table->knows_groups(task_of(*task));
}

EXPORT void step_upload(const StepTable* table, void* memory) { table->upload(memory, nullptr); }

EXPORT const char* step_refresh_groups(StepTable* table, const DriverTask* task, void* memory) {
  return message_of([&] { table->refresh_groups(task_of(*task), memory, nullptr); });
}

EXPORT const char* step_run(StepTable* table, const DriverTask* task, const StepRun* run) {
  return message_of([&] { table->run(task_of(*task), *run, nullptr); });
}
