"""What benchmarks.step prints: tables, how bytes were counted, and the sentence above the chart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.step_cases import BF16, FP16, FP16_CLIP, FP32, MODES, OUR_SCALER

HEAD = ("case", "bytes", "ms", "ns/param", "GB/s", "of memory", "times ours")
GPU_HEAD = ("case", "bytes", "ms", "ns/param", "GB/s", "of copy", "times ours")
AGAIN = ("again, ms", "ms_again")
HOST = ("host, ms", "host_ms")
PROFILE = (
    "case",
    "launches",
    "waits",
    "pageable",
    "kernels, ms",
    "kernel",
    "ms",
    "GB/s",
    "of copy",
)
IN_PLACE = "in place"
SHOWN = 3  # kernels of a case
SHOWN_BY_FINDING = "BERT-base"
MODELS = ("ResNet-50", "BERT-base", "BERT-large")  # of which the summary has the first two
# What a reader asks for, and the case of ours that does it.
ASKED = {
    "float16 weights, clip": FP16_CLIP,
    "bfloat16 weights": BF16,
    "float32, GradScaler, clip": OUR_SCALER[1],
    "float32": FP32,
}


class Pair(NamedTuple):
    """A case of ours beside the fastest other that does the same work; times in ms."""

    asked: str
    ours: float
    other: float
    name: str
    ratio: float  # of the rounds' ratios, the median


def pairs(workload: dict[str, Any]) -> list[Pair]:
    """Return what was measured of ASKED in a workload, where something else does the same."""
    rows = {row["case"]: row for row in workload["rows"]}
    found = []
    for asked, case in ASKED.items():
        ours = rows.get(case)
        others = [
            row
            for row in rows.values()
            if ours
            and row["compared_with"] == ours["compared_with"]
            and not row["case"].startswith(("ours", "our "))
            and row["times_ours"] is not None
        ]
        if ours and others:
            best = min(others, key=lambda row: float(row["times_ours"]))
            ratio = best["times_ours"] / ours["times_ours"]
            found.append(Pair(asked, ours["ms"], best["ms"], best["case"], ratio))
    return found


def shown(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the two workloads of the summary and the chart."""
    with_pairs = [each for each in timed(results) if pairs(each)]
    return ([each for each in with_pairs if each["workload"] in MODELS] or with_pairs)[:2]


def timed(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the workloads of which there was time for a round."""
    return [each for each in results["workloads"] if each.get("rows") and each.get("rounds", 1)]


def summary(results: dict[str, Any]) -> str:
    """Return one table of what a reader asks for: ours beside the fastest other."""
    head = ["step", "model", "ours, ms", "fastest other, ms", "times ours", "the other"]
    lines = [
        [
            *(pair.asked, workload["workload"], significant(pair.ours), significant(pair.other)),
            *(f"{pair.ratio:.2f}", pair.name),
        ]
        for workload in shown(results)
        for pair in pairs(workload)
    ]
    return "\n".join([surroundings(results), "", *markdown(head, lines)])


def notes(results: dict[str, Any]) -> str:
    """Return what stands below the tables."""
    lines = [f"Medians of {rounds(results)}.", *busy(results), *results.get("left_out", [])]
    lines += [*not_run(results), *failures(results)]
    return "\n".join(lines + (accounting(results) if results["workloads"] else []))


def busy(results: dict[str, Any]) -> list[str]:
    """Return how busy the machine was with others, if that is known."""
    taken = results["environment"].get("taken_by_others")
    if taken is None:
        return []
    return [
        f"Meanwhile other programs took {100 * taken['programs']:.0f} % of the processors, "
        f"other machines {100 * taken['machines']:.0f} %."
    ]


def surroundings(results: dict[str, Any]) -> str:
    """Return the machine, the software and the number of rounds in a line."""
    return f"{machine(results['environment'])}; medians of {rounds(results)}"


def rounds(results: dict[str, Any]) -> str:
    """Return how many rounds were run, which may be fewer than were asked for."""
    asked = results["environment"]["rounds"]
    ran = [each["rounds"] for each in by_workload(results) if each.get("rounds")] or [asked]
    return f"{min(ran)} rounds" if min(ran) == max(ran) else f"{min(ran)} to {max(ran)} rounds"


def by_workload(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was found, by workload."""
    return [*results["workloads"], *results.get("host", []), *results.get("builds", [])]


def machine(facts: dict[str, Any]) -> str:
    """Return the machine and the software in a line."""
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    return (
        f"{where}, {facts['threads']} of {facts['cores']} cores, {facts['cpu_level']}, "
        f"torch {facts['torch']}, apex_mp {facts['apex_mp']}"
    )


def page(results: dict[str, Any]) -> str:
    """Return what docs/data.md shows of results, in paragraphs."""
    tables = [table(workload) for workload in timed(results)]
    tables += [profile_table(each) for each in timed(results) if profiled(each)]
    short = [each["workload"] for each in results["workloads"] if each not in timed(results)]
    tables += [f"No time was left for {', '.join(short)}."] * bool(short)
    if results["host"]:
        tables.append(host_table(results["host"]))
    return "\n\n".join([surroundings(results), *tables, *aims(results)])


def aims(results: dict[str, Any]) -> list[str]:
    """Return a Markdown table of what was aimed at on a CPU, and whether it was reached."""
    if results["environment"]["device"] != "cpu":
        return []
    named = {
        (each["workload"], row["case"]): row
        for each in results["workloads"]
        for row in each["rows"]
    }
    lines = []
    for name, kind, figure, atleast, aim in AIMS:
        reached = figure(named, name, kind) if (name, kind) in named else None
        if reached is not None:
            met = reached >= aim if atleast else reached <= aim
            bound = f"{'at least' if atleast else 'at most'} {aim}"
            said = f"{reached:.2f}"
            lines.append([f"{kind}, {name}", SAID[figure], said, bound, "yes" if met else "no"])
    head = ["case", "figure", "measured", "aim", "reached"]
    return ["\n".join(markdown(head, lines))] if lines else []


def _of_reference(named: dict[Any, Any], workload: str, case: str) -> float:
    return float(named[workload, case]["of_reference"])


def _others(named: dict[Any, Any], workload: str, case: str) -> dict[str, float]:
    return {
        other: row["times_ours"]
        for (name, other), row in named.items()
        if name == workload and row["compared_with"] == case != other
    }


def _best_foreach(named: dict[Any, Any], workload: str, case: str) -> float | None:
    others = _others(named, workload, case).items()
    return min((ratio for other, ratio in others if "foreach" in other), default=None)


def _fastest_other(named: dict[Any, Any], workload: str, case: str) -> float | None:
    return min(_others(named, workload, case).values(), default=None)


def _ms(named: dict[Any, Any], workload: str, case: str) -> float:
    return float(named[workload, case]["ms"])


def _ms_again(named: dict[Any, Any], workload: str, case: str) -> float:
    return float(named[workload, case]["ms_again"])


def _as_fast(named: dict[Any, Any], workload: str, case: str) -> float:
    return 1.0 / float(named[workload, case]["times_ours"])


SAID = {
    _as_fast: "times as fast as with float32 masters",
    _of_reference: "of memory's speed",
    _best_foreach: "times ours, torch foreach",
    _fastest_other: "times ours, fastest other",
    _ms: "ms, with cold caches",
    _ms_again: "ms, again",
}
# Workload, case, figure, whether it is to be at least or at most, the bound.
AIMS = (
    *((name, FP16, _of_reference, True, 0.92) for name in ("ResNet-50", "BERT-base", "1 x 100M")),
    *((name, BF16, _of_reference, True, 0.92) for name in ("ResNet-50", "BERT-base", "1 x 100M")),
    ("BERT-base", FP16, _best_foreach, True, 1.7),
    ("BERT-base", FP16_CLIP, _best_foreach, True, 2.2),
    *((name, FP32, _fastest_other, True, 1.0) for name in ("ResNet-50", "BERT-base", "1 x 100M")),
    *(("BERT-base", case.name, _of_reference, True, 0.9) for case in MODES),
    *(
        (name, case.name, _as_fast, True, 1.4)
        for name in ("BERT-base", "GPT-2-medium")
        for case in MODES
        if "moments" in case.name
    ),
    *(("2000 x 64", case, _ms_again, False, 0.25) for case in (FP16, BF16, FP32)),
    *(("2000 x 64", case, _ms, False, 0.25) for case in (FP16, BF16, FP32)),
)


def table(workload: dict[str, Any]) -> str:
    """Return one workload as a Markdown table under a line that says what it is."""
    reference, how = workload["reference_GB_per_s"], workload.get("reference", IN_PLACE)
    lines = [
        f"{workload['workload']}: {count(workload)}; memory, {how}, {reference['median']:.1f} GB/s "
        f"({reference['lowest']:.1f} to {reference['highest']:.1f})",
        "",
    ]
    more, head = ([], HEAD) if how == IN_PLACE else ([HOST], GPU_HEAD)
    if any(row["ms_again"] is not None for row in workload["rows"]):
        more.append(AGAIN)
    rows = [[*_cells(row), *(significant(row[key]) for _, key in more)] for row in workload["rows"]]
    return "\n".join(lines + markdown([*head, *(name for name, _ in more)], rows))


def profile_table(workload: dict[str, Any]) -> str:
    """Return what the profiler saw of one workload, a line for each of the longest kernels."""
    memory = workload["reference_GB_per_s"]["median"]
    rows = []
    for row in profiled(workload):
        seen = row["profile"]
        counts = ("launches", "synchronizations", "pageable_copies")
        first = [row["case"], *(_number(seen[key]) for key in counts)]
        first.append(
            ("at least " if seen["kernels_lost"] else "") + significant(seen["kernels_ms"])
        )
        for kernel in seen["kernels"][:SHOWN] or [None]:
            rows.append([*first, *_kernel_cells(kernel, memory)])
            first = [""] * len(first)
    said = f"{workload['workload']}: what a step does on the device, by the profiler"
    return "\n".join([said, "", *markdown(PROFILE, rows)])


def profiled(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that have a profile."""
    return [row for row in workload["rows"] if "profile" in row]


def _kernel_cells(kernel: dict[str, Any] | None, memory: float) -> list[str]:
    if kernel is None:
        return ["none seen", "", "", ""]
    speed = kernel.get("GB_per_s")
    of_memory = [significant(speed), f"{speed / memory:.2f}"] if speed else ["", ""]
    many = f"{_number(kernel['count'])} x " if kernel["count"] != 1 else ""
    return [f"{many}{short(kernel['name'])}", significant(kernel["ms"]), *of_memory]


def short(name: str) -> str:
    """Return a kernel's name without its namespaces, template arguments and parameters."""
    if name.startswith("Mem"):  # Memcpy and Memset, which say from where to where
        return name
    bare = re.split(r"[<(]", name.replace("(anonymous namespace)", "anonymous"))[0]
    return bare.removeprefix("void ").split("::")[-1]


def count(workload: dict[str, Any]) -> str:
    """Return how many parameters there are, in how many tensors."""
    millions = workload["parameters"] / 1e6
    tensors = workload["tensors"]
    many = f"{millions:.2f} M" if millions >= 1 else f"{1e3 * millions:.0f} K"
    return f"{many} parameters in {tensors} tensor{'s' if tensors > 1 else ''}"


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row["times_ours"]
    if row["compared_with"] == row["case"]:
        compared = ""
    else:
        compared = "-" if ratio is None else f"{ratio:.2f}"
    return [
        row["case"],
        str(row["bytes_per_parameter"]),
        significant(row["ms"]),
        significant(row["ns_per_parameter"]),
        significant(row["GB_per_s"]),
        f"{row['of_reference']:.2f}",
        compared,
    ]


def host_table(workloads: Sequence[dict[str, Any]]) -> str:
    """Return the host's time for each tensor, a column for each number of tensors."""
    head = ["host, ns a tensor", *(f"{each['tensors']} tensors" for each in workloads)]
    names = [row["case"] for row in workloads[0]["rows"]]
    columns = [{row["case"]: row for row in each["rows"]} for each in workloads]
    cells = [
        [name, *(f"{column[name]['ns_per_tensor']:.0f}" for column in columns)] for name in names
    ]
    return "\n".join(markdown(head, cells))


def not_run(results: dict[str, Any]) -> list[str]:
    """Return one line for each case that could not run, with the reason."""
    measured = [*results["workloads"], *results["host"]]
    where: dict[tuple[str, str], list[str]] = {}
    for each in measured:
        for name, reason in each["not_run"].items():
            where.setdefault((name, reason), []).append(each.get("workload", ""))
    return [
        f"Not run: {name}{'' if len(on) == len(measured) else ', ' + ', '.join(on)}: {reason}"
        for (name, reason), on in where.items()
    ]


def failures(results: dict[str, Any]) -> list[str]:
    """Return one line for each case of ours or of torch that failed, and each build."""
    lines = [
        f"FAILED: {name}, {each['workload']}: {reason}"
        for each in by_workload(results)
        for name, reason in each.get("failed", {}).items()
    ]
    nothing = not any(each.get("rows") for each in by_workload(results))
    return [*lines, *["FAILED: nothing was measured"] * nothing]


def accounting(results: dict[str, Any]) -> list[str]:
    """Return how the bytes of each case were counted."""
    rows = {row["case"]: row for each in results["workloads"] for row in each["rows"]}
    lines = [
        "Bytes a parameter, R read and W written, pass by pass over the model; Adam is one pass,",
        "however many kernels make it. GB/s and the part of memory's speed are of these bytes.",
        "'times ours' is against the case of ours above it that does the same work.",
    ]
    lines += [
        f"  {name}: {' + '.join(row['passes'])} = {row['bytes_per_parameter']}"
        for name, row in rows.items()
    ]
    return lines


def finding(results: dict[str, Any]) -> str:
    """Return what the chart shows, in a sentence."""
    named = {each["workload"]: each for each in results["workloads"]}
    workload = named.get(SHOWN_BY_FINDING, results["workloads"][0])
    plain, clipped = best_ratio(workload, FP16), best_ratio(workload, FP16_CLIP)
    if plain is None or clipped is None:
        return f"{workload['workload']}: one optimizer step"
    return (
        f"{workload['workload']} in fp16: a step in plain torch takes {plain:.1f} times as long, "
        f"with clipping {clipped:.1f} times"
    )


def best_ratio(workload: dict[str, Any], ours: str) -> float | None:
    """Return how many times as long as ours the fastest other case takes for the same work."""
    ratios = [
        row["times_ours"]
        for row in workload["rows"]
        if row["compared_with"] == ours
        and not row["case"].startswith("ours")
        and row["times_ours"] is not None
    ]
    return min(ratios, default=None)


def _number(value: float) -> str:
    """A count a step, with a digit after the point only if it is no whole number."""
    return f"{value:.1f}".removesuffix(".0")


def significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], *rows]
    return [
        "| "
        + " | ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    ]
