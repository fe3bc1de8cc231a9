// Streams and graphs: whether what is on one stream waits for what is on the others, and launches
// that are kept, to be run again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

namespace cuda_on_cpu {

// As cudaStream_t: nullptr, which is stream 0, or the number of another.
using Stream = void*;
constexpr int kStreams = 2;

// How much of what was put on each stream has been waited for.
using Clock = std::array<int64_t, kStreams>;

Stream current_stream();  // the test chooses
bool is_capturing();

// Runs it at once; or, under capture, keeps it for the replays.
void submit(Stream stream, std::function<void()> launch);

// For all that is put on a stream. Throws std::runtime_error unless it waits for all that has been
// put on the others (a test steps one table, whose steps follow each other), and under capture.
void put_on(Stream stream, const char* what);

void record(Clock& event, Stream stream);
void wait(const Clock& event, Stream stream);

}  // namespace cuda_on_cpu
