// Tiles: a few hundred numbers of any dtype, converted to the type of the formulas and back. Part
// of impl.h.

constexpr int64_t kTile = 512;

// Numbers behind the last whole register are converted one by one.
template <typename half_t>
inline void widen_all(const half_t* src, float* dst, int64_t count) {
  int64_t i = 0;
#if APEX_MP_LEVEL > 0
  for (; i + kWidth <= count; i += kWidth) store(load(src + i), dst + i);
#endif
  for (; i < count; ++i) dst[i] = widen(src[i]);
}

template <typename half_t>
inline void narrow_all(const float* src, half_t* dst, int64_t count) {
  int64_t i = 0;
#if APEX_MP_LEVEL > 0
  for (; i + kWidth <= count; i += kWidth) store(load(src + i), dst + i);
#endif
  for (; i < count; ++i) narrow(src[i], dst[i]);
}

template <typename from_t, typename to_t>
inline void cast(const from_t* src, to_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<to_t>(src[i]);
}

// Convert `count` (at most kTile) numbers at `src` into `dst`.
inline void convert_in(const void* src, DType dtype, float* dst, int64_t count) {
  switch (dtype) {
    case DType::kHalf:
      return widen_all(static_cast<const Half*>(src), dst, count);
    case DType::kBFloat16:
      return widen_all(static_cast<const BFloat16*>(src), dst, count);
    case DType::kFloat:
      return cast(static_cast<const float*>(src), dst, count);
    default:  // GCOVR_EXCL_START: where a double is read, math is double.
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
      return narrow_all(src, static_cast<Half*>(dst), count);
    case DType::kBFloat16:
      return narrow_all(src, static_cast<BFloat16*>(dst), count);
    case DType::kFloat:
      return cast(src, static_cast<float*>(dst), count);
    default:
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

// Returns a tile to read: the memory itself if it has the math type, else a converted copy in
// `buffer`.
template <typename opmath_t>
inline const opmath_t* read(In array, int64_t begin, int64_t count, opmath_t* buffer) {
  const void* src = at(array.data, array.dtype, begin);
  if (array.dtype == kMathType<opmath_t>) return static_cast<const opmath_t*>(src);
  convert_in(src, array.dtype, buffer, count);
  return buffer;
}

// A tile to fill, or (open) to change; close() writes a buffer back to memory.
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
