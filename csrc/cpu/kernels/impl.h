// The CPU kernels. Each <level>.cpp includes this file once, inside a namespace of its own
// and after setting the instruction set; so neither it nor its parts may include a library, or use
// templates of the standard library (their code would be shared between levels).
//
// A kernel walks its chunk in tiles: convert in, run the formula of math/ over the tile (the
// compiler vectorises that loop), convert out. Numbers of the math type are used in place. The
// kernels of the step also have loops over registers, which give the same bits: with tiles the
// processor would wait longer for memory.

// clang-format off: each part uses those before it.
#if APEX_MP_LEVEL > 0
#include "cpu/kernels/registers.h"
#include "cpu/kernels/blocks.h"
#endif
#include "cpu/kernels/tiles.h"
#include "cpu/kernels/split.h"
#include "cpu/kernels/codes.h"
#include "cpu/kernels/check.h"
#include "cpu/kernels/exponents.h"
#include "cpu/kernels/step.h"
// clang-format on

template <typename opmath_t>
CheckResult unscale_chunk(In src, Out dst, int64_t count, opmath_t inv_scale, bool sums) {
  opmath_t in_buffer[kTile];
  opmath_t out_buffer[kTile];
  CheckResult result = {0.0, 0};
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = tile_size(begin, count);
    const opmath_t* in = read(src, begin, n, in_buffer);
    int32_t found_inf = 0;
    opmath_t* out = place(dst, begin, out_buffer);
    // No __restrict: src and dst may be the same memory, element by element.
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = math::unscale(in[i], inv_scale, found_inf);
    close(out, dst, begin, n);
    result.found_inf |= found_inf;
    // The tile is still in the cache.
    if (sums) result.sum_sq += check({at(dst.data, dst.dtype, begin), dst.dtype}, n).sum_sq;
  }
  return result;
}

CheckResult unscale(In src, Out dst, int64_t count, double inv_scale, bool sums) {
  if (src.dtype == DType::kDouble || dst.dtype == DType::kDouble) {
    return unscale_chunk<double>(src, dst, count, inv_scale, sums);
  }
  return unscale_chunk<float>(src, dst, count, static_cast<float>(inv_scale), sums);
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

template <typename... Rules>
constexpr Kernels table(const char* level, math::RuleList<Rules...>) {
  return {level,      check,       max_abs,          exponents,
          unscale,    axpby,       join_masters,     split_masters,
          read_codes, write_codes, {step<Rules>...}, {measure_of<Rules>()...}};
}
