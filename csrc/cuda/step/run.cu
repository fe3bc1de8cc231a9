// StepTable, continued: its upload to the device, changed options of groups, and the launches of a
// step.
#include <algorithm>

#include "cuda/step/passes.h"

namespace apex_mp::cuda {
namespace {

// The first group that has changed, and the number of groups from it to the last changed one.
struct ChangedGroups {
  int32_t first;
  int32_t count;
};

ChangedGroups changed_groups(const std::vector<step::Group>& known,
                             const std::vector<step::Group>& groups) {
  auto first = static_cast<int32_t>(groups.size());
  int32_t end = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(groups.size()); ++i) {
    if (known[i] == groups[i]) continue;
    first = std::min(first, i);
    end = i + 1;
  }
  return {first, std::max(end - first, 0)};
}

void carry_groups(const std::vector<step::Group>& groups, const ChangedGroups& changed,
                  FullCheck& check) {
  check.first_group = changed.first;
  check.groups = changed.count;
  std::copy_n(groups.begin() + changed.first, changed.count,
              const_cast<step::Group*>(check.carried_groups()));
}

// A part of the table on its way to the device.
struct Upload {
  using Word = uint4;

  Word* to;
  int32_t words;
  alignas(sizeof(Word)) char carried[kTableBytes];
};

__global__ void __launch_bounds__(kBlockSize) upload_kernel(const __grid_constant__ Upload part) {
  const auto word = static_cast<int32_t>(blockIdx.x * kBlockSize + threadIdx.x);
  if (word >= part.words) return;
  part.to[word] = reinterpret_cast<const Upload::Word*>(part.carried)[word];
}

// Bytes `begin` to `end` of the image, both the first of a word.
void upload(const std::vector<char>& image, size_t begin, size_t end, void* memory,
            cudaStream_t stream) {
  constexpr size_t kWordBytes = sizeof(Upload::Word);
  static_assert(kTableBytes % kWordBytes == 0);
  Upload part;
  for (size_t first = begin; first < end; first += kTableBytes) {
    const size_t bytes = std::min<size_t>(end - first, kTableBytes);
    part.to = reinterpret_cast<Upload::Word*>(static_cast<char*>(memory) + first);
    part.words = static_cast<int32_t>(bytes / kWordBytes);
    std::copy_n(image.data() + first, bytes, part.carried);
    launch(upload_kernel, count_chunks(part.words, kBlockSize), stream, part);
  }
}

bool wants_sums(const step::Task& task) {
  return std::any_of(task.groups.begin(), task.groups.end(), [](const step::Group& group) {
    return group.max_norm > 0.0 && !group.has_norm;
  });
}

// Cuts a step into launches of pass 1: sets the chunks and rows of the next launch in `check` and
// calls body(). The first launch carries check.groups. A row that is cut in two is prepared twice.
template <typename Body>
void for_each_check(const std::vector<int32_t>& first_chunk, const StepChunk* chunks,
                    StepCheck& check, const Body& body) {
  const StepCounts& counts = check.memory.counts;
  check.first_chunk = 0;
  do {
    check.first_row = counts.rows == 0 ? 0 : chunks[check.first_chunk].row;
    const int32_t end_row = std::min(counts.rows, check.first_row + rows_that_fit(check.groups));
    check.chunks = static_cast<int32_t>(
        std::min<int64_t>(first_chunk[end_row] - check.first_chunk, kMaxBlocks));
    const int32_t end_chunk = check.first_chunk + check.chunks;
    check.rows = end_chunk == 0 ? 0 : chunks[end_chunk - 1].row + 1 - check.first_row;
    body();
    check.groups = 0;
    check.first_chunk = end_chunk;
  } while (check.first_chunk < counts.chunks);
}

}  // namespace

void StepTable::upload(void* memory, cudaStream_t stream) const {
  cuda::upload(image_, 0, image_.size(), memory, stream);
}

void StepTable::upload_groups(void* memory, cudaStream_t stream) const {
  const auto begin = reinterpret_cast<uintptr_t>(memory_at(nullptr).groups);
  const auto end = reinterpret_cast<uintptr_t>(memory_at(nullptr).group_chunks);
  cuda::upload(image_, begin, end, memory, stream);
}

// Remembers the groups that are in device memory after the work launched next.
void StepTable::remember(const std::vector<step::Group>& groups) {
  groups_ = groups;
  std::copy(groups.begin(), groups.end(), memory_at(image_.data()).groups);
}

bool StepTable::knows_groups(const step::Task& task) const {
  return changed_groups(groups_, task.groups).count == 0;
}

void StepTable::refresh_groups(const step::Task& task, void* memory, cudaStream_t stream) {
  if (knows_groups(task)) return;
  remember(task.groups);
  upload_groups(memory, stream);
}

void StepTable::run(const step::Task& task, const StepRun& run, cudaStream_t stream) {
  if (run.passes != step::Passes::kUpdate) check(task, run, stream);
  if (run.passes != step::Passes::kCheck) launch_step_update(memory_at(run.memory), stream);
}

void StepTable::check(const step::Task& task, const StepRun& run, cudaStream_t stream) {
  FullCheck check;
  check.memory = memory_at(run.memory);
  check.decision = {task.check,
                    run.norms || wants_sums(task) || math::AllRules::facts(task.rule).takes_norms,
                    task.clip_by_global_norm,
                    task.scale,
                    task.clip_to,
                    task.has_clip_norm,
                    task.clip_norm,
                    task.found_inf,
                    run.loss_scale};
  const bool reads_grads = (task.check || check.decision.sums) && !rows_.empty();

  ChangedGroups changed = {0, 0};
  if (!run.captured) {
    changed = changed_groups(groups_, task.groups);
    remember(task.groups);
    if (changed.count * sizeof(step::Group) > kTableBytes / 2) {  // No space beside gradients.
      upload_groups(run.memory, stream);
      changed = {0, 0};
    }
  }

  const StepChunk* chunks = memory_at(image_.data()).chunks;
  check.all_blocks = 0;
  check.groups = changed.count;
  for_each_check(first_chunk_, chunks, check,
                 [&] { check.all_blocks += blocks_of(check, reads_grads); });
  carry_groups(task.groups, changed, check);
  for_each_check(first_chunk_, chunks, check, [&] {
    auto* grads = const_cast<const void**>(check.carried_grads());
    for (int32_t i = 0; i < check.rows; ++i) {
      grads[i] = task.rows[check.first_row + i].grad.data;
    }
    launch_step_check(check, reads_grads, stream);
  });
}

}  // namespace apex_mp::cuda
