// The clocks of streams, and the one graph. Everything runs when it is put on a stream: what is
// missing between two streams shows in their clocks alone.
#include "streams.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace cuda_on_cpu {
namespace {

std::array<Clock, kStreams> clocks;  // of each stream: what it has waited for
int current = 0;
bool capturing = false;
std::vector<std::function<void()>> graph;
int64_t launches_to_failure = -1;  // negative: none fails

int number(Stream stream) { return static_cast<int>(reinterpret_cast<intptr_t>(stream)); }

void refuse_capture(const char* what) {
  if (capturing) throw std::runtime_error(std::string("cuda_on_cpu: captured: ") + what);
}

}  // namespace

Stream current_stream() { return reinterpret_cast<Stream>(static_cast<intptr_t>(current)); }

bool is_capturing() { return capturing; }

void submit(Stream stream, std::function<void()> launch) {
  if (capturing) {
    graph.push_back(std::move(launch));
    return;
  }
  if (launches_to_failure >= 0 && launches_to_failure-- == 0) {
    throw std::runtime_error("cuda_on_cpu: this launch fails");
  }
  put_on(stream, "a kernel");
  launch();
}

void put_on(Stream stream, const char* what) {
  refuse_capture(what);
  const int here = number(stream);
  for (int other = 0; other < kStreams; ++other) {
    if (clocks[here][other] == clocks[other][other]) continue;
    throw std::runtime_error("cuda_on_cpu: " + std::string(what) + " on stream " +
                             std::to_string(here) + " does not wait for stream " +
                             std::to_string(other));
  }
  ++clocks[here][here];
}

void record(Clock& event, Stream stream) {
  refuse_capture("the record of an event");
  event = clocks[number(stream)];
}

void wait(const Clock& event, Stream stream) {
  refuse_capture("the wait for an event");
  Clock& clock = clocks[number(stream)];
  for (int i = 0; i < kStreams; ++i) clock[i] = std::max(clock[i], event[i]);
}

}  // namespace cuda_on_cpu

// For ctypes.
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void cuda_on_cpu_use_stream(int number) { cuda_on_cpu::current = number; }

EXPORT void cuda_on_cpu_wait_for_all() {
  for (cuda_on_cpu::Clock& clock : cuda_on_cpu::clocks) clock = {};
}

EXPORT void cuda_on_cpu_fail_after(int64_t launches) {
  cuda_on_cpu::launches_to_failure = launches;
}

EXPORT void cuda_on_cpu_capture(bool begin) {
  if (begin) cuda_on_cpu::graph.clear();
  cuda_on_cpu::capturing = begin;
}

EXPORT bool cuda_on_cpu_is_capturing() { return cuda_on_cpu::capturing; }

EXPORT int64_t cuda_on_cpu_replay() {
  for (const auto& launch : cuda_on_cpu::graph) launch();
  return static_cast<int64_t>(cuda_on_cpu::graph.size());
}
