"""Models to compare, as a command line names them.

NAME=FOLDER                                     a checkpoint, or a base in Hugging Face's format
NAME=FOLDER,mixing=window,local_window=152      a control: other values of its config's fields
NAME=FOLDER,scores=random                       a control: tokens are kept by other scores
NAME#SEED=FOLDER                                one of several conversions of the same name
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from latte.errors import LatteError
from latte.lab.evaluate.checkpoint import find_checkpoint, load_checkpoint, weight_files
from latte.lab.train.typed import apply_override


@dataclass(frozen=True)
class Side:
    """A checkpoint and its name in tables.

    Attributes:
        overrides: Fields of its config, and their values; `scores` is one of
            `experiments.kept.controls`.
        seed: Seed that distinguishes conversions of the same name; "" if there is only one.
    """

    name: str
    folder: str
    overrides: tuple[tuple[str, Any], ...] = ()
    seed: str = ""

    def load(self, device: str | None = None, *, dtype: str | None = None) -> tuple[Any, Any]:
        """(model in evaluation mode, tokenizer). Raises LatteError as `load_checkpoint`."""
        fields = dict(self.overrides)
        mixing, scores = fields.pop("mixing", None), fields.pop("scores", None)
        model, tokenizer = load_checkpoint(
            self.folder, device, mixing=mixing, overrides=fields, dtype=dtype
        )
        if scores is not None:
            from experiments.kept.controls import set_scores

            set_scores(model, tokenizer, scores)
        return model, tokenizer

    def fields(self) -> str:
        """The overrides as the command line has them."""
        return ",".join(f"{name}={value}" for name, value in self.overrides)

    def identity(self) -> dict[str, str]:
        """The values that identify the weights of a measurement, as columns of a table."""
        digest = hashlib.sha256()
        for file in weight_files(find_checkpoint(self.folder)):
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        return {
            "model": self.name,
            "seed": self.seed,
            "overrides": self.fields(),
            "weights": digest.hexdigest()[:12],
        }


def side(text: str) -> Side:
    """A side of `NAME[#SEED]=FOLDER[,FIELD=VALUE...]`. Raises LatteError if it is none."""
    name, folder, fields = named_path(text)
    name, _, seed = name.partition("#")
    return Side(name, folder, tuple(fields.items()), seed)


def named_path(text: str) -> tuple[str, str, dict[str, Any]]:
    """`NAME=PATH,KEY=VALUE,...` -> (name, path, values, each read as YAML)."""
    # A comma that no KEY= follows belongs to a value, such as the list [7,20].
    first, *rest = re.split(r",(?=\w+=)", text)
    name, equals, path = first.partition("=")
    if not (name and equals and path):
        raise LatteError(f"expected NAME=PATH or NAME=PATH,KEY=VALUE, got {text!r}")
    values: dict[str, Any] = {}
    for part in rest:
        apply_override(values, part)
    return name, path, values


def sides(texts: Sequence[str]) -> list[Side]:
    """The sides of a command line, in its order.

    Raises:
        LatteError: There is no side, one is given twice, or a folder has no checkpoint.
    """
    found = [side(text) for text in texts]
    if not found:
        raise LatteError("expected at least one model, NAME=FOLDER, got none")
    for each in found:
        if sum((other.name, other.seed) == (each.name, each.seed) for other in found) > 1:
            raise LatteError(
                f"two models are called {each.name!r}: expected a name each, or NAME#SEED=FOLDER"
                " for several conversions"
            )
        find_checkpoint(each.folder)
    return found


def keeps_all_tokens(model: Any) -> bool:
    """Whether a model is one of quadratic cost, whose state keeps every token: a base.

    A hybrid, in which some layers keep full attention, is not one.
    """
    config = model.config
    grows = getattr(config, "state_grows", None)
    if grows is None or getattr(config, "mixing", None) == "base":
        return True
    return all(grows(layer) for layer in range(config.num_hidden_layers))
