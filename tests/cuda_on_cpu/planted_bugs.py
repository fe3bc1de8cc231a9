"""Bugs planted into a copy of csrc/ one by one: what the nets are worth.

Each is a text replacement, and the words that the net must answer with. It names a few tests of a
net of nets.py, to keep its run short.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from builder import CSRC
from nets import INSIDE, NETS, Net

TESTS = "tests/operators/test_operators.py"
EDGES = f"{INSIDE}/test_chunk_edges.py"
LARGE = f"{INSIDE}/test_large.py"

UNSCALE = f"{TESTS}::test_unscale_multiplies_and_rounds_once"
UNSCALE_SIZES = f"{EDGES}::test_every_size_around_a_chunk_is_computed_and_nothing_else -k unscale"
UNSCALE_OFFSETS = f"{EDGES}::test_every_pair_of_offsets_is_computed -k unscale"
SUMS = f"{TESTS}::test_check_sums_every_square_exactly_once -k chunk"
UNSCALED_SUMS = f"{TESTS}::test_unscale_sums_every_square_that_it_writes_exactly_once"
MANY_SUMS = f"{TESTS}::test_check_sums_every_square_exactly_once -k 2000"
LARGE_UNSCALE = f"{LARGE}::test_unscale_finds_the_last_numbers_of_a_large_tensor"

EXPONENTS = f"{TESTS}::test_exponents_counts_every_number_exactly_once -k chunk"

# Reports of the sanitizers, of the shim, and of the tests.
OVERFLOW = r"AddressSanitizer: heap-buffer-overflow"
UNDEFINED = r"runtime error: "
SHIM = r"RuntimeError: cuda_on_cpu: check_kernel, block \d+ of \d+: "
WAITS = r"thread \d+ waits at the (barrier|shuffle) of reduce\.h:\d+"
WRONG_BITS = r"AssertionError: bits differ at elements"
NOT_CLOSE = r"AssertionError: Tensor-likes are not close"


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each file below csrc/."""
    return {path.relative_to(CSRC).as_posix(): path.read_text() for path in CSRC.rglob("*.*")}


def places(text: str) -> list[tuple[str, re.Match[str]]]:
    """Return files of csrc/ and where they hold a text, whose white space does not matter."""
    tokens = [re.escape(token) for token in re.findall(r"\w+|[^\w\s]", text)]
    pattern = re.compile(r"\s*".join(tokens))
    return [(file, found) for file, code in sources().items() for found in pattern.finditer(code)]


@dataclasses.dataclass(frozen=True)
class PlantedBug:
    """One text replacement in csrc/, and which tests must fail in which words.

    The text may move to another line or file: it must be the only one of csrc/, or the first one
    behind the only one of `scope`, a signature for example. White space does not matter.
    """

    old: str
    new: str
    tests: str  # a file or a function of it, then "-k" and what is wanted of it
    caught_by: str  # a regular expression
    net: str = "wide grid, forward"  # whose tests these are
    scope: str = ""

    @property
    def short_net(self) -> Net:
        """The tests alone, on the grid and in the order of the net."""
        where, _, names = self.tests.partition(" -k ")
        tests = (where, *(("-k", names) if names else ()))
        return dataclasses.replace(NETS[self.net], tests=tests)

    @property
    def file(self) -> str:
        """The file below csrc/ that is changed."""
        return self._place[0]

    @property
    def _place(self) -> tuple[str, re.Match[str]]:
        found = places(self.old)
        if self.scope:
            ((file, scope),) = places(self.scope)
            behind = [each for each in found if each[0] == file and each[1].start() > scope.end()]
            found = behind[:1]
        assert len(found) == 1, f"csrc/ must hold this once, not {len(found)} times: {self.old}"
        return found[0]

    def plant(self, copy: Path) -> None:
        """Make `copy` a copy of csrc/ with the bug; files that are so already keep their time."""
        changed, place = self._place
        for file, text in sources().items():
            if file == changed:
                text = f"{text[: place.start()]}{self.new}{text[place.end() :]}"
            target = copy / file
            if not target.exists() or target.read_text() != text:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        for path in copy.rglob("*.*"):
            if not (CSRC / path.relative_to(copy)).exists():
                path.unlink()  # of an earlier csrc/


PLANTED_BUGS = {
    # --- which numbers a block takes
    "the tail is one number too long": PlantedBug(
        "i < part.count - in_vectors;",
        "i <= part.count - in_vectors;",
        UNSCALE_SIZES,
        OVERFLOW,
    ),
    "the tail is one number too short": PlantedBug(
        "i < part.count - in_vectors;",
        "i < part.count - in_vectors - 1;",
        UNSCALE_SIZES,
        WRONG_BITS,
    ),
    "there is one vector too many": PlantedBug(
        "(part.count - first) / kWidth;",
        "(part.count - first + kWidth - 1) / kWidth;",
        UNSCALE_SIZES,
        OVERFLOW,
    ),
    "the head before aligned vectors is left out": PlantedBug(
        "body(i < first ? i : i + in_vectors, OneNumber{});",
        "body(i + in_vectors, OneNumber{});",
        UNSCALE_OFFSETS,
        WRONG_BITS,
    ),
    "vectors of a thread lie side by side": PlantedBug(
        "kStride = kWidth * kBlockSize;",
        "kStride = kWidth;",
        UNSCALE_SIZES,
        WRONG_BITS,
    ),
    "vectors behind the last full round are left out": PlantedBug(
        "for (; vector < vectors; vector += kBlockSize) {",
        "for (; vector < 0; vector += kBlockSize) {",
        UNSCALE_SIZES,
        WRONG_BITS,
    ),
    "the last round goes beyond the last vector": PlantedBug(
        "vector < vectors - (kCount - 1) * kBlockSize;",
        "vector < vectors;",
        UNSCALE_SIZES,
        OVERFLOW,
    ),
    "unaligned memory is taken for aligned": PlantedBug(
        "static_cast<int8_t>(head_of(row))",
        "static_cast<int8_t>(0 * head_of(row))",
        UNSCALE_OFFSETS,
        UNDEFINED + r"(load of|store to|reference binding to) misaligned address",
    ),
    "chunks before a tensor are counted as if they were the largest": PlantedBug(
        "chunks += count_chunks(row.size, table.chunk_size);",
        "chunks += count_chunks(row.size, kLargestChunk);",
        f"{EDGES}::test_every_size_around_a_chunk_of_another_size_is_computed -k unscale",
        WRONG_BITS,
    ),
    "an index has 32 bits": PlantedBug(
        "const int64_t begin = index * chunk_size;",
        "const int64_t begin = static_cast<int32_t>(index) * static_cast<int32_t>(chunk_size);",
        LARGE_UNSCALE,
        UNDEFINED + "signed integer overflow",
    ),
    "an address has 32 bits": PlantedBug(
        "data += chunk.begin * size_of(dtype);",
        "data += static_cast<int32_t>(chunk.begin * size_of(dtype));",
        LARGE_UNSCALE,
        WRONG_BITS,
    ),
    "an empty tensor is found in place of the next": PlantedBug(
        "if (first_chunk[middle] <= chunk) {",
        "if (first_chunk[middle] < chunk) {",
        f"{UNSCALE} -k empty",
        WRONG_BITS,
    ),
    # --- which launches there are
    "the last launch of several is dropped": PlantedBug(
        "    }\n    body(table);",
        "    }\n    if (launch.first_tensor == 0 || launch.first_tensor + launch.tensors !=\n"
        "        static_cast<int64_t>(rows.size())) body(table);",
        f"{UNSCALE} -k 5000",
        WRONG_BITS,
    ),
    "the last launch is dropped where launches are full of chunks": PlantedBug(
        "    }\n    body(table);",
        "    }\n    if (launch.first_tensor == 0 || launch.first_tensor + launch.tensors !=\n"
        "        static_cast<int64_t>(rows.size())) body(table);",
        f"{EDGES}::test_launches_that_are_full_of_chunks_are_computed -k unscale",
        WRONG_BITS,
        net="narrow grid, backward",
    ),
    # --- sums over blocks
    "the last chunk of a tensor is not summed": PlantedBug(
        "chunk < end; chunk += kBlockSize",
        "chunk < end - 1; chunk += kBlockSize",
        SUMS,
        WRONG_BITS,
    ),
    "chunks beyond the number of threads are left out": PlantedBug(
        "chunk < end; chunk += kBlockSize",
        "chunk < end; chunk += 2 * kBlockSize",
        f"{LARGE}::test_more_chunks_than_a_block_has_threads_are_summed -k check",
        WRONG_BITS,
    ),
    "each launch writes its sums to the first places": PlantedBug(
        "chunk_sums[table.launch.first_chunk + blockIdx.x] = sum;",
        "chunk_sums[blockIdx.x] = sum;",
        MANY_SUMS,
        WRONG_BITS,
    ),
    "sums lie in the first places": PlantedBug(
        "sum_sq[table.place[slot]] = sum;",
        "sum_sq[table.launch.first_tensor + slot] = sum;",
        SUMS,
        WRONG_BITS,
    ),
    # --- counts over blocks
    "the counts of a block are not cleared": PlantedBug(
        "of_warps[warp][threadIdx.x] = 0;",
        "of_warps[warp][threadIdx.x] += 0;",
        EXPONENTS,
        WRONG_BITS + "|" + UNDEFINED,
    ),
    "a block counts before all its counts are cleared": PlantedBug(
        "  __syncthreads();\n  const Part<1> part",
        "  const Part<1> part",
        EXPONENTS,
        WRONG_BITS + "|" + UNDEFINED,
    ),
    "a block adds up before all its threads have counted": PlantedBug(
        "  __syncthreads();\n  int count = 0;",
        "  int count = 0;",
        EXPONENTS,
        WRONG_BITS,
    ),
    "a block forgets what other blocks have counted": PlantedBug(
        "  atomicAdd(reinterpret_cast<unsigned long long*>(of_tensor + threadIdx.x),\n"
        "            static_cast<unsigned long long>(count));",
        "  of_tensor[threadIdx.x] = count;",
        EXPONENTS,
        WRONG_BITS,
    ),
    "each launch counts for the first tensors": PlantedBug(
        "(table.launch.first_tensor + part.slot)",
        "part.slot",
        f"{TESTS}::test_exponents_counts_every_number_exactly_once -k 5000",
        WRONG_BITS,
    ),
    "scratch memory is too small": PlantedBug(
        "count += count_chunks(tensor.size, kLargestChunk);",
        "count += count_chunks(tensor.size, 2 * kLargestChunk);",
        SUMS,
        OVERFLOW,
    ),
    # --- which gradients are looked at
    "a sum that is not finite is taken for inf": PlantedBug(
        "  if (!math::not_finite(sum_sq)) return",
        "  if (math::not_finite(sum_sq)) found_inf = 1;\n  if (!math::not_finite(sum_sq)) return",
        f"{TESTS}::test_check_squares_large_finite_numbers_without_overflow",
        r"assert .*found_inf",
    ),
    "no thread looks for inf": PlantedBug(
        "  if (!math::not_finite(sum_sq)) return static_cast<double>(sum_sq);\n",
        "  return static_cast<double>(sum_sq);\n",
        f"{TESTS}::test_check_finds_inf_and_nan -k last",
        r'assert call\["found_inf"\]\.item\(\) == 1',
    ),
    "only the first of a thread's vectors is looked at": PlantedBug(
        "index + vector * span.kStride, Span<kWidth, 1>{}, grad);",
        "index + 0 * vector * span.kStride, Span<kWidth, 1>{}, grad);",
        f"{EDGES}::test_inf_and_nan_spoil_the_sum_wherever_they_are",
        r"assert not sums\.isfinite\(\)\.any\(\)",
    ),
    # --- threads that need each other
    "a barrier is missing": PlantedBug(
        "  __syncthreads();\n",
        "",
        SUMS,
        WRONG_BITS,
        scope="double block_reduce(",
    ),
    "unscaled gradients are squared before they are rounded": PlantedBug(
        "      round_as_stored(part.arrays[1].dtype, numbers);\n",
        "",
        f"{TESTS}::test_unscale_sums_what_it_has_written -k fp32-fp16",
        NOT_CLOSE,
    ),
    "each launch of unscaled gradients writes its sums to the first places": PlantedBug(
        "task.chunk_sums[table.launch.first_chunk + blockIdx.x]",
        "task.chunk_sums[blockIdx.x]",
        f"{UNSCALED_SUMS} -k 5000",
        WRONG_BITS,
    ),
    # In forward order all goes well: thread 0 comes first.
    "a barrier is missing behind what thread 0 writes": PlantedBug(
        "const double inv_scale = value_of(task.inv_scale);",
        "__shared__ double inv_scale;\n"
        "  if (threadIdx.x == 0) inv_scale = value_of(task.inv_scale);",
        f"{UNSCALE} -k chunk",
        WRONG_BITS,
        net="narrow grid, backward",
    ),
    "a shared value is read before it is written": PlantedBug(
        "if (threadIdx.x % kWarpSize == 0) results",
        "if (threadIdx.x % (2 * kWarpSize) == 0) results",
        SUMS,
        WRONG_BITS,
    ),
    "a shared array is too small": PlantedBug(
        "double results[kBlockSize / kWarpSize];",
        "double results[kBlockSize / kWarpSize - 1];",
        SUMS,
        UNDEFINED + r"index 7 out of bounds for type 'double \[7\]'",
    ),
    "threads wait at two barriers": PlantedBug(
        "  __syncthreads();\n",
        "  if (threadIdx.x < kBlockSize / 2) {\n    __syncthreads();\n  } else {\n"
        "    __syncthreads();\n  }\n",
        SUMS,
        rf"{SHIM}divergence at a barrier: {WAITS}, {WAITS}",
        scope="double block_reduce(",
    ),
    "a lane is not in its own mask": PlantedBug(
        "0xffffffffu, value",
        "0x7fffffffu, value",
        SUMS,
        rf"{SHIM}{WAITS}, whose mask does not name its own lane 31",
    ),
    "lanes do not agree on their mask": PlantedBug(
        "0xffffffffu, value",
        "threadIdx.x % kWarpSize == 5 ? 0x7fffffffu : 0xffffffffu, value",
        SUMS,
        rf"{SHIM}divergence at a shuffle: {WAITS}, {WAITS}, and one names the other",
    ),
    "a lane waits for others that have gone on": PlantedBug(
        "0xffffffffu, value",
        "threadIdx.x % 2 ? 0xffffffffu : 0x55555555u, value",
        SUMS,
        rf"{SHIM}deadlock: {WAITS}, {WAITS}",
    ),
    "a mask names lanes that have ended": PlantedBug(
        "  int32_t found = 0;\n",
        "  int32_t found = 0;\n  if (threadIdx.x >= part.count) return;\n",
        SUMS,
        rf"{SHIM}{WAITS}, whose mask names lane \d+, which has ended",
        scope="check_kernel(const __grid_constant__ Table<1>",
    ),
    "all threads do what one must do": PlantedBug(
        "if (threadIdx.x != 0) return;",
        "",
        f"{TESTS}::test_update_scale_is_the_rule_of_loss_scale -k bounds",
        r"assert_updates_like\n.*assert scale\.read\(\) == ",
        scope="void update_scale_kernel(",
    ),
    # --- what a step depends on
    "only thread 0 says that something is not finite": PlantedBug(
        "if (found_inf) *task.found_inf = 1.0f;  // All",
        "if (found_inf && threadIdx.x == 0) *task.found_inf = 1.0f;  // All",
        f"{TESTS}::test_unscale_finds_inf_and_nan_and_passes_them_on -k last",
        r'assert call\["found_inf"\]\.item\(\) == 1',
    ),
    "a number that the host read is read again": PlantedBug(
        "if (number.pointer == nullptr) return number.value;",
        "",
        f"{EDGES}::test_numbers_are_the_same_read_by_the_host_or_by_the_kernel",
        UNDEFINED + "load of null pointer",
    ),
}
