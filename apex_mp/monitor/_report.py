"""A run as a few lines of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from apex_mp.monitor.history import History, Step

_PARAMETERS_NAMED = 10


def text(history: History) -> str:
    """Return the report of a run, one fact a line."""
    steps = [*history.steps]
    if not steps:
        return "no steps yet"
    lines = [_total(history), _scale(steps), *_norm(steps), *_clip(steps)]
    return "\n".join([*lines, *_overflows(history), *_sample(history), *_origins(history)])


def rounded(number: float) -> str:
    """Return a number with two digits that count: 100, not 1e+02."""
    return f"{float(f'{number:.2g}'):g}"


def power(scale: float) -> str:
    """Return a loss scale as text, "2^16" if it is a power of two."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _total(history: History) -> str:
    share = rounded(100.0 * history.skipped / history.total)
    line = f"steps           {history.total}, {history.skipped} skipped ({share} %)"
    if history.skips_in_a_row:
        line += f", the last {history.skips_in_a_row} in a row"
    kept = len(history.steps)
    if kept < history.total:
        line += f"; what follows is of the last {kept}"
    return line


def _scale(steps: Sequence[Step]) -> str:
    scales = [step.scale for step in steps]
    return (
        f"loss scale      {power(scales[-1])} at step {steps[-1].number}, "
        f"from {power(min(scales))} to {power(max(scales))}"
    )


def _norm(steps: Sequence[Step]) -> list[str]:
    measured = [(step.grad_norm, step.number) for step in steps if step.grad_norm is not None]
    if not measured:
        return []
    largest, number = max(measured)
    median = statistics.median(norm for norm, _ in measured)
    return [
        f"gradient norm   {measured[-1][0]:.3g} at step {measured[-1][1]}, median {median:.3g}, "
        f"largest {largest:.3g} at step {number}"
    ]


def _clip(steps: Sequence[Step]) -> list[str]:
    factors = [step.clip for step in steps if step.clip is not None]
    if not factors:
        return []
    share = 100.0 * sum(factor < 1.0 for factor in factors) / len(factors)
    if not share:
        return ["clipped         none of these steps"]
    return [f"clipped         {share:.3g} % of these steps, smallest factor {min(factors):.3g}"]


def _overflows(history: History) -> list[str]:
    counts = history.overflows_by_name()
    if not counts:
        return []
    rows = [f"  {count:6d}  {name}" for name, count in [*counts.items()][:_PARAMETERS_NAMED]]
    others = len(counts) - len(rows)
    rest = [f"          and {others} more"] if others else []
    return ["skipped steps in which a parameter's gradient held inf or NaN:", *rows, *rest]


def _sample(history: History) -> list[str]:
    """Return the table of the last sample, the parameters that underflow most first."""
    if not history.samples:
        return []
    sample = history.samples[-1]
    lines = [
        f"gradients of step {sample.step}, as backward left them at a loss scale of "
        f"{power(sample.scale)}:",
        f"  {_percent(sample.zeros, sample.total)} zero, "
        f"{_percent(sample.underflows, sample.total)} below 2^-14, where float16 loses digits",
    ]
    if sample.looked_at < sample.total:
        share = _percent(sample.looked_at, sample.total)
        of = f"{sample.total:,} elements, spread over all gradients"
        lines.append(f"  looked at: {share} of {of}")
    largest = sample.largest_scale
    if largest is not None and largest > sample.scale and sample.underflows:
        lines.append(
            f"  a loss scale of {power(largest)} would save {100.0 * sample.saved(largest):.1f} % "
            "of those; at more the largest becomes inf"
        )
    grads = sorted(sample.grads, key=lambda grad: grad.underflows / grad.total if grad.total else 0)
    rows = [*reversed(grads)][:_PARAMETERS_NAMED]
    width = max([len(grad.name) for grad in rows] + [9])
    lines.append(f"  {'parameter':{width}}  smallest  largest     zero  below 2^-14")
    for grad in rows:
        ends = ["-" if e is None else f"2^{e}" for e in (grad.smallest, grad.largest)]
        shares = [_percent(count, grad.total) for count in (grad.zeros, grad.underflows)]
        lines.append(
            f"  {grad.name:{width}}  {ends[0]:>8}  {ends[1]:>7}  {shares[0]:>7}  {shares[1]:>11}"
        )
    others = len(grads) - len(rows)
    return [*lines, f"  and {others} more"] if others else lines


def _percent(count: int, total: int) -> str:
    return f"{100.0 * count / total:.1f} %" if total else "-"


def _origins(history: History) -> list[str]:
    return [f"step {number}: {found}" for number, found in history.origins.items()]
