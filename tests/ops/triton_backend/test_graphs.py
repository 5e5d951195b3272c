"""Graphs of the kernels' paths, without a GPU: one for every length, forward and backward."""

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

from latte.models import LatteForCausalLM, preset_config  # noqa: E402
from tests.ops.triton_backend.counting import as_on_a_gpu  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing"
)
# Less than a chunk, a chunk of the walks, one more, and enough for several segments of a sequence.
LENGTHS = (33, 64, 65, 700, 9)


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "reading"])
def test_one_graph_is_for_every_length(gradients):
    config = preset_config("latte-r-swa++", "tiny", num_hidden_layers=1)
    model, graphs = LatteForCausalLM(config), CompileCounter()
    backward = CompileCounter()
    compiler = aot_autograd(fw_compiler=graphs, bw_compiler=backward)
    torch._dynamo.reset()
    compiled = torch.compile(
        partial(model, use_cache=False), backend=compiler, dynamic=True, fullgraph=True
    )
    with as_on_a_gpu(count=False), torch.set_grad_enabled(gradients):
        for length in LENGTHS:
            ids = torch.ones(2, length, dtype=torch.long)
            loss = compiled(ids, labels=ids).loss
            if gradients:
                loss.backward()
    torch._dynamo.reset()
    assert graphs.frame_count == 1 and backward.frame_count == gradients
