// The attributes of every formula: where it may run, and that it is inlined.
#pragma once

// A formula is always inlined and has internal linkage. The same header is compiled once per
// instruction set (cpu/), and an out-of-line AVX-512 copy that the linker also gives to the
// baseline would crash older processors.
#if defined(__CUDACC__)
#define APEX_MP_MATH static __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define APEX_MP_MATH static __forceinline
#else
#define APEX_MP_MATH static inline __attribute__((always_inline))
#endif
