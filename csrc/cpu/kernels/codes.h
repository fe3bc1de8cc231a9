// Moments of one byte (math/codes.h): a tile is decoded into floats, stepped, and encoded again
// while it is in the cache. Part of impl.h.

template <int which>
APEX_MP_MATH void decode_block(const uint8_t* codes, uint8_t exponent, float* dst, int64_t count) {
  const uint32_t offset = math::code_offset(which, exponent);
  for (int64_t i = 0; i < count; ++i) dst[i] = math::decode(which, codes[i], offset);
}

template <int which, typename rounding_t>
APEX_MP_MATH void encode_block(const float* src, uint8_t* codes, uint8_t& exponent, int64_t count,
                               const rounding_t& rounding_of) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = math::larger_bits(largest, src[i]);
  exponent = static_cast<uint8_t>(math::block_exponent(which, largest));
  const uint32_t offset = math::code_offset(which, exponent);
  const bool is_nan = exponent == math::kAllNan;
  for (int64_t i = 0; i < count; ++i) {
    codes[i] =
        static_cast<uint8_t>(math::encode(which, src[i], offset, is_nan, rounding_of(i, src[i])));
  }
}

struct WholeBlock {
  constexpr operator int64_t() const { return math::kCodeBlock; }
};

// Calls body(begin, count) for each block; the count of a whole one is a constant, for the
// compiler.
template <typename Body>
APEX_MP_MATH void for_each_block(int64_t count, const Body& body) {
  int64_t begin = 0;
  for (; begin + math::kCodeBlock <= count; begin += math::kCodeBlock) {
    body(begin, WholeBlock());
  }
  if (begin < count) body(begin, count - begin);
}

// Of tensor 0 or 1 of a state, from the first number of a block on.
template <int which>
void read_codes_of(const Codes& codes, float* dst, int64_t count) {
  for_each_block(count, [&](int64_t begin, auto n) {
    decode_block<which>(codes.codes + begin, codes.exponents[begin / math::kCodeBlock], dst + begin,
                        n);
  });
}

template <int which>
void write_codes_of(const float* src, const Codes& codes, int64_t count,
                    const math::Rounding& rounding, uint32_t first) {
  for_each_block(count, [&](int64_t begin, auto n) {
    uint8_t& exponent = codes.exponents[begin / math::kCodeBlock];
    uint8_t* dst = codes.codes + begin;
    if (rounding.is_stochastic) {
      const uint32_t element = first + static_cast<uint32_t>(begin);
      encode_block<which>(src + begin, dst, exponent, n, [&](int64_t i, float) {
        const uint32_t random = math::random_bits(element + static_cast<uint32_t>(i), rounding);
        return math::code_at_random(math::half_for(which, random));
      });
    } else {
      encode_block<which>(src + begin, dst, exponent, n,
                          [](int64_t, float x) { return math::code_to_nearest(x); });
    }
  });
}

void read_codes(int which, const Codes& codes, float* dst, int64_t count) {
  return which == 0 ? read_codes_of<0>(codes, dst, count) : read_codes_of<1>(codes, dst, count);
}

void write_codes(int which, const float* src, const Codes& codes, int64_t count,
                 const math::Rounding& rounding, uint32_t first) {
  return which == 0 ? write_codes_of<0>(src, codes, count, rounding, first)
                    : write_codes_of<1>(src, codes, count, rounding, first);
}
