"""The plug-in without vLLM: it is declared, costs nothing, and refuses in one line."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import latte
from latte.models import preset_config
from latte_vllm.plugin import ARCHITECTURES, BLOCK, MODEL, check_and_adjust, check_model

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def test_the_entry_point_is_declared_and_imports_neither_torch_nor_vllm():
    module, function = project(PACKAGE)["entry-points"]["vllm.general_plugins"]["latte"].split(":")
    heavy = "{'torch', 'vllm'} & {*sys.modules}"
    code = f"import sys, {module}; {module}.{function}; assert not {heavy}"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=path)
    assert find_spec(MODEL.partition(":")[0])  # which vLLM is told of by its name


def test_the_library_alone_has_no_entry_point_in_vllm():
    assert "entry-points" not in project(ROOT)
    assert project(ROOT)["name"] in project(PACKAGE)["dependencies"]


def test_the_architectures_are_the_models_own_names():
    from latte.conversion.modeling import FAMILIES

    own = [latte.LatteForCausalLM, *(causal for _, causal in FAMILIES.values())]
    assert {model.__name__ for model in own} == {*ARCHITECTURES}


def test_the_environment_of_test_vllm_has_the_torch_of_all_other_tests():
    theirs, ours = [(home / "constraints.txt").read_text().splitlines() for home in (ROOT, PACKAGE)]
    torch = [line for line in theirs if line.startswith("torch==")]
    assert len(torch) == 1 and torch[0] in ours


def model_config(preset="latte-r-swa++", **fields):
    plain = {"runner_type": "generate", "quantization": None, "enable_prompt_embeds": False}
    return SimpleNamespace(hf_config=preset_config(preset), max_model_len=100, **(plain | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "transformer++"}, "a state that grows"),
        ({"runner_type": "pooling"}, "runner 'pooling'"),
        ({"runner_type": "draft"}, "runner 'draft'"),
        ({"quantization": "fp8"}, "quantization 'fp8'"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_one_line(fields, message):
    check_model(model_config())
    with pytest.raises(latte.LatteError, match=f"^Latte's models in vLLM: {message}[^\n]*$"):
        check_model(model_config(**fields))


def settings(cache=(), parallel=(), runner_type="generate", **fields):
    plain_cache = {"enable_prefix_caching": False, "cache_dtype": "auto", "block_size": 16}
    plain_cache |= {"mamba_cache_dtype": "auto", "mamba_cache_mode": "align"}
    plain_cache |= {"mamba_block_size": None, "user_specified_block_size": False}
    plain = {"speculative_config": None, "lora_config": None, "kv_transfer_config": None}
    plain["scheduler_config"] = SimpleNamespace(enable_chunked_prefill=True)
    return SimpleNamespace(
        model_config=model_config(runner_type=runner_type),
        cache_config=SimpleNamespace(**(plain_cache | dict(cache))),
        parallel_config=SimpleNamespace(
            **({"world_size": 1, "data_parallel_size": 1} | dict(parallel))
        ),
        **(plain | fields),
    )


CACHED = {"enable_prefix_caching": True}
SIZES = {"block_size": 32, "user_specified_block_size": True, "mamba_block_size": 64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache": {"cache_dtype": "fp8"}}, "a cache in 'fp8'"),
        ({"cache": {"mamba_cache_dtype": "float16"}}, "states in 'float16'"),
        ({"parallel": {"world_size": 2}}, "parallelism over 2 processes"),
        ({"parallel": {"data_parallel_size": 4}}, "parallelism over 4 processes"),
        ({"runner_type": "pooling"}, "runner 'pooling'"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA adapters"),
        ({"kv_transfer_config": object()}, "a KV connector"),
        (
            {
                "cache": CACHED,
                "scheduler_config": SimpleNamespace(enable_chunked_prefill=False),
            },
            "prefix caching without chunked prefill",
        ),
        ({"cache": CACHED | SIZES}, "blocks of 32 and of 64 tokens"),
    ],
)
def test_settings_that_would_be_misread_are_refused_in_one_line(fields, message):
    with pytest.raises(latte.LatteError, match=f"^Latte's models in vLLM: {message}[^\n]*$"):
        check_and_adjust(settings(**fields))


def test_all_that_is_wrong_is_said_at_once():
    wrong = settings(cache={"cache_dtype": "fp8"}, lora_config=object())
    with pytest.raises(latte.LatteError, match="LoRA adapters and a cache in 'fp8' cannot be"):
        check_and_adjust(wrong)


def test_a_sequence_has_one_page_and_no_graph_is_captured():
    vllm = settings()
    check_and_adjust(vllm)
    assert vllm.cache_config.mamba_cache_mode == "none"
    assert vllm.cache_config.mamba_block_size == vllm.model_config.max_model_len
    assert vllm.model_config.enforce_eager


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({}, BLOCK),
        ({"block_size": 32, "user_specified_block_size": True}, 32),
        ({"mamba_block_size": 64}, 64),
        ({"block_size": 64, "user_specified_block_size": True, "mamba_block_size": 64}, 64),
    ],
)
def test_with_prefix_caching_pages_are_of_blocks_and_the_size_stays(asked, tokens):
    vllm = settings(cache=CACHED | asked)
    check_and_adjust(vllm)
    cache = vllm.cache_config
    assert cache.mamba_cache_mode == "align" and cache.user_specified_block_size
    assert cache.block_size == cache.mamba_block_size == tokens
