"""`latte convert BASE OUT`: options and action. Heavy imports stay inside the functions."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from latte.errors import LatteError

# Option, keyword of `latte.conversion.convert`, type, help.
SHAPE = (
    ("--window", "window", int, "keys that the window sees, self included (128)"),
    ("--latents", "num_latents", int, "latents over all query heads, which divide it (128)"),
    ("--latent-input", "latent_input", str, "none, conv or rglru (rglru)"),
    ("--window-probability", "window_probability", float, "what p(l=0) starts at (0.95)"),
    ("--sinks", "num_sinks", int, "first tokens that stay visible to the window (0)"),
    ("--seed", "seed", int, "of the new weights (0)"),
    ("--dtype", "dtype", str, "of the base's weights, such as bfloat16 (the checkpoint's)"),
)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("base", help="a pretrained decoder: a folder, or a name on the Hub")
    parser.add_argument("output", help="a new folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides of the recipe"
    )
    parser.add_argument(
        "--recipe", help="train by it too: attention transfer, then next tokens, then a comparison"
    )
    for option, name, kind, text in SHAPE:
        parser.add_argument(option, dest=name, type=kind, help=text)
    parser.add_argument(
        "--decay-range",
        dest="rglru_decay_range",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="initial decays of the RG-LRU (0.9 0.999)",
    )
    parser.add_argument(
        "--delay-latents",
        action="store_true",
        default=None,
        help="feed the latents only with tokens that have left the window",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no lines")


def run(options: Namespace) -> int:
    """latte convert BASE OUT [--recipe RECIPE] [key=value ...]"""
    names = [name for _, name, _, _ in SHAPE] + ["rglru_decay_range", "delay_latents"]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.recipe is None:
        return _convert(options, given)
    if given:
        raise LatteError(
            f"with --recipe the model's shape is the recipe's: expected conversion.KEY=VALUE, got"
            f" --{next(iter(given)).replace('_', '-')}"
        )
    from latte.train.convert import convert_and_train, load_conversion_recipe

    recipe = load_conversion_recipe(options.recipe, options.overrides)
    folder = convert_and_train(options.base, options.output, recipe, quiet=options.quiet)
    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # the other processes have nothing left to do
    from latte.evaluate.conversion_report import report

    report(options.base, folder, recipe, quiet=options.quiet)
    print(f"written: {folder} holds the model; evaluation.csv, .md and .png compare it")
    return 0


def _convert(options: Namespace, given: dict) -> int:
    if options.overrides:
        raise LatteError(
            f"key=value overrides belong to a recipe: expected --recipe with"
            f" {options.overrides[0]!r}"
        )
    from latte.conversion import convert

    model = convert(options.base, options.output, **given)
    new = sum(p.numel() for name, p in model.named_parameters() if ".latents." in name)
    total = sum(p.numel() for p in model.parameters())
    if not options.quiet:
        print(
            f"written: {options.output}, {model.config.model_type},"
            f" {(total - new) / 1e6:.2f}M parameters of the base and {new / 1e6:.2f}M new ones,"
            " which are not trained yet (see latte convert --recipe)"
        )
    return 0
