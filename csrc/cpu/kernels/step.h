// The step of any rule of math/rules.h: tiles for any mixture of dtypes, registers for the common
// ones; and what is measured before it. Part of kernels_impl.h.

inline bool is_split(const StepChunk& chunk) { return chunk.copy.dtype == DType::kRemainder; }

template <typename opmath_t>
inline opmath_t* open_param(const StepChunk& chunk, int64_t begin, int64_t count,
                            opmath_t* buffer) {
  if (!is_split(chunk)) return open(chunk.param, begin, count, buffer);
  float masters[kTile];
  join_masters(In{at(chunk.param.data, chunk.param.dtype, begin), chunk.param.dtype},
               In{at(chunk.copy.data, chunk.copy.dtype, begin), chunk.copy.dtype}, masters, count);
  cast(masters, buffer, count);
  return buffer;
}

template <typename opmath_t>
inline void close_param(const opmath_t* tile, const StepChunk& chunk, int64_t begin,
                        int64_t count) {
  void* copy = at(chunk.copy.data, chunk.copy.dtype, begin);
  if (is_split(chunk)) {
    float masters[kTile];
    cast(tile, masters, count);
    split_masters(masters, {at(chunk.param.data, chunk.param.dtype, begin), chunk.param.dtype},
                  {copy, chunk.copy.dtype}, count);
    return;
  }
  close(tile, chunk.param, begin, count);
  if (chunk.copy.data != nullptr) convert_out(tile, copy, chunk.copy.dtype, count);
}

template <typename Rule, typename opmath_t>
void step_in_tiles(const StepChunk& chunk,
                   const typename Rule::template Factors<opmath_t>& factors) {
  opmath_t buffers[2 + math::kMaxTensors][kTile];
  const auto open_tensor = [&](int which, int64_t begin, int64_t n) {
    const Out& tensor = chunk.tensors[which];
    opmath_t* buffer = buffers[2 + which];
    if (tensor.data != nullptr) return open(tensor, begin, n, buffer);
    if (which < Rule::kTensors) memset(buffer, 0, n * sizeof(opmath_t));
    return buffer;
  };
  for (int64_t begin = 0; begin < chunk.count; begin += kTile) {
    const int64_t n = tile_size(begin, chunk.count);
    const opmath_t* __restrict grad = read(chunk.grad, begin, n, buffers[0]);
    opmath_t* __restrict param = open_param(chunk, begin, n, buffers[1]);
    opmath_t* __restrict first = open_tensor(0, begin, n);
    opmath_t* __restrict second = open_tensor(1, begin, n);
    for (int64_t i = 0; i < n; ++i) {
      opmath_t tensors[] = {first[i], second[i]};
      Rule::update(param[i], tensors, grad[i], factors);
      first[i] = tensors[0];
      if constexpr (Rule::kTensors > 1) second[i] = tensors[1];
    }
    close_param(param, chunk, begin, n);
    if (chunk.tensors[0].data != nullptr) close(first, chunk.tensors[0], begin, n);
    if (chunk.tensors[1].data != nullptr) close(second, chunk.tensors[1], begin, n);
  }
}

#if APEX_MP_LEVEL > 0
// Of a chunk that has all tensors of the rule.
template <typename Rule>
inline StepChunk part_of(StepChunk chunk, int64_t begin, int64_t count) {
  chunk.param.data = at(chunk.param.data, chunk.param.dtype, begin);
  chunk.grad.data = at(chunk.grad.data, chunk.grad.dtype, begin);
  if (chunk.copy.data != nullptr) chunk.copy.data = at(chunk.copy.data, chunk.copy.dtype, begin);
  for (int i = 0; i < Rule::kTensors; ++i) {
    chunk.tensors[i].data = at(chunk.tensors[i].data, chunk.tensors[i].dtype, begin);
  }
  chunk.count = count;
  return chunk;
}

// Whether the parameter is float or split, the state float or bfloat16, the gradient not double,
// and the copy of a half type and aligned to its type, if there is one; and no tensor of the rule
// is left out.
template <typename Rule>
bool fits_registers(const StepChunk& chunk) {
  bool fits = chunk.param.dtype == DType::kFloat || is_split(chunk);
  for (int i = 0; i < Rule::kTensors; ++i) {
    const Out& tensor = chunk.tensors[i];
    fits &= tensor.data != nullptr &&
            (tensor.dtype == DType::kFloat || tensor.dtype == DType::kBFloat16);
  }
  const bool no_copy = chunk.copy.data == nullptr;
  const bool half_copy = size_of(chunk.copy.dtype) == sizeof(Half) &&
                         reinterpret_cast<uintptr_t>(chunk.copy.data) % sizeof(Half) == 0;
  return fits && (no_copy || half_copy);
}

// How many numbers come before the first that stream() may write.
inline int64_t head_of(const StepChunk& chunk) {
  const auto address = reinterpret_cast<uintptr_t>(chunk.copy.data);
  const auto head = static_cast<int64_t>(-address % sizeof(half_register_t) / sizeof(Half));
  return head < chunk.count ? head : chunk.count;
}

template <typename Rule, typename grad_t>
void step_tile_in_registers(const StepChunk& tile,
                            const typename Rule::template Factors<Floats>& factors) {
  const auto* grads = static_cast<const grad_t*>(tile.grad.data);
  auto* params = static_cast<float*>(tile.param.data);
  auto* firsts = static_cast<float*>(tile.tensors[0].data);
  auto* seconds = static_cast<float*>(tile.tensors[1].data);
  for (int64_t i = 0; i < tile.count; i += kWidth) {
    fetch_ahead(grads + i);
    fetch_ahead(params + i);
    fetch_ahead(firsts + i);
    if constexpr (Rule::kTensors > 1) fetch_ahead(seconds + i);
    Floats param = load(params + i);
    Floats tensors[math::kMaxTensors];
    tensors[0] = load(firsts + i);
    if constexpr (Rule::kTensors > 1) tensors[1] = load(seconds + i);
    Rule::update(param, tensors, load(grads + i), factors);
    store(param, params + i);
    store(tensors[0], firsts + i);
    if constexpr (Rule::kTensors > 1) store(tensors[1], seconds + i);
  }
}

template <typename half_t>
void stream_tile(const void* params, void* copy, int64_t count) {
  const auto* src = static_cast<const float*>(params);
  auto* dst = static_cast<half_t*>(copy);
  for (int64_t i = 0; i < count; i += kWidth) stream(load(src + i), dst + i);
}

// A tile as floats: what is kept in 16 bits is brought to buffers, and back.
template <typename Rule>
class WideTile {
 public:
  explicit WideTile(const StepChunk& tile) : tile_(tile), wide_(tile) {
    if (is_split(tile)) {
      wide_.param = {buffers_[0], DType::kFloat};
      join_masters({tile.param.data, tile.param.dtype}, {tile.copy.data, tile.copy.dtype},
                   buffers_[0], tile.count);
    }
    for (int i = 0; i < Rule::kTensors; ++i) {
      if (tile.tensors[i].dtype == DType::kFloat) continue;
      wide_.tensors[i] = {buffers_[1 + i], DType::kFloat};
      widen_all(static_cast<const BFloat16*>(tile.tensors[i].data), buffers_[1 + i], tile.count);
    }
  }

  const StepChunk& floats() const { return wide_; }

  void write_back() const {
    if (is_split(tile_)) split_masters(buffers_[0], tile_.param, tile_.copy, tile_.count);
    for (int i = 0; i < Rule::kTensors; ++i) {
      if (tile_.tensors[i].dtype == DType::kFloat) continue;
      narrow_all(buffers_[1 + i], static_cast<BFloat16*>(tile_.tensors[i].data), tile_.count);
    }
  }

 private:
  StepChunk tile_;
  StepChunk wide_;
  float buffers_[1 + math::kMaxTensors][kTile];
};

// The chunk must begin where stream() may write, and end with a whole register.
template <typename Rule, typename grad_t>
void step_whole_registers(const StepChunk& chunk,
                          const typename Rule::template Factors<Floats>& factors) {
  for (int64_t begin = 0; begin < chunk.count; begin += kTile) {
    const StepChunk tile = part_of<Rule>(chunk, begin, tile_size(begin, chunk.count));
    WideTile<Rule> wide(tile);
    step_tile_in_registers<Rule, grad_t>(wide.floats(), factors);
    wide.write_back();
    // In a loop of its own, while the tile is in the cache: rounding right behind the formula made
    // one chain of instructions that waited for each other (bfloat16 with AVX2: 0.77 against 0.54
    // ns per number).
    if (tile.copy.data == nullptr || is_split(tile)) continue;
    if (tile.copy.dtype == DType::kHalf) {
      stream_tile<Half>(tile.param.data, tile.copy.data, tile.count);
    } else {
      stream_tile<BFloat16>(tile.param.data, tile.copy.data, tile.count);
    }
  }
  if (chunk.copy.data != nullptr) _mm_sfence();
}

template <typename Rule>
void step_in_registers(const StepChunk& chunk,
                       const typename Rule::template Factors<float>& factors) {
  const int64_t head = chunk.copy.data == nullptr || is_split(chunk) ? 0 : head_of(chunk);
  const int64_t body = (chunk.count - head) / kWidth * kWidth;
  const int64_t tail = chunk.count - head - body;
  const StepChunk aligned = part_of<Rule>(chunk, head, body);
  const auto wide = math::factors_as<Floats>(factors);
  if (head > 0) step_in_tiles<Rule, float>(part_of<Rule>(chunk, 0, head), factors);
  if (chunk.grad.dtype == DType::kHalf) {
    step_whole_registers<Rule, Half>(aligned, wide);
  } else if (chunk.grad.dtype == DType::kBFloat16) {
    step_whole_registers<Rule, BFloat16>(aligned, wide);
  } else {
    step_whole_registers<Rule, float>(aligned, wide);
  }
  if (tail > 0) step_in_tiles<Rule, float>(part_of<Rule>(chunk, head + body, tail), factors);
}
#endif

// Double gradients of a float parameter may be finite only in double until they are unscaled.
inline bool has_double_math(const StepChunk& chunk) {
  bool wide = chunk.param.dtype == DType::kDouble || chunk.grad.dtype == DType::kDouble;
  for (const Out& tensor : chunk.tensors) {
    wide |= tensor.data != nullptr && tensor.dtype == DType::kDouble;
  }
  return wide;
}

template <typename Rule>
void step(const StepChunk& chunk, const void* erased) {
  const auto& factors = *static_cast<const typename Rule::template Factors<double>*>(erased);
  if (has_double_math(chunk)) return step_in_tiles<Rule, double>(chunk, factors);
#if APEX_MP_LEVEL > 0
  if (fits_registers<Rule>(chunk)) {
    return step_in_registers<Rule>(chunk, math::factors_as<float>(factors));
  }
#endif
  step_in_tiles<Rule, float>(chunk, math::factors_as<float>(factors));
}

template <typename Rule, typename opmath_t>
math::Measured measure_in_tiles(const StepChunk& chunk,
                                const typename Rule::template Factors<opmath_t>& factors) {
  static_assert(Rule::kTensors == math::kMaxTensors && Rule::kAllTensors);
  opmath_t buffers[2 + math::kMaxTensors][kTile];
  opmath_t updates[kTile];
  math::Measured sums = {0.0, 0.0};
  for (int64_t begin = 0; begin < chunk.count; begin += kTile) {
    const int64_t n = tile_size(begin, chunk.count);
    const auto read_out = [&](const Out& array, opmath_t* buffer) {
      return read(In{array.data, array.dtype}, begin, n, buffer);
    };
    const opmath_t* grad = read(chunk.grad, begin, n, buffers[0]);
    const opmath_t* param = open_param(chunk, begin, n, buffers[1]);
    const opmath_t* first = read_out(chunk.tensors[0], buffers[2]);
    const opmath_t* second = read_out(chunk.tensors[1], buffers[3]);
    for (int64_t i = 0; i < n; ++i) {
      opmath_t tensors[] = {first[i], second[i]};
      updates[i] = Rule::direction(param[i], tensors, grad[i], factors);
    }
    sums.param += check({param, kMathType<opmath_t>}, n).sum_sq;
    sums.update += check({updates, kMathType<opmath_t>}, n).sum_sq;
  }
  return sums;
}

template <typename Rule>
math::Measured measure(const StepChunk& chunk, const void* erased) {
  const auto& factors = *static_cast<const typename Rule::template Factors<double>*>(erased);
  if (has_double_math(chunk)) return measure_in_tiles<Rule, double>(chunk, factors);
  return measure_in_tiles<Rule, float>(chunk, math::factors_as<float>(factors));
}

template <typename Rule>
constexpr MeasureKernel measure_of() {
  if constexpr (Rule::kRatio >= 0) return measure<Rule>;
  return nullptr;
}
