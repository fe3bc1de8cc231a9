// The CPU kernels. Each kernels_<level>.cpp includes this file once, inside a namespace of its own
// and after setting the instruction set; so it must not include anything itself, and must not use
// templates of the standard library (their code would be shared between levels).
//
// A kernel walks its chunk in tiles: convert in, run the formula of math/ over the tile (the
// compiler vectorises that loop), convert out. What is already of the math type is used where it
// lies.

constexpr int64_t kTile = 512;
constexpr int64_t kLanes = 32;

inline void widen_half(const uint16_t* src, float* dst, int64_t count) {
  int64_t i = 0;
#if APEX_MP_LEVEL == 2
  for (; i + 16 <= count; i += 16) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    _mm512_storeu_ps(dst + i, _mm512_maskz_cvtph_ps(0xffff, packed));
  }
#elif APEX_MP_LEVEL == 1
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(packed));
  }
#endif
  for (; i < count; ++i) dst[i] = half_to_float(src[i]);
}

inline void narrow_half(const float* src, uint16_t* dst, int64_t count) {
  int64_t i = 0;
#if APEX_MP_LEVEL == 2
  for (; i + 16 <= count; i += 16) {
    const __m512 wide = _mm512_loadu_ps(src + i);
    const __m256i packed = _mm512_maskz_cvtps_ph(0xffff, wide, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), packed);
  }
#elif APEX_MP_LEVEL == 1
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), packed);
  }
#endif
  for (; i < count; ++i) dst[i] = float_to_half(src[i]);
}

inline void widen_bfloat16(const uint16_t* src, float* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = bfloat16_to_float(src[i]);
}

inline void narrow_bfloat16(const float* src, uint16_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = float_to_bfloat16(src[i]);
}

template <typename from_t, typename to_t>
inline void cast(const from_t* src, to_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<to_t>(src[i]);
}

// Convert `count` (at most kTile) numbers at `src` into `dst`.
inline void convert_in(const void* src, DType dtype, float* dst, int64_t count) {
  switch (dtype) {
    case DType::kHalf:
      return widen_half(static_cast<const uint16_t*>(src), dst, count);
    case DType::kBFloat16:
      return widen_bfloat16(static_cast<const uint16_t*>(src), dst, count);
    case DType::kFloat:
      return cast(static_cast<const float*>(src), dst, count);
    case DType::kDouble:  // GCOVR_EXCL_START: where a double is read, math is double.
      return cast(static_cast<const double*>(src), dst, count);
      // GCOVR_EXCL_STOP
  }
}

inline void convert_in(const void* src, DType dtype, double* dst, int64_t count) {
  if (dtype == DType::kDouble) return cast(static_cast<const double*>(src), dst, count);
  float narrow[kTile];
  convert_in(src, dtype, narrow, count);
  cast(narrow, dst, count);
}

inline void convert_out(const float* src, void* dst, DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kHalf:
      return narrow_half(src, static_cast<uint16_t*>(dst), count);
    case DType::kBFloat16:
      return narrow_bfloat16(src, static_cast<uint16_t*>(dst), count);
    case DType::kFloat:
      return cast(src, static_cast<float*>(dst), count);
    case DType::kDouble:
      return cast(src, static_cast<double*>(dst), count);
  }
}

// From double to a half type by way of float, as torch converts.
inline void convert_out(const double* src, void* dst, DType dtype, int64_t count) {
  if (dtype == DType::kDouble) return cast(src, static_cast<double*>(dst), count);
  float narrow[kTile];
  cast(src, narrow, count);
  convert_out(narrow, dst, dtype, count);
}

template <typename opmath_t>
constexpr DType kMathType = sizeof(opmath_t) == sizeof(double) ? DType::kDouble : DType::kFloat;

inline const void* at(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}

inline void* at(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

// A tile to read: the memory itself if it is of the math type, else a converted copy in `buffer`.
template <typename opmath_t>
inline const opmath_t* read(In array, int64_t begin, int64_t count, opmath_t* buffer) {
  const void* src = at(array.data, array.dtype, begin);
  if (array.dtype == kMathType<opmath_t>) return static_cast<const opmath_t*>(src);
  convert_in(src, array.dtype, buffer, count);
  return buffer;
}

// A tile to fill, or (open) to change; close() brings a buffer back to memory.
template <typename opmath_t>
inline opmath_t* place(Out array, int64_t begin, opmath_t* buffer) {
  if (array.dtype != kMathType<opmath_t>) return buffer;
  return static_cast<opmath_t*>(at(array.data, array.dtype, begin));
}

template <typename opmath_t>
inline opmath_t* open(Out array, int64_t begin, int64_t count, opmath_t* buffer) {
  if (array.dtype != kMathType<opmath_t>) {
    convert_in(at(array.data, array.dtype, begin), array.dtype, buffer, count);
  }
  return place(array, begin, buffer);
}

template <typename opmath_t>
inline void close(const opmath_t* tile, Out array, int64_t begin, int64_t count) {
  if (array.dtype == kMathType<opmath_t>) return;
  convert_out(tile, at(array.data, array.dtype, begin), array.dtype, count);
}

inline int64_t tile_size(int64_t begin, int64_t count) {
  return count - begin < kTile ? count - begin : kTile;
}

// kLanes independent sums: the compiler may not reorder a float sum by itself, and the same lanes
// at every level give the same bits.
template <typename opmath_t>
inline CheckResult check_tile(const opmath_t* grad, int64_t count) {
  opmath_t sums[kLanes] = {};
  int32_t found[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      math::check(grad[i + lane], sums[lane], found[lane]);
    }
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) math::check(grad[i], sums[lane], found[lane]);
  CheckResult result = {0.0, 0};
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    result.sum_sq += static_cast<double>(sums[lane]);
    result.found_inf |= found[lane];
  }
  return result;
}

template <typename opmath_t>
CheckResult check_chunk(In grad, int64_t count) {
  opmath_t buffer[kTile];
  CheckResult total = {0.0, 0};
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = tile_size(begin, count);
    const opmath_t* tile = read(grad, begin, n, buffer);
    CheckResult result = check_tile(tile, n);
    if (!result.found_inf && math::not_finite(result.sum_sq)) {
      // Finite floats of 2e19 and more have no finite square in float; they do in double.
      double wide[kTile];
      cast(tile, wide, n);
      result = check_tile(wide, n);
    }
    total.sum_sq += result.sum_sq;
    total.found_inf |= result.found_inf;
  }
  return total;
}

CheckResult check(In grad, int64_t count) {
  return grad.dtype == DType::kDouble ? check_chunk<double>(grad, count)
                                      : check_chunk<float>(grad, count);
}

template <typename opmath_t>
int32_t unscale_chunk(In src, Out dst, int64_t count, opmath_t inv_scale) {
  opmath_t in_buffer[kTile];
  opmath_t out_buffer[kTile];
  int32_t found_inf = 0;
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = tile_size(begin, count);
    const opmath_t* in = read(src, begin, n, in_buffer);
    opmath_t* out = place(dst, begin, out_buffer);
    // No __restrict: src and dst may be the same memory, element by element.
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = math::unscale(in[i], inv_scale, found_inf);
    close(out, dst, begin, n);
  }
  return found_inf;
}

int32_t unscale(In src, Out dst, int64_t count, double inv_scale) {
  if (src.dtype == DType::kDouble || dst.dtype == DType::kDouble) {
    return unscale_chunk<double>(src, dst, count, inv_scale);
  }
  return unscale_chunk<float>(src, dst, count, static_cast<float>(inv_scale));
}

template <typename opmath_t>
int32_t axpby_chunk(In x, In y, Out out, int64_t count, const math::Axpby<opmath_t>& factors) {
  opmath_t x_buffer[kTile];
  opmath_t y_buffer[kTile];
  opmath_t out_buffer[kTile];
  int32_t found_inf = 0;
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = tile_size(begin, count);
    const opmath_t* x_tile = read(x, begin, n, x_buffer);
    const opmath_t* y_tile = read(y, begin, n, y_buffer);
    opmath_t* out_tile = place(out, begin, out_buffer);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      out_tile[i] = math::axpby(x_tile[i], y_tile[i], factors, found_inf);
    }
    close(out_tile, out, begin, n);
  }
  return found_inf;
}

int32_t axpby(In x, In y, Out out, int64_t count, const math::Axpby<double>& factors) {
  if (x.dtype == DType::kDouble || y.dtype == DType::kDouble || out.dtype == DType::kDouble) {
    return axpby_chunk(x, y, out, count, factors);
  }
  const math::Axpby<float> narrow = {static_cast<float>(factors.a), static_cast<float>(factors.b),
                                     factors.check_x, factors.check_y};
  return axpby_chunk(x, y, out, count, narrow);
}

template <typename opmath_t>
void adam_chunk(const AdamChunk& chunk, const math::AdamFactors<opmath_t>& factors) {
  opmath_t buffers[4][kTile];
  for (int64_t begin = 0; begin < chunk.count; begin += kTile) {
    const int64_t n = tile_size(begin, chunk.count);
    const opmath_t* __restrict grad = read(chunk.grad, begin, n, buffers[0]);
    opmath_t* __restrict param = open(chunk.param, begin, n, buffers[1]);
    opmath_t* __restrict exp_avg = open(chunk.exp_avg, begin, n, buffers[2]);
    opmath_t* __restrict exp_avg_sq = open(chunk.exp_avg_sq, begin, n, buffers[3]);
    for (int64_t i = 0; i < n; ++i) {
      math::adam(param[i], exp_avg[i], exp_avg_sq[i], grad[i], factors);
    }
    close(param, chunk.param, begin, n);
    close(exp_avg, chunk.exp_avg, begin, n);
    close(exp_avg_sq, chunk.exp_avg_sq, begin, n);
    if (chunk.copy.data != nullptr) {
      convert_out(param, at(chunk.copy.data, chunk.copy.dtype, begin), chunk.copy.dtype, n);
    }
  }
}

void adam(const AdamChunk& chunk, const math::AdamFactors<double>& factors) {
  // Double gradients of a float parameter may be finite only in double until they are unscaled.
  if (chunk.param.dtype == DType::kDouble || chunk.grad.dtype == DType::kDouble) {
    return adam_chunk(chunk, factors);
  }
  adam_chunk(chunk, math::narrow(factors));
}

constexpr Kernels table(const char* level) { return {level, check, unscale, axpby, adam}; }
