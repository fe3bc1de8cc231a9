// A register of floats as a number type for the formulas of math/, with loads and stores. Part of
// impl.h, at the levels that convert float16 in hardware.

#if APEX_MP_LEVEL == 2
constexpr int64_t kWidth = 16;
#else
constexpr int64_t kWidth = 8;
#endif
typedef float float_register_t __attribute__((vector_size(kWidth * 4)));
typedef int32_t int_register_t __attribute__((vector_size(kWidth * 4)));
typedef uint32_t bits_register_t __attribute__((vector_size(kWidth * 4)));
typedef uint16_t half_register_t __attribute__((vector_size(kWidth * 2)));

// A struct, so that the formulas find its operators and functions in this namespace.
struct Floats {
  float_register_t value;

  Floats() = default;
  explicit Floats(float_register_t all) : value(all) {}
#if APEX_MP_LEVEL == 2
  explicit Floats(float each) : value(_mm512_set1_ps(each)) {}
#else
  explicit Floats(float each) : value(_mm256_set1_ps(each)) {}
#endif
};

APEX_MP_MATH Floats operator+(Floats a, Floats b) { return Floats(a.value + b.value); }
APEX_MP_MATH Floats operator-(Floats a, Floats b) { return Floats(a.value - b.value); }
APEX_MP_MATH Floats operator*(Floats a, Floats b) { return Floats(a.value * b.value); }
APEX_MP_MATH Floats operator/(Floats a, Floats b) { return Floats(a.value / b.value); }
APEX_MP_MATH Floats& operator+=(Floats& a, Floats b) { return a = a + b; }

APEX_MP_MATH Floats sqrt(Floats x) {
#if APEX_MP_LEVEL == 2
  return Floats(_mm512_maskz_sqrt_ps(0xffff, x.value));  // GCC 12 warns about the one without mask.
#else
  return Floats(_mm256_sqrt_ps(x.value));
#endif
}

APEX_MP_MATH bits_register_t bits_of(Floats x) {
  return reinterpret_cast<bits_register_t>(x.value);
}

APEX_MP_MATH Floats from_bits(bits_register_t bits, Floats) {
  return Floats(reinterpret_cast<float_register_t>(bits));
}

template <typename register_t>
APEX_MP_MATH register_t load_register(const void* src) {
  register_t value;
  memcpy(&value, src, sizeof(value));
  return value;
}

APEX_MP_MATH Floats load(const float* src) { return Floats(load_register<float_register_t>(src)); }

APEX_MP_MATH Floats load(const Half* src) {
#if APEX_MP_LEVEL == 2
  return Floats(_mm512_maskz_cvtph_ps(0xffff, load_register<__m256i>(src)));
#else
  return Floats(_mm256_cvtph_ps(load_register<__m128i>(src)));
#endif
}

APEX_MP_MATH Floats load(const BFloat16* src) {
#if APEX_MP_LEVEL == 2
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, load_register<__m256i>(src));
#else
  const __m256i wide = _mm256_cvtepu16_epi32(load_register<__m128i>(src));
#endif
  return from_bits(reinterpret_cast<bits_register_t>(wide) << 16, Floats());
}

APEX_MP_MATH half_register_t pack(Floats x, Half) {
#if APEX_MP_LEVEL == 2
  const __m256i packed = _mm512_maskz_cvtps_ph(0xffff, x.value, _MM_FROUND_TO_NEAREST_INT);
#else
  const __m128i packed = _mm256_cvtps_ph(x.value, _MM_FROUND_TO_NEAREST_INT);
#endif
  return reinterpret_cast<half_register_t>(packed);
}

APEX_MP_MATH bits_register_t bfloat16_bits(Floats x, bits_register_t added) {
  return math::bfloat16_bits(bits_of(x), x.value != x.value, added);
}

APEX_MP_MATH half_register_t pack(Floats x, BFloat16) {
  const bits_register_t bits = bfloat16_bits(x, math::to_nearest(bits_of(x)));
  return __builtin_convertvector(bits, half_register_t);
}

// Prefetches memory that a walk over several arrays will reach soon; the processor's own prefetcher
// fetches too little.
template <typename type_t>
APEX_MP_MATH void fetch_ahead(const type_t* src) {
  constexpr uintptr_t kBytesAhead = 2048;
  _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(src) + kBytesAhead),
               _MM_HINT_T0);
}

APEX_MP_MATH void store(Floats x, float* dst) { memcpy(dst, &x, sizeof(x)); }

template <typename half_t>
APEX_MP_MATH void store(Floats x, half_t* dst) {
  const half_register_t packed = pack(x, half_t());
  memcpy(dst, &packed, sizeof(packed));
}

// Stores past the caches, which would first read the old content. `dst` must be aligned to the size
// of the store, and _mm_sfence() must come before other threads read it.
template <typename half_t>
APEX_MP_MATH void stream(Floats x, half_t* dst) {
#if APEX_MP_LEVEL == 2
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst),
                      reinterpret_cast<__m256i>(pack(x, half_t())));
#else
  _mm_stream_si128(reinterpret_cast<__m128i*>(dst), reinterpret_cast<__m128i>(pack(x, half_t())));
#endif
}
