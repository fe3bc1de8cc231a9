// A block: the numbers that a loop over 16-bit numbers processes at once, one register of them. As
// floats they take one register with AVX-512 and two with AVX2, in the order in which the processor
// unpacks and packs: numbers 0-3 and 8-11 of the block, and 4-7 and 12-15, for any dtype in memory.
// Part of impl.h, at the levels that have registers.h.

#if APEX_MP_LEVEL == 2
constexpr int kRegisters = 1;
#else
constexpr int kRegisters = 2;
#endif
constexpr int64_t kBlock = kRegisters * kWidth;
typedef Floats FloatBlock[kRegisters];
typedef bits_register_t BitsBlock[kRegisters];
typedef uint16_t half_block_t __attribute__((vector_size(kBlock * 2)));

// The positions in a block of the numbers in its registers.
#if APEX_MP_LEVEL == 2
constexpr bits_register_t kPlaces[] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
#else
constexpr bits_register_t kPlaces[] = {{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}};
#endif

#if APEX_MP_LEVEL == 2
template <typename type_t>
APEX_MP_MATH void load(const type_t* src, FloatBlock& block) {
  block[0] = load(src);
}

APEX_MP_MATH void store(const FloatBlock& block, float* dst) { store(block[0], dst); }

APEX_MP_MATH half_block_t in_order(const half_register_t (&parts)[kRegisters]) { return parts[0]; }

// 16-bit numbers with their sign.
APEX_MP_MATH void load_signed(const uint16_t* src, BitsBlock& block) {
  block[0] = reinterpret_cast<bits_register_t>(
      _mm512_maskz_cvtepi16_epi32(0xffff, load_register<__m256i>(src)));
}

// The lower 16 bits of each; the upper ones must be 0.
APEX_MP_MATH void store_halves(const BitsBlock& block, uint16_t* dst) {
  const auto halves = __builtin_convertvector(block[0], half_register_t);
  memcpy(dst, &halves, sizeof(halves));
}
#else
APEX_MP_MATH void load(const float* src, FloatBlock& block) {
  const __m256 low = load(src).value;
  const __m256 high = load(src + kWidth).value;
  block[0] = Floats(_mm256_permute2f128_ps(low, high, 0x20));
  block[1] = Floats(_mm256_permute2f128_ps(low, high, 0x31));
}

APEX_MP_MATH void store(const FloatBlock& block, float* dst) {
  store(Floats(_mm256_permute2f128_ps(block[0].value, block[1].value, 0x20)), dst);
  store(Floats(_mm256_permute2f128_ps(block[0].value, block[1].value, 0x31)), dst + kWidth);
}

APEX_MP_MATH void load(const Half* src, FloatBlock& block) {
  const auto halves = load_register<__m256i>(src);
  const __m256i quarters = _mm256_permute4x64_epi64(halves, 0xd8);  // 0 2 1 3
  block[0] = Floats(_mm256_cvtph_ps(_mm256_castsi256_si128(quarters)));
  block[1] = Floats(_mm256_cvtph_ps(_mm256_extracti128_si256(quarters, 1)));
}

// The 16-bit numbers of a block in the order of memory.
APEX_MP_MATH half_block_t in_order(const half_register_t (&parts)[kRegisters]) {
  const auto low = reinterpret_cast<__m128i>(parts[0]);
  const auto high = reinterpret_cast<__m128i>(parts[1]);
  return reinterpret_cast<half_block_t>(
      _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high)));
}

// 16-bit numbers in the upper 16 of 32 bits.
APEX_MP_MATH void load_upper(const uint16_t* src, BitsBlock& block) {
  const auto halves = load_register<__m256i>(src);
  block[0] = reinterpret_cast<bits_register_t>(_mm256_unpacklo_epi16(__m256i{}, halves));
  block[1] = reinterpret_cast<bits_register_t>(_mm256_unpackhi_epi16(__m256i{}, halves));
}

APEX_MP_MATH void load(const BFloat16* src, FloatBlock& block) {
  BitsBlock bits;
  load_upper(&src->bits, bits);
  for (int i = 0; i < kRegisters; ++i) block[i] = from_bits(bits[i], Floats());
}

// 16-bit numbers with their sign.
APEX_MP_MATH void load_signed(const uint16_t* src, BitsBlock& block) {
  load_upper(src, block);
  for (bits_register_t& bits : block) {
    bits = reinterpret_cast<bits_register_t>(reinterpret_cast<int_register_t>(bits) >> 16);
  }
}

// The lower 16 bits of each; the upper ones must be 0.
APEX_MP_MATH void store_halves(const BitsBlock& block, uint16_t* dst) {
  const __m256i halves =
      _mm256_packus_epi32(reinterpret_cast<__m256i>(block[0]), reinterpret_cast<__m256i>(block[1]));
  memcpy(dst, &halves, sizeof(halves));
}
#endif

APEX_MP_MATH void store(const FloatBlock& block, BFloat16* dst, const BitsBlock& added) {
  BitsBlock bits;
  for (int i = 0; i < kRegisters; ++i) bits[i] = bfloat16_bits(block[i], added[i]);
  store_halves(bits, &dst->bits);
}

APEX_MP_MATH void store(const FloatBlock& block, BFloat16* dst) {
  BitsBlock added;
  for (int i = 0; i < kRegisters; ++i) added[i] = math::to_nearest(bits_of(block[i]));
  store(block, dst, added);
}
