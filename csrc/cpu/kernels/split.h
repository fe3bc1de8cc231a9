// Loads and stores of masters that are kept as weights and remainders (math/split.h). Part of
// impl.h.

#if APEX_MP_LEVEL > 0
// Not 0 where a master with this float16 weight is not exact and finite, unlike in most blocks; if
// it is, a join is an addition and a split a difference. Not 0 for 2**-16 itself, either, to which
// a smaller master may have been rounded.
APEX_MP_MATH __m256i not_plain(half_block_t weights) {
  constexpr uint16_t kFirst = 0x0101;
  constexpr uint16_t kInfinite = 0x7c00;
  const half_block_t size = weights & uint16_t{0x7fff};
  return _mm256_subs_epu16(reinterpret_cast<__m256i>(size - kFirst),
                           _mm256_set1_epi16(kInfinite - kFirst - 1));
}

// Not 0 where a remainder is not that of just any plain weight: the middle is an even one's.
APEX_MP_MATH __m256i not_near(half_block_t remainders) {
  constexpr uint16_t kBeforeTie = math::kFloatsToTie - 1;
  return _mm256_subs_epu16(reinterpret_cast<__m256i>(remainders + kBeforeTie),
                           _mm256_set1_epi16(2 * kBeforeTie));
}

// Not 0 where a bfloat16 is zero, infinite or NaN.
APEX_MP_MATH __m256i zero_or_infinite(half_block_t weights) {
  const half_block_t size = weights & uint16_t{0x7fff};
  return _mm256_subs_epu16(reinterpret_cast<__m256i>(size - uint16_t{1}),
                           _mm256_set1_epi16(0x7f80 - 2));
}

APEX_MP_MATH bool is_zero(__m256i bits) {
  return __builtin_expect(_mm256_testz_si256(bits, bits), true);
}

// Sets masters that do not round to their weights to these.
APEX_MP_MATH void hold(const Half* weights, FloatBlock& masters) {
  half_register_t halves[kRegisters];
  for (int i = 0; i < kRegisters; ++i) halves[i] = pack(masters[i], Half());
  const half_block_t others = in_order(halves) ^ load_register<half_block_t>(weights);
  if (is_zero(reinterpret_cast<__m256i>(others))) return;
  FloatBlock wide;
  load(weights, wide);
  for (int i = 0; i < kRegisters; ++i) {
    const Floats half = load(reinterpret_cast<const Half*>(&halves[i]));
    const auto rounds = math::rounds_to_float16(masters[i], half, wide[i]);
    masters[i] = math::held_if(rounds, masters[i], wide[i]);
  }
}

APEX_MP_MATH void hold(const BFloat16* weights, FloatBlock& masters) {
  FloatBlock wide;
  load(weights, wide);
  for (int i = 0; i < kRegisters; ++i) {
    const auto rounds = math::rounds_to_bfloat16(masters[i], wide[i]);
    masters[i] = math::held_if(rounds, masters[i], wide[i]);
  }
}

APEX_MP_MATH void join(const Half* weights, const uint16_t* remainders, FloatBlock& masters) {
  load(weights, masters);
  BitsBlock rests;
  load_signed(remainders, rests);
  const bool plain = is_zero(not_plain(load_register<half_block_t>(weights)) |
                             not_near(load_register<half_block_t>(remainders)));
  for (int i = 0; i < kRegisters; ++i) {
    masters[i] = plain ? from_bits(bits_of(masters[i]) + rests[i], Floats())
                       : math::join_float16(masters[i], rests[i]);
  }
  if (!plain) hold(weights, masters);
}

APEX_MP_MATH void join(const BFloat16* weights, const uint16_t* remainders, FloatBlock& masters) {
  load(weights, masters);
  BitsBlock rests;
  load_signed(remainders, rests);
  const bool plain = is_zero(zero_or_infinite(load_register<half_block_t>(weights)));
  for (int i = 0; i < kRegisters; ++i) {
    masters[i] = plain ? from_bits(bits_of(masters[i]) + rests[i], Floats())
                       : math::join_bfloat16(masters[i], rests[i]);
  }
}

APEX_MP_MATH void split(const FloatBlock& masters, Half* weights, uint16_t* remainders) {
  half_register_t halves[kRegisters];
  FloatBlock wide;
  BitsBlock rests;
  for (int i = 0; i < kRegisters; ++i) {
    halves[i] = pack(masters[i], Half());
    wide[i] = load(reinterpret_cast<const Half*>(&halves[i]));
    rests[i] = (bits_of(masters[i]) - bits_of(wide[i])) & 0xffffu;
  }
  const half_block_t block = in_order(halves);
  if (is_zero(not_plain(block))) {
    memcpy(weights, &block, sizeof(block));
  } else {
    BitsBlock bits;
    for (int i = 0; i < kRegisters; ++i) {
      const auto half = __builtin_convertvector(halves[i], bits_register_t);
      math::split_float16(masters[i], half, wide[i], bits[i], rests[i]);
    }
    store_halves(bits, reinterpret_cast<uint16_t*>(weights));
  }
  store_halves(rests, remainders);
}

APEX_MP_MATH void split(const FloatBlock& masters, BFloat16* weights, uint16_t* remainders) {
  BitsBlock bits;
  BitsBlock rests;
  for (int i = 0; i < kRegisters; ++i) math::split_bfloat16(bits_of(masters[i]), bits[i], rests[i]);
  store_halves(bits, reinterpret_cast<uint16_t*>(weights));
  store_halves(rests, remainders);
}
#endif

inline uint32_t with_sign(uint16_t remainder) {
  return static_cast<uint32_t>(static_cast<int16_t>(remainder));
}

inline float join(BFloat16 weight, uint16_t remainder) {
  return math::join_bfloat16(widen(weight), with_sign(remainder));
}

inline float join(Half weight, float master) {
  Half half;
  narrow(master, half);
  const bool rounds = math::rounds_to_float16(master, widen(half), widen(weight));
  return math::held_if(rounds, master, widen(weight));
}

inline float join(Half weight, uint16_t remainder) {
  return join(weight, math::join_float16(widen(weight), with_sign(remainder)));
}

inline float join(BFloat16 weight, float master) {
  return math::held_if(math::rounds_to_bfloat16(master, widen(weight)), master, widen(weight));
}

#if APEX_MP_LEVEL > 0
template <typename half_t>
APEX_MP_MATH void join(const half_t* weights, const float* whole, FloatBlock& masters) {
  load(whole, masters);
  hold(weights, masters);
}
#endif

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

template <typename half_t, typename kept_t>
inline void join_all(const void* weights, const void* kept, float* masters, int64_t count) {
  const auto* halves = static_cast<const half_t*>(weights);
  const auto* rests = static_cast<const kept_t*>(kept);
  int64_t i = 0;
#if APEX_MP_LEVEL > 0
  for (; i + kBlock <= count; i += kBlock) {
    FloatBlock block;
    join(halves + i, rests + i, block);
    store(block, masters + i);
  }
#endif
  for (; i < count; ++i) masters[i] = join(halves[i], rests[i]);
}

template <typename half_t>
inline void split_all(const float* masters, void* weights, void* remainders, int64_t count) {
  auto* halves = static_cast<half_t*>(weights);
  auto* rests = static_cast<uint16_t*>(remainders);
  int64_t i = 0;
#if APEX_MP_LEVEL > 0
  for (; i + kBlock <= count; i += kBlock) {
    FloatBlock block;
    load(masters + i, block);
    split(block, halves + i, rests + i);
  }
#endif
  for (; i < count; ++i) split(masters[i], halves[i], rests[i]);
}

template <typename kept_t>
inline void join_all(In weights, const void* kept, float* masters, int64_t count) {
  const bool is_half = weights.dtype == DType::kHalf;
  const auto join_them = is_half ? join_all<Half, kept_t> : join_all<BFloat16, kept_t>;
  join_them(weights.data, kept, masters, count);
}

void join_masters(In weights, In kept, float* masters, int64_t count) {
  const bool is_whole = kept.dtype == DType::kFloat;
  const auto join_them = is_whole ? join_all<float> : join_all<uint16_t>;
  join_them(weights, kept.data, masters, count);
}

void split_masters(const float* masters, Out weights, Out remainders, int64_t count) {
  const auto split_them = weights.dtype == DType::kHalf ? split_all<Half> : split_all<BFloat16>;
  split_them(masters, weights.data, remainders.data, count);
}
