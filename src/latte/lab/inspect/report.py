"""`latte inspect`: from a checkpoint and a text to CSV files, figures and the page.

The page is one HTML file with the text in it: click a token, see where it looks and through which
latents. It needs no network and no server. Its arrays are packed with zlib and base64, per layer:

* ``states`` p(l|t) [T][H][S], 16 bits linear in [0, 1];
* ``keys`` key logits of the latents [T][H][L], fp32: the browser computes p(s|l,t) itself;
* ``window`` window weights [H][T][T], 8 bits, the square root relative to the row's largest.

T is here the number of tokens shown.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from latte.errors import LatteError, is_out_of_memory
from latte.lab.data.document_source import without_lone_surrogates
from latte.lab.data.files import first_document
from latte.lab.data.tokenizers import document_ends, token_bytes
from latte.lab.evaluate.checkpoint import (
    contents_of,
    find_checkpoint,
    load_checkpoint,
    training_recipe,
    weights_of,
)
from latte.lab.evaluate.tables import write_csv
from latte.lab.inspect import kept
from latte.lab.inspect.figures import collapse_figure, effective_figure, share_figure
from latte.lab.inspect.mixing import (
    Inspection,
    LayerMixing,
    Summary,
    collect,
    find_layers,
    share_rows,
    summary_rows,
    usage_rows,
)
from latte.lab.inspect.pages import filled_page, rounded
from latte.lab.progress import progress
from latte.lab.results import results_at

# More characters than a token has on average with any tokeniser. Longer texts are cut first.
CHARACTERS_PER_TOKEN = 64
# The page and the window's weights take O(T^2) memory, per head of every layer.
MOST_SHOWN = 1024
MOST_READ = 65536
MOST_PAGE_BYTES = 64 << 20
# Sources in weights.csv, for each state of a token: the largest.
MOST_SOURCES = 16
FILES = (  # that `write_report` may write
    *("summary.csv", "index.html", "usage.csv", "collapse.png", "effective.png"),
    *("window_share.csv", "window_share.png", "weights.csv", *kept.FILES),
)
WEIGHTS = (
    *("layer", "head", "position", "token", "state", "p_state"),
    *("source", "source_token", "p_source"),
)


def inspect_checkpoint(
    checkpoint: str,
    text: str | None,
    file: str | None,
    *,
    layers: Sequence[int] | None = None,
    tokens: int = 256,
    statistics_tokens: int = 4096,
    at: Sequence[int] | None = None,
    device: str | None = None,
    output: str | None = None,
    force: bool = False,
) -> str:
    """Read a text with a checkpoint, and write tables, figures and the page.

    Args:
        text, file: The text, or a file with it; one of them is None.
        layers: Layers by number, from 0; None is all.
        tokens: Number of tokens that the page shows.
        statistics_tokens: Number of tokens for means.
        at: Positions of tokens whose weights are written to weights.csv.
        device: Device of the model; None is a GPU if there is one.
        output: Folder of the results; None is one in the checkpoint.
        force: Whether to replace results of other settings.

    Returns:
        What to print.

    Raises:
        LatteError: The checkpoint, the text, an option or the place of the results cannot be used.
    """
    folder = find_checkpoint(checkpoint)
    words = read_text(text, file)
    recipe = training_recipe(folder)
    settings = {
        **{"text": text, "layers": layers, "tokens": tokens, "at": at, "device": device},
        **{"statistics_tokens": statistics_tokens, "weights": weights_of(folder)},
        "file": contents_of([file] if file else ()),
    }
    where = Path(output) if output else folder / "inspection"
    place = results_at(where, FILES, settings, named=bool(output), force=force)
    model, tokenizer = load_checkpoint(folder, device)
    with progress(0, "layer", label="inspecting", bar=False):
        inspection = inspect_model(
            model,
            tokenizer,
            words,
            shown=tokens,
            read=statistics_tokens,
            layers=layers,
            at=at or (),
            label=recipe.name if recipe is not None else folder.name,
        )
        with place.writing() as staged:
            written = write_report(inspection, staged)
    page = place.path("index.html")
    return (
        f"{outline(inspection)}\nwritten into {place.folder}: {', '.join(written)}\n"
        f"open {page} ({page_size(place.folder)}) in a browser"
    )


def read_text(text: str | None, file: str | None) -> str:
    """The text given, or the first document of a file that is not blank.

    Raises:
        LatteError: Neither or both are given, the file cannot be read, or there is no text.
    """
    if (text is None) == (file is None):
        raise LatteError(f"expected --text or --file, got {'neither' if text is None else 'both'}")
    if text is not None:
        if not text.strip():
            raise LatteError("--text: expected some text, got none")
        return without_lone_surrogates(text)  # bytes of the command line that are no UTF-8
    assert file is not None
    return first_document(file)


def tokenize(tokenizer: Any, text: str, limit: int) -> list[int]:
    """The start token, as in training, and the text's first tokens: at most ``limit`` in all."""
    start, _ = document_ends(tokenizer)
    text = text[: CHARACTERS_PER_TOKEN * limit]
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return [start, *ids][:limit]


def labels(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token says; a token that is part of a character is shown by its bytes."""
    found = []
    for number in ids:
        raw = token_bytes(tokenizer, number)
        try:
            label = None if raw is None else raw.decode()
        except UnicodeDecodeError:
            label = "".join(f"<{byte:02X}>" for byte in raw or b"")
        found.append(tokenizer.convert_ids_to_tokens(number) if label is None else label)
    return found


def inspect_model(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    shown: int = 256,
    read: int = 4096,
    layers: Sequence[int] | None = None,
    at: Sequence[int] = (),
    label: str = "",
) -> Inspection:
    """Run the model over the start token and the text's first tokens.

    Args:
        shown: Number of tokens that the page shows, with all their weights: O(shown^2) memory.
        read: Number of tokens for means, at least ``shown``. Of a model with kept tokens, at most
            its range of positions is read.
        layers: Layers by number, from 0; None: all.
        at: Positions of tokens whose weights are written to weights.csv.

    Raises:
        LatteError: The model has no layers of Latte, layers or positions are unknown, or there are
            too many or too few tokens.
    """
    limits = (
        ("tokens", shown, MOST_SHOWN, ", since p(s|t) takes T x T numbers per head"),
        ("statistics-tokens", read, MOST_READ, ""),
    )
    for name, value, most, why in limits:
        if not 2 <= value <= most:
            raise LatteError(f"{name}: expected 2 to {most}{why}, got {value}")
    found = find_layers(model, layers)
    span = getattr(model.base_model, "kept_range", None)
    # Weights of a text that is read in parts, between which kept keys are turned, are not defined.
    longest = MOST_READ if span is None else span.limit
    ids = tokenize(tokenizer, text, min(max(shown, read), longest))
    if len(ids) < 2:
        raise LatteError("expected a text of at least one token, got none")
    shown = min(shown, len(ids))
    heads = getattr(model.config, "num_attention_heads", 1) * len(found)
    if heads * shown**2 > MOST_PAGE_BYTES:
        most = int((MOST_PAGE_BYTES / heads) ** 0.5)
        raise LatteError(
            f"tokens: expected at most {most} for the {heads} heads of {len(found)} layers, got "
            f"{shown}; choose fewer tokens or fewer --layers"
        )
    for position in at:
        if not 0 <= position < shown:
            raise LatteError(
                f"at: expected positions from 0 to {shown - 1}, the tokens shown, got {position}"
            )
    try:
        mixings = collect(model, ids, found, shown)
        keeps = kept.collect_kept(model, ids, found)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise LatteError(f"tokens: {len(ids)} tokens do not fit into memory") from None
    chosen = tuple(sorted(set(at)))
    return Inspection(label, labels(tokenizer, ids), shown, mixings, chosen, keeps)


def write_report(inspection: Inspection, folder: Path) -> list[str]:
    """Write everything into ``folder``; returns the names of the files."""
    summaries = summary_rows(inspection)
    usage, shares = usage_rows(inspection), share_rows(inspection)
    title = f"{inspection.label}, {len(inspection.tokens):,} tokens"
    _write_rows(folder / "summary.csv", summaries)
    (folder / "index.html").write_text(build_page(inspection, summaries), encoding="utf-8")
    written = ["summary.csv", "index.html"]
    if usage:
        _write_rows(folder / "usage.csv", usage)
        collapse_figure(folder / "collapse.png", usage, f"Use of the latents: {title}")
        effective_figure(folder / "effective.png", summaries, f"Effective latents: {title}")
        written += ["usage.csv", "collapse.png", "effective.png"]
    if shares:
        _write_rows(folder / "window_share.csv", shares)
        widths = {mixing.width for mixing in inspection.layers.values()}
        share_figure(
            folder / "window_share.png",
            shares,
            summaries,
            widths.pop() if len(widths) == 1 else None,
            1 / (min(row.latents for row in summaries if row.latents) + 1),
            f"The window's share p(l=0): {title}",
        )
        written += ["window_share.csv", "window_share.png"]
    if inspection.at:
        rows = (dict(zip(WEIGHTS, row, strict=True)) for row in _weights_of(inspection))
        write_csv(folder / "weights.csv", WEIGHTS, rows)
        written.append("weights.csv")
    if inspection.kept:
        kept.write_kept(folder, inspection.tokens, inspection.kept, title)
        written += kept.FILES
    return written


def page_size(folder: Path) -> str:
    """The size of the page in ``folder``, for people, such as ``1.3 MB`` or ``84 kB``."""
    size = (folder / "index.html").stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{max(1, round(size / 1e3))} kB"


def _write_rows(path: Path, rows: Sequence[Any]) -> None:
    cells = [{name: _cell(value) for name, value in asdict(row).items()} for row in rows]
    write_csv(path, cells[0], cells)


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def _weights_of(inspection: Inspection) -> Iterator[tuple[Any, ...]]:
    """p(s|t), p(l|t) and p(s|l,t) of chosen tokens, the largest first; state "all" is p(s|t)."""
    shown, tokens = inspection.shown, inspection.tokens
    for layer, mixing in inspection.layers.items():
        for head in range(mixing.heads):
            all_PP = mixing.source_weights(head, shown)
            for t in inspection.at:
                rows: list[tuple[Any, float, Tensor]] = [("all", 1.0, all_PP[t])]
                if mixing.states_THS is not None:
                    p_S = mixing.states_THS[t, head].tolist()
                    parts = mixing.state_weights(head, shown)[:, t]
                    rows += zip(mixing.names, p_S, parts, strict=True)
                for state, p, weights in rows:
                    most = weights.topk(min(MOST_SOURCES, t + 1))
                    for value, s in zip(*(x.tolist() for x in most), strict=True):
                        if value > 0:
                            start = (layer, head, t, tokens[t], state, _cell(p))
                            yield *start, s, tokens[s], _cell(value)


def build_page(inspection: Inspection, summaries: list[Summary]) -> str:
    """The page as text."""
    data = {
        "tokens": inspection.tokens[: inspection.shown],
        "read": len(inspection.tokens),
        "layers": [
            _layer(number, mixing, inspection.shown, [s for s in summaries if s.layer == number])
            for number, mixing in inspection.layers.items()
        ],
    }
    return filled_page("page.html", inspection.label, data)


def _layer(
    number: int, mixing: LayerMixing, shown: int, summaries: list[Summary]
) -> dict[str, Any]:
    states = keys = window = None
    if mixing.states_THS is not None:
        states = _packed((mixing.states_THS[:shown].double().numpy() * 65535).round(), "<u2")
    if mixing.latent_k_THL is not None:
        keys = _packed(mixing.latent_k_THL[:shown].numpy(), "<f4")
    if mixing.window_HPP is not None:
        weights = mixing.window_HPP[:, :shown, :shown].double().numpy()
        largest = weights.max(-1, keepdims=True)
        # Small weights keep their precision: 255 sqrt(w / largest of the row).
        weights = 255 * np.sqrt(weights / np.where(largest > 0, largest, 1.0))
        window = _packed(weights.round(), "u1")
    return {
        "number": number,
        **{key: getattr(mixing, key) for key in ("heads", "latents", "names", "width", "delay")},
        "half_lives": _of_latents(mixing),
        "states": states,
        "keys": keys,
        "window": window,
        "summaries": [
            {key: _plain(value) for key, value in asdict(row).items()} for row in summaries
        ],
    }


def _of_latents(mixing: LayerMixing) -> list[list[float | str]] | None:
    """The half-lives in effect, of each head's latents, in tokens."""
    if mixing.half_lives_2HL is None:
        return None
    return [[rounded(x, 3) for x in row] for row in mixing.half_lives_2HL[0].tolist()]


def _plain(value: Any) -> Any:
    """JSON has no NaN; six digits are enough to read."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value


def _packed(values: np.ndarray, dtype: str) -> str:
    raw = np.ascontiguousarray(values.astype(dtype)).tobytes()
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def outline(inspection: Inspection) -> str:
    """A few lines of what the numbers say."""
    rows = summary_rows(inspection)
    layers = len(inspection.layers)
    lines = [
        f"{inspection.label}: {layers} {'layer' if layers == 1 else 'layers'} of "
        f"{len({row.head for row in rows})} heads, {len(inspection.tokens):,} tokens read, "
        f"{inspection.shown} of them shown"
    ]
    if inspection.kept:
        lines.append(kept.outline(inspection.tokens, inspection.kept))
    if not inspection.has_latents:
        return "\n".join([*lines, "there are no latents in this model: p(s|t) alone is shown"])
    lines.append(
        f"{'layer':>5}  {'p(l=0)':>6}  {'effective latents':>17}  {'per token':>9}  {'unused':>6}"
    )
    for layer in inspection.layers:
        mine = [row for row in rows if row.layer == layer and row.latents]
        if not mine:
            continue
        share = [row.window_share for row in mine if row.window_share is not None]
        lines.append(
            f"{layer:>5}  {f'{_mean(share):.3f}' if share else '-':>6}"
            f"  {_mean([row.effective_latents for row in mine]):>10.1f} of {mine[0].latents:>3}"
            f"  {_mean([row.effective_latents_per_token for row in mine]):>9.1f}"
            f"  {sum(row.unused_among_latents or 0 for row in mine):>6}"
        )
    read = len(inspection.tokens)
    late = [layer.delay for layer in inspection.layers.values() if layer.delay]
    if late and read <= min(late):
        lines.append(
            f"the text of {read:,} tokens is not longer than the window of {min(late):,}: no latent"
            " has read a token yet"
        )
    lines.append("means over heads; unused: below 1% of an equal share of the latents' mass")
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> float:
    given = [value for value in values if value is not None and value == value]
    return sum(given) / len(given) if given else float("nan")
