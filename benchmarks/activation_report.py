"""What benchmarks.activations prints, and docs/data.md shows: tables, and what they say."""

from __future__ import annotations

from typing import Any

from benchmarks.memory_probe import HELD
from benchmarks.step_report import markdown

# Whose modules are compared: O1 holds what amp.init does, bf16 and O2 nearly what fp16 does.
COMPARED = ("fp32", "fp16, FP16_Optimizer", "amp.init")


def page(results: dict[str, Any]) -> str:
    """Return all that is said, in paragraphs."""
    models = results["models"]
    tables = [table(model, results["budget"]) for model in models]
    return "\n\n".join([where(results), *tables, "\n".join(map(finding, models))])


def where(results: dict[str, Any]) -> str:
    """Return whose kernels were measured in a line."""
    facts = results["environment"]
    device = "the CPU's kernels" if facts["device"] == "cpu" else facts["device"]
    return f"Measured with {device}, torch {facts['torch']}; MB are 10^6 bytes."


def table(model: dict[str, Any], budget: int) -> str:
    """Return one model as a Markdown table under a line that says what it is."""
    first = model["rows"][0]
    peak = ["peak of a step, MB"] if first["peak"] else []
    head = [
        "mode", *(f"{name}, MB" for name in HELD), "held, whatever the batch, MB",
        "held a sample, MB", "of fp32's", *peak, f"batch in {budget / 2**30:g} GiB",
    ]  # fmt: skip
    rows = [
        [
            row["mode"],
            *(megabytes(row["state"][name]) for name in HELD),
            megabytes(row["fixed"]),
            megabytes(row["per_sample"]),
            f"{row['per_sample'] / first['per_sample']:.2f}",
            *([megabytes(row["peak"]["bytes"])] if peak else []),
            str(row["largest_batch"]),
        ]
        for row in model["rows"]
    ]
    title = f"{model['model']}: {model['parameters'] / 1e6:.2f} M parameters"
    return "\n".join([title, "", *markdown(head, rows)])


def megabytes(count: int) -> str:
    """Return megabytes with a digit after the point; nothing for nothing."""
    return f"{count / 1e6:.1f}" if count else ""


def finding(model: dict[str, Any]) -> str:
    """Return the largest batches of the table in a line."""
    first, *others = model["rows"]
    batches = [f"{row['largest_batch']} ({row['mode']})" for row in others]
    return f"- {model['model']}: a batch of {first['largest_batch']} in fp32, {', '.join(batches)}"


def finding_in_short(model: dict[str, Any]) -> str:
    """Return what a model in float16 holds for backward, in a sentence."""
    first, half = model["rows"][:2]
    share = half["per_sample"] / first["per_sample"]
    return f"{model['model']}: fp16 holds {share:.2f} of what fp32 holds for backward"


def modules_table(model: dict[str, Any], modes: tuple[str, ...] = COMPARED) -> str:
    """Return which modules' results are held, in kB a sample, for some modes."""
    named = {row["mode"]: row for row in model["rows"]}
    kinds: dict[str, dict[str, dict[str, int]]] = {}
    for mode in modes:
        for each in named[mode]["by_module"]:
            cells = kinds.setdefault(each["module"], {}).setdefault(mode, {})
            cells[each["dtype"]] = each["bytes"]
    rows = [
        [kind, *(_by_dtype(of_mode.get(mode, {})) for mode in modes)]
        for kind, of_mode in kinds.items()
    ]
    head = ["saved in", *(f"{mode}, kB" for mode in modes)]
    return "\n".join([f"{model['model']}, one sample", "", *markdown(head, rows)])


def _by_dtype(sizes: dict[str, int]) -> str:
    return ", ".join(f"{dtype} {size / 1e3:.1f}" for dtype, size in sizes.items())
