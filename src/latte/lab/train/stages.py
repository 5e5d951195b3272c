"""`latte convert BASE OUT --recipe RECIPE`: convert and train in stages.

    OUT/
      conversion.json     the recipe: the folder's identity
      layers/             attention distillation, layer by layer (:mod:`latte.lab.train.layers`)
      next-token/         next-token training, a run folder
      config.json, model.safetensors, tokenizer.json ...   the result

When it is run again, it continues where it stopped. `latte.lab.evaluate.lengths` compares base and
result.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latte.conversion.pretrained import check_output, load_tokenizer
from latte.errors import LatteError
from latte.lab.data.preparing import prepare_text
from latte.lab.train import recipe as recipes
from latte.lab.train.conversion_trainer import check_peft, starting_config
from latte.lab.train.layers import LayersSection, distill_layers
from latte.lab.train.recipe import ConversionSection, DataSection, Recipe, TrainingSection
from latte.lab.train.run_folder import Claim, lock_folder
from latte.lab.train.typed import build
from latte.ops.processes import is_first_process

IDENTITY_FILE = "conversion.json"
STAGES = ("layers", "next-token")


@dataclass
class EvaluationSection:
    """The held-out text on which the base, the controls and the result are compared."""

    lengths: list[int] | None = None  # context lengths in tokens; None: 1, 2, 4 and 8 blocks
    max_tokens: int | None = 100_000  # number of held-out tokens scored; None: all
    join: bool = False  # make one long document of all


@dataclass
class ConversionRecipe:
    """All settings of a conversion, without the base and the output folder.

    The command line gives these two. A stage that is null is skipped.
    """

    conversion: ConversionSection = field(default_factory=ConversionSection)
    data: DataSection = field(default_factory=DataSection)
    layers: LayersSection | None = None
    training: TrainingSection | None = None
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    plugins: list[str] = field(default_factory=list)  # files or modules, imported first

    def stages(self, base: str, output: Path) -> dict[str, Recipe]:
        """The training runs, in order. Each starts from the result of the one before."""
        found: dict[str, Recipe] = {}
        start = base
        # The Trainer does not run the first stage, so its `training` is a placeholder.
        placeholder = None if self.layers is None else TrainingSection(max_steps=1)
        for name, section in zip(STAGES, (placeholder, self.training), strict=True):
            if section is None:
                continue
            conversion = dataclasses.replace(copy.deepcopy(self.conversion), base=start)
            if name == "layers":
                conversion.trainable, conversion.window_dropout = "latents", 0.0
            folder = str(output / name)
            found[name] = recipes.check(
                Recipe(
                    conversion=conversion,
                    data=copy.deepcopy(self.data),
                    training=copy.deepcopy(section),
                    output_dir=folder,
                    plugins=self.plugins,
                )
            )
            start = folder
        return found


def load_conversion_recipe(
    path: str | Path, overrides: list[str] | tuple[str, ...] = ()
) -> ConversionRecipe:
    """Read a conversion's YAML recipe and apply dotted overrides. Raises LatteError."""
    found = build(ConversionRecipe, recipes.read_current(path, overrides))
    if found.conversion.base is not None:
        raise LatteError("conversion.base: expected none in a conversion's recipe; BASE is given")
    if found.layers is None and found.training is None:
        raise LatteError("a conversion's recipe needs a layers or a training section, got none")
    if found.layers is not None:
        own = [f"layers.{name}" for name in dataclasses.asdict(found.layers) if name != "seed"]
        recipes.expect(found, "a number above 0", *own)
    recipes.expect(found, "numbers of at least 1", "evaluation.lengths")
    recipes.expect(found, "a number above 0", "evaluation.max_tokens")
    found.plugins = [recipes.located(plugin) for plugin in found.plugins]
    return found


def convert_and_train(
    base: str, output: str | Path, recipe: ConversionRecipe, *, quiet: bool = False
) -> Path:
    """Convert `base` and run the recipe's stages; returns the output folder, which has the result.

    Raises:
        LatteError: The base, the recipe or the text cannot be used, or `output` has other files.
    """
    from latte.lab.train.run import data_section, first_alone, inputs, train

    folder = Path(output)
    stages = recipe.stages(base, folder)
    recipes.import_plugins(recipe.plugins)
    if any(stage.conversion.trainable == "lora" for stage in stages.values()):
        check_peft()  # now, not after the stages before
    starting_config(dataclasses.replace(recipe.conversion, base=base))
    load_tokenizer(base)
    values = {"base": base, "recipe": dataclasses.asdict(recipe)}
    owner = first_alone(lambda: _claim(folder, values))
    begun = any(Path(stage.output_dir).exists() for stage in stages.values())
    start = next(iter(stages.values()))  # the stages read the same text, with the base's tokens
    try:
        text = prepare_text(data_section(start), progress=is_first_process() and not quiet)
        read = inputs(start, text)
        first_alone(lambda: owner.check_inputs(read, begun=begun, what="conversion"))
    except Exception:
        owner.give_back()
        raise
    for number, (name, each) in enumerate(stages.items(), 1):
        if is_first_process() and not quiet:
            print(f"stage {number} of {len(stages)}: {name}, in {each.output_dir}", flush=True)
        try:
            if name == "layers":
                section = recipe.layers
                assert section is not None
                first_alone(lambda: distill_layers(each, section, quiet=quiet))  # noqa: B023
                continue
            result = train(each, label=name, quiet=quiet)
        except Exception:
            owner.give_back()
            raise
        if not result.finished:
            raise LatteError(
                f"{name} was stopped at step {result.steps} by its max_minutes; run again with"
                " more to continue"
            )
    first_alone(lambda: _export(Path(list(stages.values())[-1].output_dir), folder))
    return folder


def _identity(values: dict[str, Any]) -> dict[str, Any]:
    """The identity of a conversion: all settings but where and how often it reports."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    recipe = found["recipe"]
    recipe["plugins"] = recipes.plugin_names(recipe["plugins"])
    del recipe["evaluation"], recipe["data"]["cache_dir"]
    if recipe["layers"] is not None:
        del recipe["layers"]["processes"]
    if recipe["training"] is not None:
        for key in recipes.REPORTING:
            del recipe["training"][key]
    return found


def _claim(folder: Path, values: dict[str, Any]) -> Claim:
    """Check that the folder is new, or holds the same conversion."""
    if not (folder / IDENTITY_FILE).is_file():
        check_output(folder)
    wanted = _identity(values)
    return lock_folder(
        folder, IDENTITY_FILE, values, wanted, what="conversion", identity=_identity
    )[0]


def _export(run: Path, folder: Path) -> None:
    """The last stage's model, as the folder's own."""
    for file in run.iterdir():
        model = file.suffix == ".safetensors" or file.name in ("recipe.json", "manifest.json")
        model = model or file.name.endswith(("config.json", ".index.json"))
        if model or file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy2(file, folder / file.name)
