// check: the finite test and the sum of squares. Part of impl.h.

constexpr int64_t kLanes = 32;

// Adds the lanes in pairs, by the same tree at every level, so that no addition waits for more than
// five others.
template <typename opmath_t>
inline double gather(const opmath_t* sums) {
  double wide[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) wide[lane] = static_cast<double>(sums[lane]);
#pragma GCC unroll 8
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) wide[lane] += wide[lane + half];
  }
  return wide[0];
}

// kLanes independent sums: the compiler may not reorder a float sum by itself, and the same lanes
// at every level give the same bits.
template <typename opmath_t>
inline double sum_tile(In grad, int64_t count) {
  opmath_t buffer[kTile];
  const opmath_t* tile = read(grad, 0, count, buffer);
  opmath_t sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += tile[i + lane] * tile[i + lane];
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) sums[lane] += tile[i] * tile[i];
  return gather(sums);
}

#if APEX_MP_LEVEL > 0
// As sum_tile<float> of a whole tile, to the bit, but converts each 16-bit number when it is used.
template <typename grad_t>
inline double sum_whole_tile(const void* data) {
  const auto* grad = static_cast<const grad_t*>(data);
  Floats sums[kLanes / kWidth] = {};
  for (int64_t i = 0; i < kTile; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      fetch_ahead(grad + i + lane);
      const Floats number = load(grad + i + lane);
      sums[lane / kWidth] += number * number;
    }
  }
  float lanes[kLanes];
  memcpy(lanes, sums, sizeof(lanes));
  return gather(lanes);
}
#endif

inline double sum_float_tile(In grad, int64_t count) {
#if APEX_MP_LEVEL > 0
  if (count == kTile && grad.dtype == DType::kHalf) return sum_whole_tile<Half>(grad.data);
  if (count == kTile && grad.dtype == DType::kBFloat16) return sum_whole_tile<BFloat16>(grad.data);
  if (count == kTile) return sum_whole_tile<float>(grad.data);
#endif
  return sum_tile<float>(grad, count);
}

inline bool has_nonfinite(In grad, int64_t count) {
  double buffer[kTile];
  const double* tile = read(grad, 0, count, buffer);
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found |= math::not_finite(tile[i]);
  return found != 0;
}

// Numbers are looked at one by one only where their sum is not finite.
CheckResult check(In grad, int64_t count) {
  const bool is_double = grad.dtype == DType::kDouble;
  CheckResult total = {0.0, 0};
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const In tile = {at(grad.data, grad.dtype, begin), grad.dtype};
    const int64_t n = tile_size(begin, count);
    double sum_sq = is_double ? sum_tile<double>(tile, n) : sum_float_tile(tile, n);
    if (math::not_finite(sum_sq)) {
      // Finite floats of 2e19 and more have no finite square in float; they do in double.
      if (!is_double) sum_sq = sum_tile<double>(tile, n);
      total.found_inf |= has_nonfinite(tile, n);
    }
    total.sum_sq += sum_sq;
  }
  return total;
}

template <typename opmath_t>
double max_abs_of(In grad, int64_t count) {
  opmath_t buffer[kTile];
  opmath_t most = 0;
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = tile_size(begin, count);
    const opmath_t* tile = read(grad, begin, n, buffer);
    for (int64_t i = 0; i < n; ++i) {
      const opmath_t size = tile[i] < 0 ? -tile[i] : tile[i];
      most = size > most ? size : most;
    }
  }
  return static_cast<double>(most);
}

double max_abs(In grad, int64_t count) {
  return grad.dtype == DType::kDouble ? max_abs_of<double>(grad, count)
                                      : max_abs_of<float>(grad, count);
}
