"""Latte's models in vLLM itself: `make test-vllm`. Greedy, fp32, on a CPU, one process."""

import gc
import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from latte.data.tokenizers import byte_tokenizer
from latte.models import (
    LatteCache,
    LatteForCausalLM,
    LatteForSequenceClassification,
    LatteModel,
    preset_config,
)
from tests.conversion.bases import converted

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm`")
arguments = pytest.importorskip("vllm.engine.arg_utils")
distributed = pytest.importorskip("vllm.distributed")

LENGTHS = (1, 2, 3, 5, 8, 13, 40, 63, 64, 65, 100, 130, 200, 250, 17, 33)  # pieces have 64 tokens
NEW = 12
MODELS = {
    "latte-r-swa++": lambda: LatteForCausalLM(small("latte-r-swa++")),
    "latte++": lambda: LatteForCausalLM(small("latte++")),
    "latte-conv-swa-f++": lambda: LatteForCausalLM(small("latte-conv-swa-f++")),
    "gemma2": lambda: converted("gemma2").float(),
    "gemma2, sinks": lambda: converted("gemma2", num_sinks=2, delay_latents=True).float(),
}


def small(preset):
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 260}
    if preset != "transformer++":
        shape["num_latents"] = 16
    return preset_config(preset, "tiny", initializer_range=0.4, **shape)


def save(model, folder):
    model.eval().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def in_one_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        yield


class Served:
    """An engine over a model, and the model itself to compare with."""

    def __init__(self, folder, dtype="float32", **options):
        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.plain.eval()
        self.llm = vllm.LLM(
            folder,
            dtype=dtype,
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=64 << 20,
            **options,
        )
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.model = core.model_executor.driver_worker.worker.model_runner.model
        # What no request has written is no number: reading it would be seen.
        self.pages = self.model.states.kv_cache[0]
        self.pages.fill_(255)

    def prompts(self, lengths=LENGTHS * 2):
        generator, most = torch.Generator().manual_seed(0), self.plain.config.vocab_size
        return [torch.randint(most, (n,), generator=generator).tolist() for n in lengths]

    def generate(self, prompts, between=lambda step: None, new=NEW):
        """Greedy outputs; `between` is called after every step of the engine."""
        parameters = vllm.SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=1
        )
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
        done, steps = {}, 0
        while self.engine.has_unfinished_requests():
            done |= {int(x.request_id): x.outputs[0] for x in self.engine.step() if x.finished}
            between(steps := steps + 1)
        return [done[index] for index in range(len(prompts))]

    def expected(self, prompt, new=NEW):
        """What `generate` says, without vLLM."""
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new}
        out = self.plain.generate(ids, do_sample=False, eos_token_id=None, **options)
        return out[0, len(prompt) :].tolist()

    def check(self, prompts, outputs, new=NEW):
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == self.expected(prompt, new), len(prompt)

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.engine, self.scheduler, self.model, self.pages
        gc.collect()
        distributed.cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory):
    served = Served(save(MODELS[request.param](), tmp_path_factory.mktemp("model")))
    yield served
    served.close()


def test_greedy_outputs_are_those_of_generate(served):
    prompts, most = served.prompts(), []
    outputs = served.generate(prompts, lambda step: most.append(len(served.scheduler.running)))
    assert max(most) == 8 < len(prompts)
    served.check(prompts, outputs)
    # The probabilities too, of a long prompt.
    prompt, output = max(zip(prompts, outputs, strict=True), key=lambda pair: len(pair[0]))
    with torch.no_grad():
        logits = served.plain(torch.tensor([[*prompt, *output.token_ids]])).logits[0]
    wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    for row, token, found in zip(wanted, output.token_ids, output.logprobs, strict=True):
        assert found[token].logprob == pytest.approx(row[token].item(), abs=1e-3)


def test_preempted_requests_resume_right(served):
    prompts, preempted = served.prompts(), []

    def preempt(step):
        if step in (3, 9, 10, 20):  # in the middle of long prompts, and of outputs
            running = list(served.scheduler.running)
            preempted.extend(x.num_computed_tokens < x.num_prompt_tokens for x in running)
            assert served.llm.reset_prefix_cache(reset_running_requests=True)
            assert all(x.num_preemptions and not x.num_computed_tokens for x in running)
            served.pages.fill_(255)

    served.check(prompts, served.generate(prompts, preempt))
    assert {*preempted} == {True, False}


def test_a_sequence_has_one_page_at_any_length(served):
    prompts, pages = served.prompts((16, 2000)), {}

    def count(step):
        for request in served.scheduler.running:
            found = served.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            pages.setdefault(request.num_prompt_tokens, set()).add(len(*found))

    served.check(prompts, served.generate(prompts, count))
    assert pages == {16: {1}, 2000: {1}}
    sizes = set()
    for prompt in prompts:
        cache = LatteCache(served.plain.config)
        with torch.no_grad():
            served.plain(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
        sizes.add(cache.nbytes)
    parts = len(served.model.states.spans)
    assert len(sizes) == 1 and 0 <= served.pages.shape[1] - sizes.pop() < 8 * parts


def test_rows_come_in_any_order_and_padding_is_nobodys(served, monkeypatch):
    """Pages 1 to 4 by hand: each row is (page, tokens before, new tokens)."""
    model, room = served.model, importlib.import_module("latte_vllm.model")
    prompts = dict(enumerate(served.prompts((9, 8, 5, 4)), 1))

    def forward(*rows):
        new = [prompts[page][before : before + count] for page, before, count in rows]
        bounds = [0, *itertools.accumulate(map(len, new))]
        ends = [before + count for _, before, count in rows]
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            state_indices_tensor=torch.tensor([page for page, _, _ in rows], dtype=torch.int32),
        )
        context = SimpleNamespace(attn_metadata={room.LAYER: metadata})
        monkeypatch.setattr(room, "get_forward_context", lambda: context)
        with torch.no_grad():
            hidden = model(torch.tensor([*itertools.chain(*new), 0, 0]), None)
            for (page, _, _), begin, end, stop in zip(rows, bounds, bounds[1:], ends, strict=False):
                whole = served.plain.model(torch.tensor([prompts[page][:stop]]))[0][0]
                torch.testing.assert_close(hidden[begin:end], whole[stop - end + begin :])

    forward((1, 0, 4), (2, 0, 1))
    forward((3, 0, 1), (1, 4, 1), (4, 0, 3), (2, 1, 1))
    forward((1, 5, 1), (2, 2, 1))  # the same two step on, where they are
    forward((2, 3, 1), (1, 6, 1), (3, 1, 3), (4, 3, 0), (4, 3, 0))  # in another order, padded
    prompts[1] = prompts[1][::-1]  # page 1 is another's
    forward((1, 0, 1), (2, 4, 1))
    forward((2, 5, 1), (3, 4, 1), (1, 1, 2))
    forward((1, 3, 1), (2, 6, 1), (4, 3, 1))


def test_fewer_pages_than_requests_are_used_again_and_again(tmp_path):
    folder = save(MODELS["latte-r-swa++"](), tmp_path)
    served = Served(folder, num_gpu_blocks_override=4)  # of which vLLM keeps one for itself
    prompts, most = served.prompts(LENGTHS[:12]), []
    outputs = served.generate(prompts, lambda step: most.append(len(served.scheduler.running)))
    assert max(most) == 3
    served.check(prompts, outputs)
    served.close()


def test_half_precision_keeps_each_part_of_a_state_in_its_dtype(tmp_path):
    served = Served(save(MODELS["gemma2"](), tmp_path), dtype="bfloat16")
    assert served.model.latte.model.layers[0].self_attn.latents.k_proj.weight.dtype == torch.float32
    cache = LatteCache(served.plain.config)
    prompts = served.prompts((3, 20, 70))
    with torch.no_grad():
        served.plain(torch.tensor(prompts[:1]), past_key_values=cache)
    parts = len(served.model.states.spans)
    assert 0 <= served.pages.shape[1] - cache.nbytes < 8 * parts
    served.check(prompts, served.generate(prompts, new=4), new=4)
    served.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": True}, "prefix caching"),
        ({"tensor_parallel_size": 2}, "parallelism over 2 processes"),
        ({"enable_lora": True}, "LoRA adapters"),
        ({"runner": "pooling"}, "runner 'pooling'"),
        ({"kv_cache_dtype": "fp8"}, "a cache in 'fp8'"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
    ],
)
def test_vllm_refuses_by_the_same_lines(tmp_path, options, message):
    folder = save(MODELS["latte-r-swa++"](), tmp_path)
    assert arguments.EngineArgs(folder).create_engine_config().model_config.enforce_eager
    with pytest.raises(ValueError, match=f"Latte's models in vLLM: [^\n]*{message}"):
        arguments.EngineArgs(folder, **options).create_engine_config()


@pytest.mark.parametrize(
    ("kind", "preset", "message"),
    [
        (LatteForCausalLM, "transformer++", "a state that grows"),
        (LatteForSequenceClassification, "latte-r-swa++", "runner 'pooling'"),
        (LatteModel, "latte-r-swa++", "runner 'pooling'"),
    ],
)
def test_other_models_are_refused(tmp_path, kind, preset, message):
    folder = save(kind(small(preset)), tmp_path)
    with pytest.raises(ValueError, match=f"Latte's models in vLLM: {message}"):
        arguments.EngineArgs(folder).create_engine_config()
