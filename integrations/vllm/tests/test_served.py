"""Latte's models in vLLM itself: `make test-vllm`. Greedy, fp32, on a CPU, one process."""

import gc
import importlib
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from latte.lab.data.tokenizers import byte_tokenizer
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

CACHING = {"enable_prefix_caching": True, "block_size": 16, "prefix_cache_retention_interval": None}


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

    def prompts(self, lengths=LENGTHS * 2, seed=0):
        generator, most = torch.Generator().manual_seed(seed), self.plain.config.vocab_size
        return [torch.randint(most, (n,), generator=generator).tolist() for n in lengths]

    def prompts_that_share(self):
        """32 prompts, of which the second half begin with a part of one text."""
        (text,) = self.prompts((160,), seed=1)
        first, second = self.prompts(LENGTHS), self.prompts(LENGTHS, seed=2)
        return first + [text[: 10 * i] + own for i, own in enumerate(second, 1)]

    def generate(self, prompts, between=lambda step: None, new=NEW):
        """Greedy outputs; `between` is called after every step of the engine.

        `cached` has the number of cached tokens of each prompt, `preemptions` of all requests.
        """
        parameters = vllm.SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=1
        )
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
        requests = [*self.scheduler.requests.values()]
        done, steps = {}, 0
        while self.engine.has_unfinished_requests():
            done |= {int(x.request_id): x for x in self.engine.step() if x.finished}
            between(steps := steps + 1)
        self.cached = [done[index].num_cached_tokens for index in range(len(prompts))]
        self.preemptions = sum(request.num_preemptions for request in requests)
        return [done[index].outputs[0] for index in range(len(prompts))]

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


@pytest.fixture(scope="module", params=MODELS)
def caching(request, tmp_path_factory):
    """The same with prefix caching, which keeps the state at each 16th token."""
    served = Served(save(MODELS[request.param](), tmp_path_factory.mktemp("model")), **CACHING)
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


class ByHand:
    """Forwards of a model without vLLM: each row is (page, tokens before, new tokens).

    `texts` has the text of the sequence that each page belongs to.
    """

    def __init__(self, served, texts, monkeypatch):
        self.served, self.model, self.texts = served, served.model, dict(enumerate(texts, 1))
        self.room = importlib.import_module("latte_vllm.model")
        self.patch = monkeypatch

    def forward(self, *rows):
        new = [self.texts[page][before : before + count] for page, before, count in rows]
        bounds = [0, *itertools.accumulate(map(len, new))]
        ends = [before + count for _, before, count in rows]
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            state_indices_tensor=torch.tensor([page for page, _, _ in rows], dtype=torch.int32),
        )
        context = SimpleNamespace(attn_metadata={self.room.LAYER: metadata})
        self.patch.setattr(self.room, "get_forward_context", lambda: context)
        with torch.no_grad():
            hidden = self.model(torch.tensor([*itertools.chain(*new), 0, 0]), None)
            for (page, _, _), begin, end, stop in zip(rows, bounds, bounds[1:], ends, strict=False):
                text = torch.tensor([self.texts[page][:stop]])
                whole = self.served.plain.model(text)[0][0]
                torch.testing.assert_close(hidden[begin:end], whole[stop - end + begin :])

    def copy(self, source, target, text=None):
        """vLLM copies a page; the sequence there has the same text, or this one."""
        self.served.pages[target] = self.served.pages[source]
        self.texts[target] = text or self.texts[source]


def test_rows_come_in_any_order_and_padding_is_nobodys(served, monkeypatch):
    hand = ByHand(served, served.prompts((9, 8, 5, 4)), monkeypatch)
    hand.forward((1, 0, 4), (2, 0, 1))
    hand.forward((3, 0, 1), (1, 4, 1), (4, 0, 3), (2, 1, 1))
    hand.forward((1, 5, 1), (2, 2, 1))  # the same two step on, where they are
    hand.forward((2, 3, 1), (1, 6, 1), (3, 1, 3), (4, 3, 0), (4, 3, 0))  # another order, padded
    hand.texts[1] = hand.texts[1][::-1]  # page 1 is another's
    hand.forward((1, 0, 1), (2, 4, 1))
    hand.forward((2, 5, 1), (3, 4, 1), (1, 1, 2))
    hand.forward((1, 3, 1), (2, 6, 1), (4, 3, 1))


def test_states_after_full_blocks_are_on_their_pages(caching, monkeypatch):
    first, second = caching.prompts((40, 40))
    hand = ByHand(caching, (first, second), monkeypatch)
    hand.forward((1, 0, 14), (2, 0, 12))
    for before in (14, 15):
        hand.forward((1, before, 1), (2, before - 2, 1))
    cache = hand.model.stepping
    hand.copy(1, 3)  # the first sequence goes on in its second page
    hand.copy(1, 4)  # and another one begins where it was
    hand.forward((3, 16, 1), (2, 14, 1))
    assert hand.model.stepping is cache  # nothing was read anew
    hand.forward((3, 17, 1), (2, 15, 1), (4, 16, 3))
    hand.copy(2, 5)
    hand.forward((4, 19, 1), (5, 16, 1), (3, 18, 1))


def test_a_page_of_another_sequence_is_not_overwritten(caching, monkeypatch):
    """vLLM copies a state to a page before the forward that would put the last one back."""
    first, second = caching.prompts((40, 40))
    hand = ByHand(caching, (first, second), monkeypatch)
    hand.forward((1, 0, 16), (2, 0, 16))
    hand.copy(1, 3)
    hand.forward((3, 16, 1))  # page 3 is behind the step's cache now; its sequence ends
    hand.copy(2, 3)
    hand.forward((3, 16, 2))
    # The same page and number of tokens are no proof after a full block.
    hand.texts[4] = second
    hand.forward((4, 0, 15))
    hand.forward((4, 15, 1))
    hand.copy(1, 4)
    hand.forward((4, 16, 1))


def test_cached_prefixes_change_no_token(caching):
    prompts = caching.prompts_that_share()
    caching.check(prompts, caching.generate(prompts))
    assert sum(caching.cached) > 0
    caching.check(prompts, caching.generate(prompts))  # all of them are known by now
    assert caching.cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_a_second_turn_starts_after_the_first_ones_answer(caching):
    (prompt, question) = caching.prompts((100, 9), seed=3)
    (answer,) = caching.generate([prompt], new=40)
    second = [*prompt, *answer.token_ids, *question]
    caching.check([second], caching.generate([second]))
    assert caching.cached == [(100 + 40 - 1) // 16 * 16]  # nothing has read the last token yet


def test_preempted_requests_are_read_anew_if_nothing_is_cached(caching):
    prompts = caching.prompts_that_share()

    def preempt(step):
        if step in (5, 11, 12, 25):  # the cache is emptied too
            assert caching.llm.reset_prefix_cache(reset_running_requests=True)
            caching.pages.fill_(255)

    caching.check(prompts, caching.generate(prompts, preempt))
    assert caching.preemptions > 10


def test_too_few_pages_preempt_and_change_no_token(tmp_path):
    """At the end of a block a sequence needs a new page. vLLM takes one of another sequence."""
    folder = save(MODELS["latte-r-swa++"](), tmp_path)
    served = Served(folder, **CACHING, num_gpu_blocks_override=12)
    prompts = served.prompts_that_share()
    for _ in range(2):
        served.check(prompts, served.generate(prompts, new=30), new=30)
        assert served.preemptions and sum(served.cached)
    served.close()


def test_requests_that_come_and_go_at_any_time_change_no_token(tmp_path):
    """Few pages, random arrivals, and requests that are aborted, whose pages others get."""
    served = Served(save(MODELS["gemma2, sinks"](), tmp_path), **CACHING, num_gpu_blocks_override=9)
    prompts, new = served.prompts_that_share(), 20
    parameters = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=0)
    for seed in range(3):
        generator, done, waiting = random.Random(seed), {}, list(enumerate(prompts))
        generator.shuffle(waiting)
        while waiting or served.engine.has_unfinished_requests():
            if waiting and generator.random() < 0.5:
                index, prompt = waiting.pop()
                served.engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
            if served.scheduler.running and generator.random() < 0.05:
                gone = generator.choice(served.scheduler.running).request_id
                served.engine.abort_request([gone], internal=True)
            done |= {int(x.request_id): x.outputs[0] for x in served.engine.step() if x.finished}
        whole = [i for i in done if done[i].finish_reason == "length"]
        assert len(prompts) > len(whole) > 10
        served.check([prompts[i] for i in whole], [done[i] for i in whole], new)
    served.close()


def test_by_default_only_the_end_of_a_prompt_is_kept(tmp_path):
    """The default size of a block, 128, is more than the 64 tokens that a step takes here."""
    folder = save(MODELS["gemma2"](), tmp_path)
    served = Served(folder, enable_prefix_caching=True)
    prompts = served.prompts((300, 100))
    served.check(prompts, served.generate(prompts))
    served.check([prompts[0][:280]], served.generate([prompts[0][:280]]))
    assert served.cached == [256]
    served.check([prompts[0][:200]], served.generate([prompts[0][:200]]))
    assert served.cached == [0]
    served.close()


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
    # All in one step, whole as `generate` reads them: other pieces round otherwise in bf16.
    prompts = served.prompts((3, 20, 41))
    with torch.no_grad():
        served.plain(torch.tensor(prompts[:1]), past_key_values=cache)
    parts = len(served.model.states.spans)
    assert 0 <= served.pages.shape[1] - cache.nbytes < 8 * parts
    served.check(prompts, served.generate(prompts, new=4), new=4)
    served.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_prefix_caching": True, "enable_chunked_prefill": False},
            "prefix caching without chunked prefill",
        ),
        (
            {"enable_prefix_caching": True, "block_size": 32, "mamba_block_size": 64},
            "blocks of 32 and of 64 tokens",
        ),
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
