// check: the finite test and the sum of squares. Part of kernels_impl.h.

constexpr int64_t kLanes = 32;

// Adds the lanes in pairs, so that none waits for more than five others: the same tree at every
// level.
template <typename opmath_t>
inline CheckResult gather(const opmath_t* sums, const int32_t* found) {
  double wide[kLanes];
  CheckResult result = {0.0, 0};
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    wide[lane] = static_cast<double>(sums[lane]);
    result.found_inf |= found[lane] != 0;
  }
#pragma GCC unroll 8
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) wide[lane] += wide[lane + half];
  }
  result.sum_sq = wide[0];
  return result;
}

// kLanes independent sums: the compiler may not reorder a float sum by itself, and the same lanes
// at every level give the same bits.
template <typename opmath_t>
inline CheckResult check_tile(In grad, int64_t count) {
  opmath_t buffer[kTile];
  const opmath_t* tile = read(grad, 0, count, buffer);
  opmath_t sums[kLanes] = {};
  int32_t found[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      math::check(tile[i + lane], sums[lane], found[lane]);
    }
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) math::check(tile[i], sums[lane], found[lane]);
  return gather(sums, found);
}

#if APEX_MP_LEVEL > 0
// As check_tile<float> of a whole tile, to the bit; a half is converted where it is needed.
template <typename grad_t>
inline CheckResult check_whole_tile(const void* data) {
  const auto* grad = static_cast<const grad_t*>(data);
  Floats sums[kLanes / kWidth] = {};
  int_register_t found[kLanes / kWidth] = {};
  for (int64_t i = 0; i < kTile; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      fetch_ahead(grad + i + lane);
      math::check(load(grad + i + lane), sums[lane / kWidth], found[lane / kWidth]);
    }
  }
  float sum[kLanes];
  int32_t any[kLanes];
  memcpy(sum, sums, sizeof(sum));
  memcpy(any, found, sizeof(any));
  return gather(sum, any);
}
#endif

inline CheckResult check_float_tile(In grad, int64_t count) {
#if APEX_MP_LEVEL > 0
  if (count == kTile && grad.dtype == DType::kHalf) return check_whole_tile<Half>(grad.data);
  if (count == kTile && grad.dtype == DType::kBFloat16) {
    return check_whole_tile<BFloat16>(grad.data);
  }
  if (count == kTile) return check_whole_tile<float>(grad.data);
#endif
  return check_tile<float>(grad, count);
}

CheckResult check(In grad, int64_t count) {
  const bool is_double = grad.dtype == DType::kDouble;
  CheckResult total = {0.0, 0};
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const In tile = {at(grad.data, grad.dtype, begin), grad.dtype};
    const int64_t n = tile_size(begin, count);
    CheckResult result = is_double ? check_tile<double>(tile, n) : check_float_tile(tile, n);
    // Finite floats of 2e19 and more have no finite square in float; they do in double.
    if (!is_double && !result.found_inf && math::not_finite(result.sum_sq)) {
      result = check_tile<double>(tile, n);
    }
    total.sum_sq += result.sum_sq;
    total.found_inf |= result.found_inf;
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
