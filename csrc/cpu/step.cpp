// Two passes over all groups, each one parallel region: the gradients alone, if somebody asks for
// their norm or whether they are finite; then everything.
#include "cpu/step.h"

#include <ATen/record_function.h>

#include <cmath>

#include "cpu/tensors.h"

namespace apex_mp::cpu {
namespace {

using step::Row;
using step::Task;

In part(const step::Array& array, int64_t begin) {
  return {static_cast<const char*>(array.data) + begin * size_of(array.dtype), array.dtype};
}

Out part_to_write(const step::Array& array, int64_t begin) {
  if (array.data == nullptr) return {nullptr, array.dtype};
  return {static_cast<char*>(array.data) + begin * size_of(array.dtype), array.dtype};
}

void cut(const std::vector<Row>& rows, std::vector<Chunk>& chunks) {
  chunks.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    append_chunks(static_cast<int64_t>(i), rows[i].size, kChunkSize, chunks);
  }
}

bool needs_norms(const Task& task) {
  return std::any_of(task.groups.begin(), task.groups.end(), [](const step::Group& group) {
    return group.max_norm > 0.0 && !group.has_norm;
  });
}

// Returns whether a gradient is inf or NaN, and fills the sums of each group.
bool check_grads(const Task& task, Workspace& work) {
  RECORD_FUNCTION("apex_mp::check_pass", {});  // for torch.profiler
  work.results.resize(work.chunks.size());
  const Kernels& level = kernels();
  for_each_chunk(work.chunks, [&](int64_t index) {
    const Chunk& chunk = work.chunks[index];
    const Row& row = task.rows[chunk.tensor];
    work.results[index] = level.check(part(row.grad, chunk.begin), chunk.count);
  });
  // In the order of the chunks, whatever thread computed them: the sums are reproducible.
  int32_t found_inf = 0;
  for (size_t i = 0; i < work.chunks.size(); ++i) {
    const Row& row = task.rows[work.chunks[i].tensor];
    math::SumSq& sum = work.sums[row.group];
    (row.scaled ? sum.scaled : sum.plain) += work.results[i].sum_sq;
    found_inf |= work.results[i].found_inf;
  }
  return found_inf != 0;
}

// What becomes of each group's gradients; sums that nobody asked for are 0.
void decide(const Task& task, Workspace& work) {
  math::SumSq all = {0.0, 0.0};
  for (const math::SumSq& sum : work.sums) {
    all.scaled += sum.scaled;
    all.plain += sum.plain;
  }
  work.groups.clear();
  for (size_t i = 0; i < task.groups.size(); ++i) {
    const step::Group& group = task.groups[i];
    const math::ClipRule rule = {group.max_norm, group.maximize, group.has_norm, group.norm.value};
    const math::SumSq& clipped = task.clip_by_global_norm ? all : work.sums[i];
    work.groups.push_back(math::group_outcome(rule, work.sums[i], clipped, task.scale.value));
  }
}

// Counts the step of every row, and finds its factors: those of the row before if it is in the same
// group and has taken as many steps, because powers are dear.
void count_steps(const Task& task, Workspace& work) {
  work.factors.clear();
  work.factors_of_row.clear();
  const Row* last = nullptr;
  for (const Row& row : task.rows) {
    *row.step += 1.0f;
    if (last == nullptr || last->group != row.group || last->scaled != row.scaled ||
        *last->step != *row.step) {
      const step::Group& group = task.groups[row.group];
      const math::GroupOutcome& grads = work.groups[row.group];
      work.factors.push_back(
          math::adam_factors(group.adam, group.lr.value, *row.step,
                             row.scaled ? grads.scaled_factor : grads.plain_factor));
    }
    work.factors_of_row.push_back(static_cast<int32_t>(work.factors.size()) - 1);
    last = &row;
  }
}

void update(const Task& task, const Workspace& work) {
  RECORD_FUNCTION("apex_mp::adam_pass", {});
  const Kernels& level = kernels();
  for_each_chunk(work.chunks, [&](int64_t index) {
    const Chunk& chunk = work.chunks[index];
    const Row& row = task.rows[chunk.tensor];
    level.adam({part_to_write(row.param, chunk.begin), part(row.grad, chunk.begin),
                part_to_write(row.exp_avg, chunk.begin), part_to_write(row.exp_avg_sq, chunk.begin),
                part_to_write(row.copy, chunk.begin), chunk.count},
               work.factors[work.factors_of_row[chunk.tensor]]);
    if (!row.writes_grad) return;
    // The chunk is still in the cache.
    level.unscale(part(row.grad, chunk.begin), part_to_write(row.grad, chunk.begin), chunk.count,
                  1.0 / task.scale.value);
  });
}

}  // namespace

step::Outcome run(const Task& task, Workspace& work) {
  cut(task.rows, work.chunks);
  work.sums.assign(task.groups.size(), {0.0, 0.0});
  const bool reads_grads = task.check || needs_norms(task);
  step::Outcome outcome;
  outcome.found_inf = reads_grads && check_grads(task, work) && task.check;
  decide(task, work);
  for (size_t i = 0; reads_grads && i < work.groups.size(); ++i) {
    outcome.norms.push_back(work.groups[i].norm);
  }
  if (outcome.found_inf) return outcome;
  count_steps(task, work);
  update(task, work);
  return outcome;
}

}  // namespace apex_mp::cpu
