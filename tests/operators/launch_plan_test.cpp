// Tries csrc/launch_plan.h exhaustively: all short lists of sizes around the chunk size, under all
// small limits; sizes far beyond 2**31, which need no memory here; all alignments; how large
// chunks are.
//
// test_launch_plan.py compiles this with the sanitizers and runs one section at a time.
#include "launch_plan.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>

namespace apex_mp {
namespace {

using Sizes = std::vector<int64_t>;

int64_t cases = 0;

// What is tried now, for the message.
struct Trial {
  Sizes sizes;
  int64_t chunk_size = 0;
  int64_t max_tensors = 0;
  int64_t max_chunks = 0;
};
Trial trial;

[[noreturn]] void fail(int line, const char* demand) {
  std::printf("launch_plan_test.cpp:%d: not so: %s\nsizes:", line, demand);
  for (const int64_t size : trial.sizes) std::printf(" %lld", static_cast<long long>(size));
  std::printf("\nchunk_size %lld, max_tensors %lld, max_chunks %lld\n",
              static_cast<long long>(trial.chunk_size), static_cast<long long>(trial.max_tensors),
              static_cast<long long>(trial.max_chunks));
  std::exit(1);
}

#define DEMAND(condition) \
  if (!(condition)) fail(__LINE__, #condition)

// --- What the plan promises, said once more and as plainly as can be.

// Chunks follow one another without gaps: every element lies in exactly one.
void demand_chunks_cover_every_element(const std::vector<Chunk>& chunks) {
  size_t next = 0;
  for (size_t tensor = 0; tensor < trial.sizes.size(); ++tensor) {
    int64_t covered = 0;
    while (covered < trial.sizes[tensor]) {
      DEMAND(next < chunks.size());
      const Chunk& chunk = chunks[next++];
      DEMAND(chunk.tensor == static_cast<int64_t>(tensor));
      DEMAND(chunk.begin == covered);
      DEMAND(0 < chunk.count && chunk.count <= trial.chunk_size);
      covered += chunk.count;
      // Only the last one is short: all others begin as aligned as their tensor.
      DEMAND(chunk.count == trial.chunk_size || covered == trial.sizes[tensor]);
    }
    DEMAND(covered == trial.sizes[tensor]);
  }
  DEMAND(next == chunks.size());
}

bool one_tensor_is_too_large() {
  for (const int64_t size : trial.sizes) {
    // Not count_chunks(): that is what is tested.
    if (size / trial.chunk_size > trial.max_chunks) return true;
    if (size / trial.chunk_size == trial.max_chunks && size % trial.chunk_size > 0) return true;
  }
  return false;
}

// Launches follow one another, each within its limits, and one ends only where the next tensor
// does not fit any more.
void demand_launches_take_every_tensor(const std::vector<Launch>& launches) {
  int64_t tensors = 0;
  int64_t chunks = 0;
  for (const Launch& launch : launches) {
    DEMAND(launch.first_tensor == tensors);
    DEMAND(launch.first_chunk == chunks);
    DEMAND(1 <= launch.tensors && launch.tensors <= trial.max_tensors);
    DEMAND(tensors + launch.tensors <= static_cast<int64_t>(trial.sizes.size()));
    int64_t own = 0;
    for (int64_t slot = 0; slot < launch.tensors; ++slot) {
      own += count_chunks(trial.sizes[tensors + slot], trial.chunk_size);
    }
    DEMAND(launch.chunks == own);
    DEMAND(own <= trial.max_chunks);
    tensors += launch.tensors;
    chunks += own;
    if (tensors == static_cast<int64_t>(trial.sizes.size())) continue;
    DEMAND(launch.tensors == trial.max_tensors ||
           count_chunks(trial.sizes[tensors], trial.chunk_size) > trial.max_chunks - own);
  }
  DEMAND(tensors == static_cast<int64_t>(trial.sizes.size()));
}

// Chunks before each tensor of a launch: what a kernel is given. The vector is as long as the
// launch, so that the address sanitizer sees a slot beyond it.
std::vector<int32_t> first_chunks(const Launch& launch) {
  std::vector<int32_t> first;
  int64_t chunks = 0;
  for (int64_t slot = 0; slot < launch.tensors; ++slot) {
    DEMAND(chunks <= std::numeric_limits<int32_t>::max());
    first.push_back(static_cast<int32_t>(chunks));
    chunks += count_chunks(trial.sizes[launch.first_tensor + slot], trial.chunk_size);
  }
  return first;
}

// The only slot whose chunks include this one, by looking at all of them.
int64_t slot_by_search(const Launch& launch, int64_t chunk) {
  int64_t begin = 0;
  int64_t found = -1;
  for (int64_t slot = 0; slot < launch.tensors; ++slot) {
    const int64_t count = count_chunks(trial.sizes[launch.first_tensor + slot], trial.chunk_size);
    if (begin <= chunk && chunk < begin + count) {
      DEMAND(found == -1);
      found = slot;
    }
    begin += count;
  }
  return found;
}

// Block `block` of a launch, found as a kernel finds it, takes the chunk of the list that is its
// turn.
void demand_block_takes_chunk(const Launch& launch, const std::vector<int32_t>& first,
                              int64_t block, const Chunk& chunk) {
  const int32_t slot =
      find_slot(first.data(), static_cast<int32_t>(launch.tensors), static_cast<int32_t>(block));
  DEMAND(slot == slot_by_search(launch, block));
  const int64_t tensor = launch.first_tensor + slot;
  DEMAND(trial.sizes[tensor] > 0);
  const Chunk found = chunk_of(tensor, block - first[slot], trial.sizes[tensor], trial.chunk_size);
  DEMAND(found.tensor == chunk.tensor && found.begin == chunk.begin && found.count == chunk.count);
}

void demand_plan_is_right(const std::vector<Chunk>& chunks) {
  ++cases;
  std::vector<Launch> launches;
  bool refused = false;
  try {
    launches =
        cut_into_launches(trial.sizes, trial.chunk_size, trial.max_tensors, trial.max_chunks);
  } catch (const std::length_error&) {
    refused = true;
  }
  DEMAND(refused == one_tensor_is_too_large());
  if (refused) return;
  demand_launches_take_every_tensor(launches);
  for (const Launch& launch : launches) {
    const std::vector<int32_t> first = first_chunks(launch);
    for (int64_t block = 0; block < launch.chunks; ++block) {
      demand_block_takes_chunk(launch, first, block, chunks[launch.first_chunk + block]);
    }
  }
}

// --- Sections.

// Calls body with every list of up to `length` of `choices`.
void for_each_list(const Sizes& choices, size_t length, Sizes& list,
                   const std::function<void()>& body) {
  body();
  if (list.size() == length) return;
  for (const int64_t choice : choices) {
    list.push_back(choice);
    for_each_list(choices, length, list, body);
    list.pop_back();
  }
}

void all_short_lists() {
  for (const int64_t chunk : {1, 2, 3}) {
    trial.chunk_size = chunk;
    const std::set<int64_t> around = {0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1};
    for_each_list({around.begin(), around.end()}, 5, trial.sizes, [] {
      const std::vector<Chunk> chunks = cut_into_chunks(trial.sizes, trial.chunk_size);
      demand_chunks_cover_every_element(chunks);
      for (trial.max_tensors = 1; trial.max_tensors <= 5; ++trial.max_tensors) {
        for (const int64_t max_chunks : {1, 2, 3, 4, 7, 15}) {
          trial.max_chunks = max_chunks;
          demand_plan_is_right(chunks);
        }
      }
    });
  }
}

constexpr int64_t k31 = int64_t{1} << 31;
constexpr int64_t k32 = int64_t{1} << 32;
constexpr int64_t k45 = int64_t{1} << 45;
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// All sizes around 2**31, 2**32 and 2**45, cut into few and large chunks, in short lists.
void beyond_32_bits_in_few_chunks() {
  for (const int64_t chunk : {int64_t{1} << 30, k31 - 1, k31, k32 + 1, k45}) {
    trial.chunk_size = chunk;
    for (const int64_t huge : {k31, k32, k45}) {
      if (huge / chunk > 20000) continue;
      const Sizes around = {0, 1, huge - 1, huge, huge + 1, 2 * huge + 1};
      for_each_list(around, huge / chunk > 10 ? 1 : 3, trial.sizes, [huge] {
        const std::vector<Chunk> chunks = cut_into_chunks(trial.sizes, trial.chunk_size);
        demand_chunks_cover_every_element(chunks);
        for (const int64_t max_tensors : {1, 2, 320}) {
          for (const int64_t max_chunks : {huge / trial.chunk_size + 1, k31 - 1}) {
            trial.max_tensors = max_tensors;
            trial.max_chunks = max_chunks;
            demand_plan_is_right(chunks);
          }
        }
      });
    }
  }
}

// As many chunks as one launch can have are too many for a list of them: only some are tried.
void as_many_chunks_as_a_launch_takes() {
  trial = {{}, 16384, 300, k31 - 1};  // As on CUDA.
  const int64_t largest = trial.max_chunks * trial.chunk_size;
  trial.sizes = {5, 0, k31 + 5, 0, k32 - 1, k45 / 2, 0, 1, largest, 0, k45 / 2, k45 / 2 - 1, 7};
  const std::vector<Launch> launches =
      cut_into_launches(trial.sizes, trial.chunk_size, trial.max_tensors, trial.max_chunks);
  demand_launches_take_every_tensor(launches);
  DEMAND(launches.size() == 4);
  for (const Launch& launch : launches) {
    const std::vector<int32_t> first = first_chunks(launch);
    for (int64_t slot = 0; slot < launch.tensors; ++slot) {
      const int64_t size = trial.sizes[launch.first_tensor + slot];
      const int64_t count = count_chunks(size, trial.chunk_size);
      // The first and last of a tensor, and those around begins of 2**31 and 2**32 elements.
      for (const int64_t index :
           {int64_t{0}, k31 / 16384 - 1, k31 / 16384, k32 / 16384, k31 - 2, count - 2, count - 1}) {
        if (index < 0 || index >= count) continue;
        ++cases;
        const int64_t begin = index * 16384;
        const int64_t end = index == count - 1 ? size : begin + 16384;
        DEMAND(0 < end - begin && end - begin <= 16384);
        demand_block_takes_chunk(launch, first, first[slot] + index,
                                 {launch.first_tensor + slot, begin, end - begin});
      }
    }
  }
}

void a_tensor_too_large_for_a_launch_is_refused() {
  trial = {{3, k45 - 16384 + 1, 3}, 16384, 300, k31 - 1};
  const auto refused = [] {
    ++cases;
    try {
      cut_into_launches(trial.sizes, trial.chunk_size, trial.max_tensors, trial.max_chunks);
    } catch (const std::length_error&) {
      return true;
    }
    return false;
  };
  DEMAND(refused());
  for (const int64_t size : {k45, 2 * k45, kLargest}) {
    trial.sizes[1] = size;
    DEMAND(refused());
  }
  trial.sizes[1] = k45 - 16384;
  DEMAND(!refused());
}

// Counts at the largest numbers there are, where a rounded-up division would overflow.
void the_largest_sizes_are_counted() {
  for (const int64_t chunk : {int64_t{1}, int64_t{2}, int64_t{16384}, k45, kLargest}) {
    for (const int64_t less : {0, 1, 2}) {
      ++cases;
      trial.sizes = {kLargest - less};
      trial.chunk_size = chunk;
      const int64_t count = count_chunks(trial.sizes[0], chunk);
      const Chunk last = chunk_of(0, count - 1, trial.sizes[0], chunk);
      DEMAND(0 < last.count && last.count <= chunk);
      DEMAND(last.begin == (count - 1) * chunk);
      DEMAND(last.begin + last.count == trial.sizes[0]);
    }
  }
}

// All powers of two between the limits, from the largest down: the first that makes enough chunks.
int64_t chunk_size_by_search(const ChunkLimits& limits) {
  for (int64_t chunk = limits.largest; chunk > limits.smallest; chunk /= 2) {
    int64_t chunks = 0;
    for (const int64_t size : trial.sizes) {
      chunks += size / chunk + (size % chunk > 0);
    }
    if (chunks >= limits.enough) return chunk;
  }
  return limits.smallest;
}

void chunks_are_as_large_as_can_be() {
  for (const int64_t largest : {1, 2, 4, 8}) {
    const std::set<int64_t> around = {0, 1, largest - 1, largest, largest + 1, 4 * largest + 1};
    for_each_list({around.begin(), around.end()}, 4, trial.sizes, [largest] {
      for (int64_t smallest = 1; smallest <= largest; smallest *= 2) {
        for (int64_t enough = 0; enough < 140; enough += enough < 20 ? 1 : 17) {
          ++cases;
          const ChunkLimits limits = {largest, smallest, enough};
          trial.chunk_size = chunk_size_of(trial.sizes, limits);
          DEMAND(trial.chunk_size == chunk_size_by_search(limits));
        }
      }
    });
  }
}

void chunks_on_cuda_are_as_many_as_multiprocessors_need() {
  struct Expected {
    Sizes sizes;
    int64_t chunk_size;
  };
  const int64_t enough = 528;
  for (const auto& [sizes, chunk_size] : std::vector<Expected>{
           {{}, 2048},
           {{0, 5}, 2048},
           {{1000000}, 2048},
           {{enough * 4096 - 4096}, 2048},
           {{enough * 4096 - 4095}, 4096},
           {{enough * 8192 - 8192}, 4096},
           {{enough * 8192 - 8191}, 8192},
           {{enough * 16384 - 16384}, 8192},
           {{enough * 16384 - 16383}, 16384},
           {Sizes(enough - 1, 1), 2048},
           {Sizes(enough, 1), 16384},
           {Sizes(100000, kLargest), 16384},  // All of their chunks are more than 2**63.
       }) {
    ++cases;
    trial.sizes = sizes;
    trial.chunk_size = chunk_size_of(sizes, {16384, 2048, enough});
    DEMAND(trial.chunk_size == chunk_size);
  }
}

// Every vector from `head` on, in every array, for as many vectors as it takes to be sure: loads
// of the vector's own size, of 16 bytes at most, each aligned to its size.
bool vectors_are_aligned(const std::vector<ArrayStart>& arrays, int64_t width, int64_t head) {
  for (const ArrayStart& array : arrays) {
    const int64_t vector_bytes = width * array.number_bytes;
    const int64_t load_bytes = vector_bytes > 16 ? 16 : vector_bytes;
    for (int64_t vector = 0; vector < 3; ++vector) {
      const uintptr_t begin = array.address + (head + vector * width) * array.number_bytes;
      for (int64_t load = 0; load < vector_bytes; load += load_bytes) {
        if ((begin + load) % load_bytes != 0) return false;
      }
    }
  }
  return true;
}

void all_alignments_of(size_t arrays) {
  std::vector<ArrayStart> all;
  for (const int64_t bytes : {2, 4, 8}) {
    for (uintptr_t address = 4096; address < 4096 + 16; ++address) all.push_back({address, bytes});
  }
  size_t lists = 1;
  for (size_t i = 0; i < arrays; ++i) lists *= all.size();
  for (size_t list = 0; list < lists; ++list) {
    std::vector<ArrayStart> starts;
    for (size_t rest = list; starts.size() < arrays; rest /= all.size()) {
      starts.push_back(all[rest % all.size()]);
    }
    for (const int64_t width : {1, 2, 4, 8}) {
      ++cases;
      // After 16 numbers every alignment has come round again.
      int64_t expected = 0;
      while (expected < 16 && !vectors_are_aligned(starts, width, expected)) ++expected;
      DEMAND(common_head(starts, width) == (expected < 16 ? expected : -1));
    }
  }
}

void all_alignments() {
  for (const size_t arrays : {0, 1, 2, 3}) all_alignments_of(arrays);
}

const std::map<std::string, void (*)()> kSections = {
    {"all short lists", all_short_lists},
    {"beyond 32 bits in few chunks", beyond_32_bits_in_few_chunks},
    {"as many chunks as a launch takes", as_many_chunks_as_a_launch_takes},
    {"a tensor too large for a launch is refused", a_tensor_too_large_for_a_launch_is_refused},
    {"the largest sizes are counted", the_largest_sizes_are_counted},
    {"all alignments", all_alignments},
    {"chunks are as large as can be", chunks_are_as_large_as_can_be},
    {"chunks on CUDA are as many as multiprocessors need",
     chunks_on_cuda_are_as_many_as_multiprocessors_need},
};

}  // namespace
}  // namespace apex_mp

// Without an argument: the names of the sections. With one: runs it.
int main(int count, char** words) {
  if (count == 1) {
    for (const auto& section : apex_mp::kSections) std::puts(section.first.c_str());
    return 0;
  }
  apex_mp::kSections.at(words[1])();
  std::printf("%lld cases\n", static_cast<long long>(apex_mp::cases));
  return apex_mp::cases > 0 ? 0 : 1;
}
