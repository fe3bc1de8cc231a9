// Parameters whose best values only measurements on a GPU can show. Macros override them, so that
// benchmarks can compare: NVCC_APPEND_FLAGS=-DAPEX_MP_VECTORS=1. Only .cu files use them.
#pragma once

// The most numbers that one block takes: a power of two, at least 2048.
#ifndef APEX_MP_CHUNK_SIZE
#define APEX_MP_CHUNK_SIZE 16384
#endif

// Vectors of each array that a thread loads before it computes, in kernels that write: with 2 more
// loads run at the same time, with 1 a thread needs fewer registers.
#ifndef APEX_MP_VECTORS
#define APEX_MP_VECTORS 2
#endif

// The same in kernels that only read: check_ and pass 1 of the fused step.
#ifndef APEX_MP_READ_VECTORS
#define APEX_MP_READ_VECTORS 4
#endif

// Blocks that must fit on a multiprocessor, in kernels that write: with 4 a thread has 64
// registers, with 5 it has 48, with 6 it has 40.
#ifndef APEX_MP_BLOCKS
#define APEX_MP_BLOCKS 4
#endif

// Whether pass 2 of the fused step streams parameters and moments, so that they leave space in the
// second-level cache for gradients, which pass 1 has just read: 0 or 1. An H100 (9.0) was 0.3
// to 1.8 % faster with 0 (docs/decisions.md); no other architecture was measured.
#ifndef APEX_MP_STREAM_STATE
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define APEX_MP_STREAM_STATE 0
#else
#define APEX_MP_STREAM_STATE 1
#endif
#endif
