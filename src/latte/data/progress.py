"""The progress bar of a pass over a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latte.data.corpora import Source


class CorpusBar:
    """A tqdm bar in the units of a source: bytes on disk, or documents. Use it with ``with``."""

    def __init__(self, description: str, source: Source, enabled: bool = True) -> None:
        from tqdm.auto import tqdm

        self._source = source
        self._bar: Any = tqdm(
            desc=description,
            total=source.total,
            unit=source.unit,
            unit_scale=True,
            disable=not enabled,
        )

    def meter(self, done: int) -> None:
        """Move to ``done`` units; a total that is known only now is taken up."""
        if self._bar.total is None:
            self._bar.total = self._source.total
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)

    def note(self, text: str) -> None:
        """Show a few words behind the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> CorpusBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
