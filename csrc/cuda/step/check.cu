// Pass 1 of the fused step: stores the addresses of gradients and the numbers that the rule
// prepares for each row, checks gradients and sums their squares, and in its last block decides on
// pass 2.
#include <algorithm>

#include "cuda/loops.h"
#include "cuda/step/decide.h"
#include "cuda/step/last_block.h"

namespace apex_mp::cuda {
namespace {

// The limit depends on the toolkit, see kTableBytes.
static_assert(sizeof(FullCheck) <= (kTableBytes > 4096 ? 32764 : 4096));

constexpr int kThreadsForRow = 2;  // one for each number prepared: powers are expensive in double

// How many of the prepared numbers need norms, which are not known yet.
template <typename Rule>
constexpr int kPreparedLater = (Rule::kNorm >= 0) + (Rule::kRatio >= 0);

__device__ const void* grad_of(const StepCheck& check, int32_t row) {
  return check.carried_grads()[row - check.first_row];
}

// Prepares the numbers that depend on the count of steps before this one.
template <typename Rule>
__device__ math::Rounding rounding_of(const step::Group& group, const StepRow& row) {
  if constexpr (math::kCountsSteps<Rule>) {
    if (group.stochastic_rounding) {
      return math::stochastic_rounding(row.position, *global(row.numbers[0]));
    }
  }
  return {};
}

// Numbers that need norms are prepared later, see prepare_by_norms() and ratio_kernel(); until then
// the ratio is 1.
__device__ void look_after_row(const StepCheck& check, int32_t row, int which) {
  const void* grad = grad_of(check, row);
  if (which == 0) check.memory.grads[row] = grad;
  if (grad == nullptr) return;
  math::AllRules::with(check.memory.counts.rule, [&](auto rule) {
    using Rule = decltype(rule);
    static_assert(Rule::kPrepared - kPreparedLater<Rule> <= kThreadsForRow);
    if constexpr (Rule::kPrepared > 0) {
      if (which < Rule::kPrepared && which != Rule::kNorm && which != Rule::kRatio) {
        const step::Group& group = group_of(check, check.memory.rows[row].group);
        prepare<Rule>(check.memory, group, row, which, {0.0, 0.0, 0.0});
      }
    }
    if constexpr (Rule::kRatio >= 0) check.memory.prepared[row].numbers[Rule::kRatio] = 1.0;
    if (which == 0) {
      const StepRow& facts = check.memory.rows[row];
      const step::Group& group = group_of(check, facts.group);
      check.memory.prepared[row].rounding = rounding_of<Rule>(group, facts);
    }
  });
}

// Called by all threads of one block. No thread reads groups in memory in this launch, see
// group_of().
__device__ void write_groups(const StepCheck& check) {
  for (int32_t i = threadIdx.x; i < check.groups; i += kBlockSize) {
    check.memory.groups[check.first_group + i] = group_of(check, check.first_group + i);
  }
}

__device__ void end_pass(const StepCheck& check) {
  if (blockIdx.x == 0) write_groups(check);
  if (!is_last_block(&check.memory.control->arrived, check.all_blocks)) return;
  if (check.decision.sums) sum_groups(check.memory);
  __syncthreads();
  decide(check);
}

__device__ void look_after_rows(const StepCheck& check) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlockSize + threadIdx.x;
  const int64_t row = thread / kThreadsForRow;
  if (row < check.rows) {
    look_after_row(check, check.first_row + static_cast<int32_t>(row), thread % kThreadsForRow);
  }
  end_pass(check);
}

__device__ Part<1> part_of(const StepChunk& chunk, int32_t chunk_size, const void* grad) {
  const auto dtype = static_cast<DType>(chunk.facts.grad);
  const int64_t begin = int64_t{chunk.index} * chunk_size * size_of(dtype);
  Part<1> part;
  part.arrays[0] = {static_cast<char*>(const_cast<void*>(grad)) + begin, dtype};
  part.count = chunk.count;
  part.double_math = dtype == DType::kDouble;
  part.head = head_of(part);
  return part;
}

// Rarely called, so it reads number by number.
__device__ double max_of(const Part<1>& part) {
  double most = 0.0;
  for (int i = threadIdx.x; i < part.count; i += kBlockSize) {
    double number[1];
    read(part.arrays[0], i, OneNumber{}, number);
    most = fmax(most, fabs(number[0]));
  }
  return most;
}

__device__ bool wants_max(const StepCheck& check, int32_t row) {
  bool wanted = false;
  math::AllRules::with(check.memory.counts.rule, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (Rule::kNorm >= 0) {
      wanted = Rule::wants_max(group_of(check, check.memory.rows[row].group).options);
    }
  });
  return wanted;
}

__device__ void check_chunk_of_block(const StepCheck& check) {
  const int32_t index = check.first_chunk + static_cast<int32_t>(blockIdx.x);
  const StepChunk chunk = check.memory.chunks[index];
  if (chunk.index == 0 && threadIdx.x < kThreadsForRow) {
    look_after_row(check, chunk.row, threadIdx.x);
  }
  const void* grad = grad_of(check, chunk.row);
  const bool takes_max = grad != nullptr && wants_max(check, chunk.row);
  int32_t found_inf = 0;
  double share = 0.0;
  double most = 0.0;
  if (grad != nullptr) {
    const Part<1> part = part_of(chunk, check.memory.counts.chunk_size, grad);
    share = sum_squares(part, found_inf);
    if (takes_max) most = max_of(part);
  }
  if (check.decision.sums) {
    const double sum = block_sum(share);
    const math::SumSq sums = chunk.facts.scaled ? math::SumSq{sum, 0.0} : math::SumSq{0.0, sum};
    if (threadIdx.x == 0) check.memory.chunk_sums[index] = sums;
  }
  if (found_inf && check.decision.check)
    check.memory.control->found_inf = 1;  // All write the same.
  if (takes_max) {
    __syncthreads();
    most = block_max(most);
    if (threadIdx.x == 0) check.memory.chunk_maxima[index] = most;
  }
  end_pass(check);
}

__global__ void __launch_bounds__(kBlockSize) rows_kernel(const __grid_constant__ FullCheck check) {
  look_after_rows(check);
}

__global__ void __launch_bounds__(kBlockSize)
    few_rows_kernel(const __grid_constant__ FewCheck check) {
  look_after_rows(check);
}

__global__ void __launch_bounds__(kBlockSize)
    chunks_kernel(const __grid_constant__ FullCheck check) {
  check_chunk_of_block(check);
}

__global__ void __launch_bounds__(kBlockSize)
    few_chunks_kernel(const __grid_constant__ FewCheck check) {
  check_chunk_of_block(check);
}

FewCheck with_few(const FullCheck& check) {
  FewCheck few;
  static_cast<StepCheck&>(few) = check;
  std::copy_n(check.carried, check.carried_bytes(), few.carried);
  return few;
}

}  // namespace

int32_t blocks_of(const StepCheck& check, bool reads_grads) {
  if (reads_grads) return check.chunks;
  const int64_t blocks = count_chunks(int64_t{check.rows} * kThreadsForRow, kBlockSize);
  return static_cast<int32_t>(blocks > 0 ? blocks : 1);
}

void launch_step_check(const FullCheck& check, bool reads_grads, cudaStream_t stream) {
  const int32_t blocks = blocks_of(check, reads_grads);
  if (check.carried_bytes() <= kFewTableBytes) {
    launch(reads_grads ? few_chunks_kernel : few_rows_kernel, blocks, stream, with_few(check));
  } else {
    launch(reads_grads ? chunks_kernel : rows_kernel, blocks, stream, check);
  }
}

}  // namespace apex_mp::cuda
