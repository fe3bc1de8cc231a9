// What only measurements on a GPU decide. A build chooses otherwise by macros, so that benchmarks
// may compare: NVCC_APPEND_FLAGS=-DAPEX_MP_VECTORS=1. All are read by nvcc alone, in .cu files.
#pragma once

// The most numbers that one block takes: a power of two, at least 2048.
#ifndef APEX_MP_CHUNK_SIZE
#define APEX_MP_CHUNK_SIZE 16384
#endif

// Vectors of each array that a thread loads before it computes, where a kernel writes: with 2 it
// has twice as much under way, with 1 it needs fewer registers.
#ifndef APEX_MP_VECTORS
#define APEX_MP_VECTORS 2
#endif

// The same where a kernel only reads: check_, l2_norm_ and pass 1 of the fused step.
#ifndef APEX_MP_READ_VECTORS
#define APEX_MP_READ_VECTORS 4
#endif

// Blocks that the compiler must fit on a multiprocessor, where a kernel writes: 4 leave a thread 64
// registers, 5 leave it 48, 6 leave it 40.
#ifndef APEX_MP_BLOCKS
#define APEX_MP_BLOCKS 4
#endif

// Whether pass 2 of the fused step streams parameters and moments, so that they leave space in the
// second-level cache for gradients, which pass 1 has just read: 0 or 1.
#ifndef APEX_MP_STREAM_STATE
#define APEX_MP_STREAM_STATE 1
#endif
