// sgd: tiles for any mixture of dtypes. Part of kernels_impl.h.

template <typename opmath_t>
void sgd_in_tiles(const SgdChunk& chunk, const math::SgdFactors<opmath_t>& factors) {
  opmath_t buffers[3][kTile] = {};
  for (int64_t begin = 0; begin < chunk.count; begin += kTile) {
    const int64_t n = tile_size(begin, chunk.count);
    const opmath_t* __restrict grad = read(chunk.grad, begin, n, buffers[0]);
    opmath_t* __restrict param = open(chunk.param, begin, n, buffers[1]);
    // Without momentum the formula leaves it alone.
    opmath_t* __restrict moving =
        factors.has_momentum ? open(chunk.momentum_buffer, begin, n, buffers[2]) : buffers[2];
    for (int64_t i = 0; i < n; ++i) math::sgd(param[i], moving[i], grad[i], factors);
    close(param, chunk.param, begin, n);
    if (factors.has_momentum) close(moving, chunk.momentum_buffer, begin, n);
    if (chunk.copy.data != nullptr) {
      convert_out(param, at(chunk.copy.data, chunk.copy.dtype, begin), chunk.copy.dtype, n);
    }
  }
}

void sgd(const SgdChunk& chunk, const math::SgdFactors<double>& factors) {
  const bool wide = chunk.param.dtype == DType::kDouble || chunk.grad.dtype == DType::kDouble ||
                    (factors.has_momentum && chunk.momentum_buffer.dtype == DType::kDouble);
  if (wide) return sgd_in_tiles(chunk, factors);
  sgd_in_tiles(chunk, math::narrow(factors));
}
