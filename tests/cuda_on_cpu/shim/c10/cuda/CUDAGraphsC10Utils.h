// Stands for torch's header: the test says when a graph is captured.
#pragma once

#include "streams.h"

namespace c10::cuda {

enum class CaptureStatus { None, Active };

inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return cuda_on_cpu::is_capturing() ? CaptureStatus::Active : CaptureStatus::None;
}

}  // namespace c10::cuda
