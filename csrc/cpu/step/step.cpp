// The passes of a step over all groups, each one parallel region. The first one reads gradients, if
// the task needs their norm or a check; the last one steps. Between them, if the rule needs norms
// of parameters and updates, a pass reads everything and writes nothing.
#include "cpu/step/step.h"

#include <ATen/record_function.h>

#include <cmath>
#include <string>

#include "cpu/measure.h"
#include "math/codes.h"

namespace apex_mp::cpu {
namespace {

using step::Row;
using step::Task;

In part(const step::Array& array, int64_t begin) {
  return {static_cast<const char*>(array.data) + begin * size_of(array.dtype), array.dtype};
}

Out part_to_write(const step::Array& array, int64_t begin) {
  if (array.data == nullptr) return {nullptr, array.dtype};
  return {static_cast<char*>(array.data) + begin * any_size_of(array.dtype), array.dtype};
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
  measure(work.chunks, work.results, [&](int64_t row) { return part(task.rows[row].grad, 0); });
  return each_result(work.chunks, work.results, [&](int64_t row, double sum_sq) {
    math::SumSq& sum = work.sums[task.rows[row].group];
    (task.rows[row].scaled ? sum.scaled : sum.plain) += sum_sq;
  });
}

// Returns the norm of each row's gradient before unscaling, from the results of check_grads().
template <typename Rule>
void find_norms(const Task& task, Workspace& work) {
  const Kernels& level = kernels();
  const auto options_of = [&](const Chunk& chunk) {
    return task.groups[task.rows[chunk.tensor].group].options;
  };
  for_each_chunk(work.chunks, [&](int64_t index) {
    const Chunk& chunk = work.chunks[index];
    if (!math::wants_max<Rule>(options_of(chunk))) return;
    work.results[index].sum_sq =
        level.max_abs(part(task.rows[chunk.tensor].grad, chunk.begin), chunk.count);
  });
  for (size_t i = 0; i < work.chunks.size(); ++i) {
    const double result = work.results[i].sum_sq;
    double& norm = work.norms[work.chunks[i].tensor].grad;
    norm = math::wants_max<Rule>(options_of(work.chunks[i])) ? std::max(norm, result)
                                                             : std::hypot(norm, std::sqrt(result));
  }
}

// Fills the outcome of each group; sums that were not measured are 0.
void decide(const Task& task, Workspace& work) {
  math::SumSq all = {0.0, 0.0};
  for (const math::SumSq& sum : work.sums) {
    all.scaled += sum.scaled;
    all.plain += sum.plain;
  }
  const double scale = task.scale.value;
  work.outcome.norm = math::unscaled_norm(all, scale);
  work.scale = math::clipped_scale(
      scale, task.has_clip_norm ? task.clip_norm.value : work.outcome.norm, task.clip_to);
  work.groups.clear();
  for (size_t i = 0; i < task.groups.size(); ++i) {
    const step::Group& group = task.groups[i];
    const math::ClipRule rule = {group.max_norm, group.maximize, group.has_norm, group.norm.value};
    const math::SumSq& clipped = task.clip_by_global_norm ? all : work.sums[i];
    work.groups.push_back(math::group_outcome(rule, work.sums[i], clipped, scale, work.scale));
  }
}

// The numbers of a row's state, before the step.
struct Numbers {
  float values[math::kMaxNumbers] = {};

  explicit Numbers(const Row& row) {
    for (int i = 0; i < math::kMaxNumbers; ++i) {
      if (row.numbers[i] != nullptr) values[i] = *row.numbers[i];
    }
  }

  bool operator==(const Numbers& other) const {
    return std::equal(values, values + math::kMaxNumbers, other.values);
  }
};

// Whether the factors of a row depend on norms of its own tensors.
template <typename Rule>
constexpr bool kHasNorms = Rule::kNorm >= 0 || Rule::kRatio >= 0;

// Computes the factors of every row. A row in the same group with the same numbers as the row
// before shares its factors, because powers are expensive. If it `advances`, it also updates the
// numbers of the state.
template <typename Rule, bool advances = true>
void prepare(const Task& task, Workspace& work) {
  auto& factors = std::get<std::vector<typename Rule::template Factors<double>>>(work.factors);
  factors.clear();
  work.factors_of_row.clear();
  work.rounding.clear();
  const Row* last = nullptr;
  Numbers last_numbers{Row{}};
  double prepared[math::kMaxPrepared] = {};
  for (size_t i = 0; i < task.rows.size(); ++i) {
    const Row& row = task.rows[i];
    const Numbers numbers(row);
    if (kHasNorms<Rule> || last == nullptr || last->group != row.group ||
        last->scaled != row.scaled || !(numbers == last_numbers)) {
      const step::Group& group = task.groups[row.group];
      const math::GroupOutcome& grads = work.groups[row.group];
      const double factor = row.scaled ? grads.scaled_factor : grads.plain_factor;
      math::Norms norms = {0.0, 0.0, 0.0};
      if constexpr (kHasNorms<Rule>) norms = work.norms[i];
      norms.grad *= std::abs(factor);
      if constexpr (Rule::kPrepared > 0) {
        for (int which = 0; which < Rule::kPrepared; ++which) {
          prepared[which] = Rule::prepare(which, group.options, numbers.values, norms);
        }
      }
      factors.push_back(Rule::factors(group.options, group.lr.value, prepared, factor));
    }
    work.factors_of_row.push_back(static_cast<int32_t>(factors.size()) - 1);
    work.rounding.push_back(task.groups[row.group].stochastic_rounding
                                ? math::stochastic_rounding(row.position, numbers.values[0])
                                : math::Rounding{});
    if constexpr (advances && Rule::kNumbers > 0) {
      for (int which = 0; which < Rule::kNumbers; ++which) {
        if (row.numbers[which] == nullptr) continue;
        *row.numbers[which] = Rule::advance(which, numbers.values, prepared);
      }
    }
    last = &row;
    last_numbers = numbers;
  }
}

StepChunk part_of(const Row& row, const Chunk& chunk, const math::Rounding& rounding) {
  StepChunk part_of_row = {part_to_write(row.param, chunk.begin),
                           part(row.grad, chunk.begin),
                           part_to_write(row.copy, chunk.begin),
                           {},
                           {},
                           chunk.count,
                           row.copy_counts,
                           rounding,
                           static_cast<uint32_t>(chunk.begin)};
  for (int i = 0; i < math::kMaxTensors; ++i) {
    part_of_row.tensors[i] = part_to_write(row.tensors[i], chunk.begin);
    if (row.exponents[i] == nullptr) continue;
    part_of_row.exponents[i] = row.exponents[i] + chunk.begin / math::kCodeBlock;
  }
  return part_of_row;
}

// The norms of each row's parameter and update.
template <typename Rule>
void measure(const Task& task, Workspace& work) {
  RECORD_FUNCTION("apex_mp::measure_pass", {});
  const auto& factors =
      std::get<std::vector<typename Rule::template Factors<double>>>(work.factors);
  const MeasureKernel kernel = kernels().measure[math::AllRules::number<Rule>()];
  work.measured.resize(work.chunks.size());
  for_each_chunk(work.chunks, [&](int64_t index) {
    const Chunk& chunk = work.chunks[index];
    const StepChunk part = part_of(task.rows[chunk.tensor], chunk, math::Rounding{});
    work.measured[index] = kernel(part, &factors[work.factors_of_row[chunk.tensor]]);
  });
  // In the order of the chunks, see check_grads().
  for (size_t i = 0; i < work.chunks.size(); ++i) {
    math::Norms& norms = work.norms[work.chunks[i].tensor];
    norms.param = std::hypot(norms.param, std::sqrt(work.measured[i].param));
    norms.update = std::hypot(norms.update, std::sqrt(work.measured[i].update));
  }
}

template <typename Rule>
void update(const Task& task, const Workspace& work) {
  static const std::string name = std::string("apex_mp::") + Rule::kName + "_pass";
  RECORD_FUNCTION(name.c_str(), {});
  const auto& factors =
      std::get<std::vector<typename Rule::template Factors<double>>>(work.factors);
  const Kernels& level = kernels();
  const StepKernel step = level.step[math::AllRules::number<Rule>()];
  for_each_chunk(work.chunks, [&](int64_t index) {
    const Chunk& chunk = work.chunks[index];
    const Row& row = task.rows[chunk.tensor];
    step(part_of(row, chunk, work.rounding[chunk.tensor]),
         &factors[work.factors_of_row[chunk.tensor]]);
    if (!row.writes_grad) return;
    // Here, because the chunk is still in the cache.
    level.unscale(part(row.grad, chunk.begin), part_to_write(row.grad, chunk.begin), chunk.count,
                  1.0 / work.scale, false);
  });
}

void check(const Task& task, Workspace& work) {
  cut(task.rows, work.chunks);
  work.sums.assign(task.groups.size(), {0.0, 0.0});
  const bool reads_grads =
      task.check || needs_norms(task) || math::AllRules::facts(task.rule).takes_norms;
  work.outcome = {};
  work.outcome.found_inf = reads_grads && check_grads(task, work) && task.check;
  decide(task, work);
  for (size_t i = 0; reads_grads && i < work.groups.size(); ++i) {
    work.outcome.norms.push_back(work.groups[i].norm);
  }
}

}  // namespace

step::Outcome run(const Task& task, step::Passes passes, Workspace& work) {
  if (passes != step::Passes::kUpdate) check(task, work);
  if (passes == step::Passes::kCheck || work.outcome.found_inf) return work.outcome;
  math::AllRules::with(task.rule, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (kHasNorms<Rule>) work.norms.assign(task.rows.size(), {0.0, 0.0, 0.0});
    if constexpr (Rule::kNorm >= 0) find_norms<Rule>(task, work);
    if constexpr (Rule::kRatio >= 0) {
      prepare<Rule, false>(task, work);
      measure<Rule>(task, work);
    }
    prepare<Rule>(task, work);
    update<Rule>(task, work);
  });
  return work.outcome;
}

}  // namespace apex_mp::cpu
