"""What a comparison says, as CSV, Markdown and a figure.

By one seed: comparison.csv (a row per preset and context length), .md, .png. By several: seeds.csv
(a row per run and context length), .md, .png, with means and paired differences that carry the
intervals of `latte.lab.compare.intervals` over the seeds. A paired difference is the same formula
on the differences: what both sides share (here the seed's data order) cancels. Intervals are not
widened for the number of comparisons; the p-values beside them are corrected for the number of
differences in their table. The models are put in order at the length of the block if it was scored,
else at the shortest length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from latte.lab.compare.grid import RunStatus
from latte.lab.compare.intervals import Mean, holm, mean_of
from latte.lab.evaluate.lengths import (
    COLUMNS,
    POSITION_COLUMNS,
    Row,
    flat,
    position_rows,
    write_rows,
)
from latte.lab.evaluate.plots import canvas, draw_curves, lengths_figure, line_style, save
from latte.lab.evaluate.tables import csv_text, table
from latte.lab.train.metrics import duration, read_metrics
from latte.lab.train.recipe import Recipe
from latte.models.atomic_files import write_text

Losses = dict[str, dict[int, Row]]  # by preset and seed, at one context length


# ---- by one seed


def write_comparison(
    folder: Path,
    statuses: Sequence[RunStatus],
    recipe: Recipe,
    title: str,
    references: Mapping[str, float] | None,
) -> str:
    """Write the files of a comparison by one seed; returns the Markdown.

    It is a table: parameters, tokens, time and, by context length, perplexity and bits per byte.
    """
    finished = [status for status in statuses if status.result is not None]
    if not finished:
        return ""
    by_preset = {status.run.preset: status.result.rows for status in finished}
    write_rows(folder / "comparison.csv", by_preset, "preset")
    lengths = _lengths(finished)
    head = ["model", "parameters", "tokens", "training time", "tokens/s"]
    head += [f"ppl at {length:,}" for length in lengths]
    lines = [head + [f"bits/byte at {length:,}" for length in lengths]]
    for status in finished:
        found = status.result
        cells = [
            f"`{status.run.preset}`",
            f"{found.parameters / 1e6:.2f}M",
            f"{found.tokens:,}",
            duration(found.seconds),
            f"{found.tokens / max(found.seconds, 1e-9):,.0f}",
        ]
        cells += [f"{row.perplexity:.4g}" for row in found.rows]
        lines.append(cells + [f"{row.bits_per_byte:.4f}" for row in found.rows])
    text = table(lines)
    write_text(folder / "comparison.md", text)
    lengths_figure(
        folder / "comparison.png",
        by_preset,
        curves={each.run.preset: read_metrics(each.run.folder, "eval") for each in finished},
        train_length=recipe.data.block_length,
        references=references,
        title=title,
    )
    return text


# ---- by several seeds


def write_seeds(folder: Path, statuses: Sequence[RunStatus], recipe: Recipe, title: str) -> str:
    """Write the files of a comparison by several seeds; returns the Markdown."""
    text = markdown(statuses, recipe)
    write_text(folder / "seeds.csv", _csv(statuses))
    if recipe.comparison.positions:
        write_text(folder / "positions.csv", _positions_csv(statuses))
    write_text(folder / "seeds.md", text)
    if any(status.result for status in statuses):
        seeds_figure(folder / "seeds.png", statuses, recipe, title)
    return text


def markdown(statuses: Sequence[RunStatus], recipe: Recipe) -> str:
    """The tables: means, paired differences, the order found, what is missing."""
    finished = [status for status in statuses if status.result is not None]
    parts = []
    if finished:
        presets = recipe.comparison.presets
        usual = "transformer++" if "transformer++" in presets else presets[0]
        parts += [_caption(finished, recipe), _means(finished), *_by_position(finished)]
        parts += _differences(finished, recipe.comparison.baseline or usual)
        parts += _order(finished, _judged(finished, recipe))
    missing: dict[tuple[str, str], list[str]] = {}
    for status in statuses:
        if status.result is None:
            key = (status.run.preset, status.problem)
            missing.setdefault(key, []).append(str(status.run.seed))
    if missing:
        lines = [
            f"- `{preset}`, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {problem}"
            for (preset, problem), seeds in missing.items()
        ]
        parts.append("Without a result:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def losses(finished: Iterable[RunStatus], length: int) -> Losses:
    """Rows of one context length by preset and seed."""
    found: Losses = {}
    for status in finished:
        for row in status.result.rows:
            if row.length == length:
                found.setdefault(status.run.preset, {})[status.run.seed] = row
    return found


def paired(found: Losses, left: str, right: str) -> Mean | None:
    """Perplexity of `left` minus that of `right` over the seeds that both have."""
    seeds = sorted(set(found.get(left, {})) & set(found.get(right, {})))
    if not seeds:
        return None
    return mean_of([found[left][s].perplexity - found[right][s].perplexity for s in seeds])


def found_order(found: Losses) -> list[str]:
    """Presets from the highest mean perplexity to the lowest."""
    means = {name: mean(row.perplexity for row in rows.values()) for name, rows in found.items()}
    return sorted(means, key=lambda name: -means[name])


def excludes_zero(difference: Mean) -> str:
    """Whether the interval of a difference does, in a word."""
    if difference.half_width is None:
        return "one seed"
    return "yes" if difference.sign else "no"


def _means(finished: Sequence[RunStatus]) -> str:
    lengths = _lengths(finished)
    head = ["model", "parameters", "seeds", *(f"perplexity at {x:,}" for x in lengths)]
    lines = [[*head, "tokens/s", "peak memory, MB"]]
    for preset in _presets(finished):
        group = [status.result for status in finished if status.run.preset == preset]
        line = [f"`{preset}`", f"{group[0].parameters / 1e6:.2f}M", str(len(group))]
        for length in lengths:
            values = [row.perplexity for m in group for row in m.rows if row.length == length]
            line.append(mean_of(values).text())
        line.append(mean_of([m.tokens_per_second for m in group]).text(",.0f"))
        line.append(mean_of([m.peak_memory_bytes / 1e6 for m in group]).text(",.0f"))
        lines.append(line)
    return table(lines)


def _by_position(finished: Sequence[RunStatus]) -> list[str]:
    """For each length whose scores are divided, mean perplexities by position."""
    parts = []
    for length in _lengths(finished):
        found = losses(finished, length)
        head: list[str] = []
        lines = []
        for preset, by_seed in found.items():
            rows = [position_rows(row) for row in by_seed.values()]
            head = [f"{part['first']:,} to {part['last']:,}" for part in rows[0]]
            of_parts = [[part["perplexity"] for part in parts] for parts in zip(*rows, strict=True)]
            lines.append([f"`{preset}`", *(mean_of(values).text() for values in of_parts)])
        if head:
            parts += [f"Perplexity by position in windows of {length:,}:\n",
                      table([["model", *head], *lines])]  # fmt: skip
    return parts


def _differences(finished: Sequence[RunStatus], baseline: str) -> list[str]:
    lengths = _lengths(finished)
    by_length = [losses(finished, length) for length in lengths]
    lines: list[list[str]] = []
    differences: list[Mean] = []
    for preset in _presets(finished):
        if preset == baseline:
            continue
        found = [paired(at_length, preset, baseline) for at_length in by_length]
        known = [difference for difference in found if difference is not None]
        if len(known) < len(found):
            continue  # no seed in common
        line = [f"`{preset}`"]
        for difference, at_length in zip(known, by_length, strict=True):
            both = set(at_length[baseline]) & set(at_length[preset])
            percent = 100 * difference.value / mean(at_length[baseline][s].perplexity for s in both)
            line.append(f"{difference.text('+.2f')} ({percent:+.1f}%)")
        lines.append([*line, str(known[0].count)])
        differences += known
    if not lines:
        return []
    p_values = iter(_corrected(differences))
    head = ["model", *(f"at {length:,}" for length in lengths), "seeds"]
    head += [f"p at {length:,}" for length in lengths]
    lines = [[*line, *(next(p_values) for _ in lengths)] for line in lines]
    return [f"Perplexity minus that of `{baseline}`, paired by seed:\n", table([head, *lines])]


def _corrected(differences: Sequence[Mean]) -> list[str]:
    """The p-values of a table's differences, corrected for their number; "-" for one seed."""
    known = iter(holm([each.p for each in differences if each.p is not None]))
    return ["-" if each.p is None else p_text(next(known)) for each in differences]


def p_text(p: float) -> str:
    """A p-value with three decimals."""
    return format(p, ".3f") if p >= 0.0005 else "<0.001"


def _order(finished: Sequence[RunStatus], length: int) -> list[str]:
    """The order found, and the difference of each two neighbours that have seeds in common."""
    found = losses(finished, length)
    order = found_order(found)
    lines, differences = [], []
    for left, right in zip(order, order[1:], strict=False):
        if (difference := paired(found, left, right)) is not None:
            cells = [difference.text("+.2f"), str(difference.count), excludes_zero(difference)]
            lines.append([f"`{left}`, `{right}`", *cells])
            differences.append(difference)
    if not lines:
        return []
    head = ["neighbours", "difference", "seeds", "interval excludes 0", "p"]
    lines = [[*line, p] for line, p in zip(lines, _corrected(differences), strict=True)]
    best_first = ", ".join(f"`{name}`" for name in reversed(order))
    return [
        f"The order found, best first, by mean perplexity at {length:,} (lower is better):"
        f" {best_first}\n",
        table([head, *lines]),
    ]


def _caption(finished: Sequence[RunStatus], recipe: Recipe) -> str:
    measured = [status.result for status in finished]
    tokens = sorted({m.tokens for m in measured})
    scored = sorted({row.tokens for m in measured for row in m.rows})
    places = sorted({(m.hardware["device"], m.hardware["threads"], m.hardware["torch"])
                     for m in measured})  # fmt: skip
    dates = sorted({m.hardware["date"] for m in measured})
    device = "; ".join(f"{d}, {n} thread{'s' if n > 1 else ''}, torch {t}" for d, n, t in places)
    return (
        f"{' or '.join(f'{n:,}' for n in tokens)} training tokens in blocks of"
        f" {recipe.data.block_length:,}; {' or '.join(f'{n:,}' for n in scored)} held-out tokens."
        f" {device}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Means with 95% intervals"
        " by Student's t over the seeds. p is of the paired t-test, corrected by Holm's method for"
        " the number of differences in its table.\n"
    )


def seeds_figure(path: Path, statuses: Sequence[RunStatus], recipe: Recipe, title: str) -> None:
    """Learning curves averaged over seeds, beside each preset's perplexities and interval."""
    finished = [status for status in statuses if status.result is not None]
    presets = _presets(finished)
    length = _judged(finished, recipe)
    found = losses(finished, length)
    figure, axes = canvas(2, (12.0, max(4.3, 0.45 * len(presets) + 1.2)))
    draw_curves(axes[0], {preset: _curve(finished, preset) for preset in presets})
    for place, preset in enumerate(presets):
        values = [row.perplexity for row in found[preset].values()]
        summary = mean_of(values)
        look = {**line_style(place), "linestyle": "none"}
        axes[1].plot(values, [place] * len(values), alpha=0.45, **look)
        axes[1].errorbar(summary.value, place, xerr=summary.half_width, capsize=3, **look)
    axes[1].set_yticks(range(len(presets)), presets)
    axes[1].invert_yaxis()
    axes[1].set_xlabel("held-out perplexity (points: seeds; bars: 95% interval of the mean)")
    axes[1].set_title(f"At {length:,} tokens, after training")
    figure.suptitle(title)
    save(figure, path)


def _curve(finished: Iterable[RunStatus], preset: str) -> list[dict[str, float]]:
    """Held-out bits per byte by tokens read, averaged over the preset's seeds."""
    points: dict[int, list[float]] = {}
    for status in finished:
        if status.run.preset == preset:
            for record in read_metrics(status.run.folder, "eval"):
                points.setdefault(record["tokens"], []).append(record["eval_bits_per_byte"])
    return [
        {"tokens": tokens, "eval_bits_per_byte": mean(values)}
        for tokens, values in sorted(points.items())
    ]


def _presets(finished: Iterable[RunStatus]) -> list[str]:
    return list(dict.fromkeys(status.run.preset for status in finished))


def _lengths(finished: Iterable[RunStatus]) -> list[int]:
    return sorted({row.length for status in finished for row in status.result.rows})


def _judged(finished: Sequence[RunStatus], recipe: Recipe) -> int:
    lengths, block = _lengths(finished), recipe.data.block_length
    return block if block in lengths else lengths[0]


def _csv(statuses: Sequence[RunStatus]) -> str:
    """A row per run and context length, and one for a run without a result."""
    run = ["preset", "seed", "problem", "parameters", "steps", "trained_tokens",
           "training_seconds", "training_tokens_per_second",
           "training_peak_memory_bytes"]  # fmt: skip
    place = ["device", "threads", "torch", "date"]
    rows: list[dict[str, Any]] = []
    for status in statuses:
        head = {"preset": status.run.preset, "seed": status.run.seed}
        found = status.result
        if found is None:
            rows.append({**head, "problem": status.problem})
            continue
        head |= {"parameters": found.parameters, "steps": found.steps}
        head |= {"trained_tokens": found.tokens, **found.hardware}
        for key in ("seconds", "tokens_per_second", "peak_memory_bytes"):
            head[f"training_{key}"] = getattr(found, key)
        rows += [{**head, **flat(row)} for row in found.rows]
    return csv_text([*run, *COLUMNS, *place], rows)


def _positions_csv(statuses: Sequence[RunStatus]) -> str:
    """A row per run, context length and part of its windows."""
    rows = [
        {"preset": status.run.preset, "seed": status.run.seed, **part}
        for status in statuses
        for row in (status.result.rows if status.result is not None else ())
        for part in position_rows(row)
    ]
    return csv_text(["preset", "seed", *POSITION_COLUMNS], rows)
