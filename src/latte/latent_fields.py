"""The options of latents: each is declared once, with its type, default, meaning and check.

``LatteConfig``, the configurations of converted models, :func:`latte.conversion.convert`, the
section `conversion` of recipes, ``latte convert`` and the tables of the reference pages take them
from here. A class that needs another default says so with :func:`again`. Torch is never imported.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

Function = TypeVar("Function", bound=Callable[..., Any])
Check = Callable[[str, Any], None]  # of an option's name and value; raises ValueError

LatentInput = Literal["none", "conv", "rglru"]
Forgetting = Literal["none", "static", "gated"]
Initial = Literal["auto", "landmarks", "random"]
LATENT_INPUTS, FORGETTING, INITIAL = map(get_args, (LatentInput, Forgetting, Initial))
LATENTS_PER_HEAD = 16  # of a new conversion, if no number of latents is given


# --- checks: one line that says what was expected and what came


def check_probability(what: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise ValueError(f"{what} must be between 0 and 1, got {value!r}")


def check_decay_range(what: str, value: Sequence[float]) -> None:
    """``(low, high)`` with 0 < low <= high < 1."""
    _check_range(what, value, 1.0, "0 < low <= high < 1")


def check_half_lives(what: str, value: Sequence[float]) -> None:
    """``(low, high)`` with 0 < low <= high, in tokens."""
    _check_range(what, value, math.inf, "0 < low <= high")


def _check_range(what: str, value: Sequence[float], bound: float, wanted: str) -> None:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if pair and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value):
        low, high = value
        if 0 < low <= high < bound:
            return
    raise ValueError(f"{what} must be two numbers with {wanted}, got {value!r}")


def _check_switch(what: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r}")


def _whole(least: int, unit: str = "") -> Check:
    def check(what: str, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{what} must be a whole number, got {value!r}")
        if value < least:
            wanted = f"at least {least}{unit}" if least else "0 or more"
            raise ValueError(f"{what} must be {wanted}, got {value}")

    return check


def one_of(choices: tuple[str, ...]) -> Check:
    def check(what: str, value: str) -> None:
        if value not in choices:
            raise ValueError(f"{what} must be one of {choices}, got {value!r}")

    return check


# --- declaring options, and reading the declarations


def option(
    default: Any, help: str, check: Check | None = None, *, none: str = "", flag: str = ""
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: Default. A configuration's must stay as it is: a saved configuration leaves out the
            fields that have their default.
        help: Meaning, for help texts and pages. Names of values stand in backticks.
        check: Check of the value, unless it is None and the type has None.
        none: Meaning of a default that is None or empty.
        flag: Option of ``latte convert``, if it is not the field's name.
    """
    metadata = {"help": help, "check": check, "none": none, "flag": flag}
    return field(default=default, metadata=metadata)


def again(kind: type, name: str, default: Any) -> Any:
    """An option of a base class with another default."""
    inherited: Field[Any] = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=default, metadata=inherited.metadata)


def window_option() -> Any:
    """The window's width. Its name differs: ``sliding_window`` is a base's own in a conversion."""
    help = "number of keys that the window sees, the current token included"
    return option(128, help, _whole(1, " key"))


def options_of(kind: Any) -> list[Field[Any]]:
    """The fields of a dataclass that are options."""
    return [each for each in fields(kind) if "help" in each.metadata]


def flag(each: Field[Any]) -> str:
    """The option of ``latte convert``, such as ``--window``."""
    return f"--{each.metadata['flag'] or each.name.replace('_', '-')}"


def default_in_words(each: Field[Any]) -> str:
    """The default as help texts and pages have it."""
    if each.default in (None, ()):
        return str(each.metadata["none"])
    if isinstance(each.default, bool):
        return "yes" if each.default else "no"
    if isinstance(each.default, tuple):
        return " ".join(f"{number:g}" for number in each.default)
    return str(each.default)


def takes_options(kind: type) -> Callable[[Function], Function]:
    """Decorator of a function with ``**options``: its signature and docstring name each of them."""

    def entries(mark: re.Match[str]) -> str:
        lines = []
        for each in options_of(kind):
            meaning, indent = each.metadata["help"], mark[1]
            text = f"{each.name}: {meaning[0].upper()}{meaning[1:]} ({default_in_words(each)})."
            lines += textwrap.wrap(
                text, 100, initial_indent=indent, subsequent_indent=indent + "    "
            )
        return "\n".join(lines)

    def derive(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            inspect.Parameter(x.name, own[-1].kind, default=x.default, annotation=x.type)
            for x in options_of(kind)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        mark = re.compile(r"^( *)\*\*options: .*$", re.M)
        function.__doc__ = mark.sub(entries, function.__doc__ or "")
        return function

    return derive


# --- the options


@dataclass(kw_only=True, repr=False)
class LatentFields:
    """Options of the latents: fields of ``LatteConfig`` and of converted models' configurations."""

    num_latents: int | None = option(
        128,
        "total number of latents over all query heads, a multiple of their number",
        _whole(1),
        none=f"{LATENTS_PER_HEAD} per head",
        flag="latents",
    )
    latent_input: LatentInput = option(
        "rglru",  # eq. 18-19
        "what the latents' logits are computed from: `none` (x), `conv` or `rglru`",
        one_of(LATENT_INPUTS),
    )
    # A bias on the window's query logit sets it.
    window_probability: float | None = option(
        None,
        "initial value of p(l=0), the window's share",
        check_probability,
        none="no bias, so about 1 / (L + 1)",
    )
    rglru_decay_range: Sequence[float] = option(
        (0.9, 0.999),  # Griffin's range of a_t where the recurrence gate is fully open, r = 1
        "lowest and highest initial decay of the RG-LRU",
        check_decay_range,
        flag="decay-range",
    )
    # Beyond the paper. With delayed latents the decay is computed from the query's token.
    forgetting: Forgetting = option(
        "none",
        "whether latents forget: `none`, `static` (a rate per latent) or `gated` (a rate per"
        " token)",
        one_of(FORGETTING),
    )
    half_life_range: Sequence[float] = option(
        (4.0, 512.0),
        "shortest and longest initial half-life of latents that forget, in tokens",
        check_half_lives,
        flag="half-lives",
    )

    def latent_options(self) -> dict[str, Any]:
        """The options of this class, which are keywords of :class:`latte.layers.LatentLogits`."""
        return {each.name: getattr(self, each.name) for each in fields(LatentFields)}

    def check_options(self) -> None:
        """Raise ValueError if the value of an option is not as expected."""
        for each in options_of(self):
            value, check = getattr(self, each.name), each.metadata["check"]
            if check is not None and not (value is None and "None" in str(each.type)):
                check(each.name, value)

    def lists_to_tuples(self) -> None:
        """Make tuples of lists, as which JSON has them."""
        for each in options_of(self):
            if isinstance(value := getattr(self, each.name), list):
                setattr(self, each.name, tuple(value))


@dataclass(kw_only=True, repr=False)
class ConvertedFields(LatentFields):
    """Options that a converted model's configuration and a new conversion have."""

    window_probability: float = again(LatentFields, "window_probability", 0.95)
    # arXiv 2309.17453. Their distance is at most that of the window's edge.
    num_sinks: int = option(
        0, "number of first tokens that stay visible to the window", _whole(0), flag="sinks"
    )
    # The two branches then share no token. While none has left the window, p(l=0) is 1.
    delay_latents: bool = option(
        False, "latents read a token only when it has left the window", _check_switch
    )
    # Beyond the paper. The log-mass of the window's logits is added to the learned logit of p(l=0).
    joint_softmax: bool = option(
        False, "the window's keys and the latents share one softmax", _check_switch
    )


@dataclass(kw_only=True)
class ConversionOptions(ConvertedFields):
    """Options of a new conversion. Defaults that differ from the configuration's come first.

    The configuration's are those of the first converted models, whose saved configurations do not
    have the fields.
    """

    num_latents: int | None = again(ConvertedFields, "num_latents", None)
    latent_input: LatentInput = again(ConvertedFields, "latent_input", "none")
    num_sinks: int = again(ConvertedFields, "num_sinks", 4)
    delay_latents: bool = again(ConvertedFields, "delay_latents", True)
    joint_softmax: bool = again(ConvertedFields, "joint_softmax", True)
    window: int = window_option()
    # The model is then a hybrid: the state of these layers, and a step's time, grow with the text.
    keep_layers: Sequence[int] = option(
        (), "layers that keep full attention, by number from 0", none="none"
    )
    # "auto" is "random" too, with a warning, if there are no tokens to compute landmarks from.
    initial: Initial = option(
        "auto", "initial latents: `landmarks`, `random`, or `auto` (landmarks if latents read x)"
    )

    def fields(self) -> dict[str, Any]:
        """The values that are fields of a converted model's configuration, by their names there."""
        values = {each.name: getattr(self, each.name) for each in options_of(ConvertedFields)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        own = {"local_window": self.window, "keep_layers": tuple(sorted(set(self.keep_layers)))}
        return values | own
