// Masters that lie in memory as weights and remainders (math/split.h). Part of kernels_impl.h.

#if APEX_MP_LEVEL > 0
APEX_MP_MATH bits_register_t widen_bits(half_register_t half) {
  return __builtin_convertvector(half, bits_register_t);
}

APEX_MP_MATH Floats join(const Half* weights, const uint16_t* remainders) {
  const auto remainder = widen_bits(load_register<half_register_t>(remainders));
  return math::join_float16(load(weights), remainder);
}

APEX_MP_MATH Floats join(const BFloat16* weights, const uint16_t* remainders) {
  const auto weight = widen_bits(load_register<half_register_t>(weights));
  const auto remainder = widen_bits(load_register<half_register_t>(remainders));
  return from_bits(math::join_bfloat16(weight, remainder), Floats());
}

APEX_MP_MATH void store_halves(bits_register_t bits, void* dst) {
  const auto halves = __builtin_convertvector(bits, half_register_t);
  memcpy(dst, &halves, sizeof(halves));
}

APEX_MP_MATH void split(Floats master, Half* weights, uint16_t* remainders) {
  const half_register_t half = pack(master, Half());
  const Floats wide = load(reinterpret_cast<const Half*>(&half));
  bits_register_t weight;
  bits_register_t remainder;
  math::split_float16(master, widen_bits(half), wide, weight, remainder);
  store_halves(weight, weights);
  store_halves(remainder, remainders);
}

APEX_MP_MATH void split(Floats master, BFloat16* weights, uint16_t* remainders) {
  bits_register_t weight;
  bits_register_t remainder;
  math::split_bfloat16(bits_of(master), weight, remainder);
  store_halves(weight, weights);
  store_halves(remainder, remainders);
}
#endif

inline float join(Half weight, uint16_t remainder) {
  return math::join_float16(widen(weight), uint32_t{remainder});
}

inline float join(BFloat16 weight, uint16_t remainder) {
  return math::from_bits(math::join_bfloat16(uint32_t{weight.bits}, uint32_t{remainder}), 0.0f);
}

inline void split(float master, Half& weight, uint16_t& remainder) {
  Half half;
  narrow(master, half);
  uint32_t weight_bits;
  uint32_t remainder_bits;
  math::split_float16(master, uint32_t{half.bits}, widen(half), weight_bits, remainder_bits);
  weight.bits = static_cast<uint16_t>(weight_bits);
  remainder = static_cast<uint16_t>(remainder_bits);
}

inline void split(float master, BFloat16& weight, uint16_t& remainder) {
  uint32_t weight_bits;
  uint32_t remainder_bits;
  math::split_bfloat16(math::bits_of(master), weight_bits, remainder_bits);
  weight.bits = static_cast<uint16_t>(weight_bits);
  remainder = static_cast<uint16_t>(remainder_bits);
}

template <typename half_t>
inline void join_all(const void* weights, const void* remainders, float* masters, int64_t count) {
  const auto* halves = static_cast<const half_t*>(weights);
  const auto* rests = static_cast<const uint16_t*>(remainders);
  int64_t i = 0;
#if APEX_MP_LEVEL > 0
  for (; i + kWidth <= count; i += kWidth) store(join(halves + i, rests + i), masters + i);
#endif
  for (; i < count; ++i) masters[i] = join(halves[i], rests[i]);
}

template <typename half_t>
inline void split_all(const float* masters, void* weights, void* remainders, int64_t count) {
  auto* halves = static_cast<half_t*>(weights);
  auto* rests = static_cast<uint16_t*>(remainders);
  int64_t i = 0;
#if APEX_MP_LEVEL > 0
  for (; i + kWidth <= count; i += kWidth) split(load(masters + i), halves + i, rests + i);
#endif
  for (; i < count; ++i) split(masters[i], halves[i], rests[i]);
}

void join_masters(In weights, In remainders, float* masters, int64_t count) {
  const auto join_them = weights.dtype == DType::kHalf ? join_all<Half> : join_all<BFloat16>;
  join_them(weights.data, remainders.data, masters, count);
}

void split_masters(const float* masters, Out weights, Out remainders, int64_t count) {
  const auto split_them = weights.dtype == DType::kHalf ? split_all<Half> : split_all<BFloat16>;
  split_them(masters, weights.data, remainders.data, count);
}
