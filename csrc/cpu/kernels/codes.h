// Moments of one byte (math/codes.h): a tile is decoded into floats, stepped, and encoded again
// while it is in the cache. Part of impl.h.

constexpr int kMoments = 2;  // of a state that may be kept in codes

// A part of a tensor of state, from the first number of a block on.
struct CodedPart {
  float* numbers;
  Codes codes;
};

inline Codes block_of(const Codes& codes, int64_t begin) {
  return {codes.codes + begin, codes.exponents + begin / math::kCodeBlock};
}

template <int which>
void decode_numbers(const Codes& codes, float* dst, int64_t count) {
  const uint32_t offset = math::code_offset(which, *codes.exponents);
  for (int64_t i = 0; i < count; ++i) dst[i] = math::decode(which, codes.codes[i], offset);
}

// The last numbers of a tensor, fewer than a block; or a block, at the baseline.
template <int which>
void encode_numbers(const float* src, const Codes& codes, int64_t count,
                    const math::Rounding& rounding, uint32_t first) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = math::larger_bits(largest, src[i]);
  const uint32_t exponent = math::block_exponent(which, largest);
  *codes.exponents = static_cast<uint8_t>(exponent);
  const uint32_t offset = math::code_offset(which, exponent);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t element = first + static_cast<uint32_t>(i);
    const auto how = rounding.is_stochastic
                         ? math::code_at_random(
                               0.0f, math::half_for(which, math::random_bits(element, rounding)))
                         : math::code_to_nearest(src[i]);
    const bool is_nan = exponent == math::kAllNan;
    codes.codes[i] = static_cast<uint8_t>(is_nan ? math::largest_code(which)
                                                 : math::encode(which, src[i], offset, how));
  }
}

#if APEX_MP_LEVEL > 0
constexpr int kCodeRegisters = math::kCodeBlock / kWidth;

#if APEX_MP_LEVEL == 2
constexpr bits_register_t kInOrder = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

APEX_MP_MATH bits_register_t load_bytes(const uint8_t* src) {
  return reinterpret_cast<bits_register_t>(
      _mm512_maskz_cvtepu8_epi32(0xffff, load_register<__m128i>(src)));
}

APEX_MP_MATH void store_bytes(bits_register_t bits, uint8_t* dst) {
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(bits));
  memcpy(dst, &bytes, sizeof(bytes));
}
#else
constexpr bits_register_t kInOrder = {0, 1, 2, 3, 4, 5, 6, 7};

APEX_MP_MATH bits_register_t load_bytes(const uint8_t* src) {
  return reinterpret_cast<bits_register_t>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src))));
}

APEX_MP_MATH void store_bytes(bits_register_t bits, uint8_t* dst) {
  const __m256i lowest = _mm256_setr_epi32(0x0c080400, 0, 0, 0, 0x0c080400, 0, 0, 0);
  const __m256i packed = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(bits), lowest);
  const __m128i bytes =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), bytes);
}
#endif

APEX_MP_MATH uint32_t largest_of(const Floats (&numbers)[kCodeRegisters]) {
  int_register_t largest = {};  // Sizes are positive, and signed comparisons are quicker.
  for (const Floats& each : numbers) {
    const auto size = reinterpret_cast<int_register_t>(bits_of(each) & 0x7fffffffu);
    largest = size > largest ? size : largest;
  }
  typedef int32_t quarter_t __attribute__((vector_size(16)));
  quarter_t quarters[kWidth / 4];
  memcpy(quarters, &largest, sizeof(largest));
  quarter_t four = quarters[0];
  for (const quarter_t& other : quarters) four = other > four ? other : four;
  int32_t found = 0;
  for (int i = 0; i < 4; ++i) found = four[i] > found ? four[i] : found;
  return static_cast<uint32_t>(found);
}

template <int which>
APEX_MP_MATH void decode_block(const Codes& codes, float* dst) {
  const uint32_t offset = math::code_offset(which, *codes.exponents);
  for (int part = 0; part < kCodeRegisters; ++part) {
    const bits_register_t code = load_bytes(codes.codes + part * kWidth);
    store(from_bits(math::decoded_bits(which, code, offset), Floats()), dst + part * kWidth);
  }
}

template <int which, bool stochastic>
APEX_MP_MATH void encode_block(const float* src, const Codes& codes,
                               const bits_register_t (&random)[kCodeRegisters]) {
  Floats numbers[kCodeRegisters];
  for (int part = 0; part < kCodeRegisters; ++part) numbers[part] = load(src + part * kWidth);
  const uint32_t exponent = math::block_exponent(which, largest_of(numbers));
  const uint32_t offset = math::code_offset(which, exponent);
  *codes.exponents = static_cast<uint8_t>(exponent);
  if (exponent == math::kAllNan) {
    memset(codes.codes, static_cast<int>(math::largest_code(which)), math::kCodeBlock);
    return;
  }
  for (int part = 0; part < kCodeRegisters; ++part) {
    math::CodeRounding<Floats, bits_register_t> how;
    if constexpr (stochastic) {
      how = math::code_at_random(Floats(), math::half_for(which, random[part]));
    } else {
      how = math::code_to_nearest(numbers[part]);
    }
    store_bytes(math::encode(which, numbers[part], offset, how), codes.codes + part * kWidth);
  }
}

// Both moments, which share random bits.
template <bool stochastic>
void encode_blocks(const CodedPart (&parts)[kMoments], int64_t count,
                   const math::Rounding& rounding, uint32_t first) {
  for (int64_t begin = 0; begin < count; begin += math::kCodeBlock) {
    bits_register_t random[kCodeRegisters] = {};
    for (int part = 0; stochastic && part < kCodeRegisters; ++part) {
      const auto place = static_cast<uint32_t>(begin + part * kWidth);
      random[part] = math::random_bits(kInOrder + (first + place), rounding);
    }
    encode_block<0, stochastic>(parts[0].numbers + begin, block_of(parts[0].codes, begin), random);
    encode_block<1, stochastic>(parts[1].numbers + begin, block_of(parts[1].codes, begin), random);
  }
}
#endif

template <int which>
void read_codes_of(const Codes& codes, float* dst, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += math::kCodeBlock) {
    const Codes block = block_of(codes, begin);
    const int64_t left = count - begin < math::kCodeBlock ? count - begin : math::kCodeBlock;
#if APEX_MP_LEVEL > 0
    if (left == math::kCodeBlock) {
      decode_block<which>(block, dst + begin);
      continue;
    }
#endif
    decode_numbers<which>(block, dst + begin, left);
  }
}

void read_codes(int which, const Codes& codes, float* dst, int64_t count) {
  return which == 0 ? read_codes_of<0>(codes, dst, count) : read_codes_of<1>(codes, dst, count);
}

template <int which>
void write_codes_of(const float* src, const Codes& codes, int64_t count,
                    const math::Rounding& rounding, uint32_t first) {
  for (int64_t begin = 0; begin < count; begin += math::kCodeBlock) {
    const int64_t left = count - begin < math::kCodeBlock ? count - begin : math::kCodeBlock;
    encode_numbers<which>(src + begin, block_of(codes, begin), left, rounding,
                          first + static_cast<uint32_t>(begin));
  }
}

void write_codes(int which, const float* src, const Codes& codes, int64_t count,
                 const math::Rounding& rounding, uint32_t first) {
  return which == 0 ? write_codes_of<0>(src, codes, count, rounding, first)
                    : write_codes_of<1>(src, codes, count, rounding, first);
}

inline void write_both_codes(const CodedPart (&parts)[kMoments], int64_t count,
                             const math::Rounding& rounding, uint32_t first) {
  int64_t whole = 0;
#if APEX_MP_LEVEL > 0
  whole = count / math::kCodeBlock * math::kCodeBlock;
  if (rounding.is_stochastic) {
    encode_blocks<true>(parts, whole, rounding, first);
  } else {
    encode_blocks<false>(parts, whole, rounding, first);
  }
#endif
  for (int i = 0; i < kMoments; ++i) {
    write_codes(i, parts[i].numbers + whole, block_of(parts[i].codes, whole), count - whole,
                rounding, first + static_cast<uint32_t>(whole));
  }
}
