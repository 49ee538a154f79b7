"""Whole packed models under `torch.compile`: one graph for any routing, eager's bits, `generate`'s static cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel

from hf_qmoe import QMoEConfig
from hf_qmoe.ops.build_native import find_compiler
from tests.support.checkpoints import load, packed_modules
from tests.support.lora import lora_config, randomize, relative_error
from tests.support.models import save_tiny, token_ids
from tests.support.oracle import assert_same_bits


FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "gpt_oss"])
#: Tokens of a sequence in ten calls: each call routes others to other experts.
LENGTHS = (12, 12, 7, 30, 1, 2, 19, 12, 5, 1)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def shallow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, for what takes long to compile."""
    return save_tiny(tmp_path_factory.mktemp("shallow"), "qwen3_moe", num_hidden_layers=1)


def packed(checkpoint: Path, dtype: torch.dtype = torch.float32, form: str = "auto") -> PreTrainedModel:
    """A model packed while it is loaded."""
    model = load(checkpoint, QMoEConfig(experts_module=form), dtype=dtype)
    assert bool(packed_modules(model)) is (form == "auto")
    return model


def recompilations() -> int:
    """How often a graph was compiled again since the counters were cleared."""
    return counters["stats"]["unique_graphs"] - 1


def results(function: nn.Module, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Loss and gradients of all that is trainable, with the same dropout at each call."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = function(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found
    return found | {"loss": loss.detach()}


def assert_trains_alike(compiled: nn.Module, model: nn.Module, *batches: Tensor, tolerance: float = 0.0) -> None:
    """A compiled model gives eager's loss and gradients, without `tolerance` their bits."""
    for ids in batches:
        expected = results(model, model, ids)
        actual = results(compiled, model, ids)
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            if tolerance:
                assert relative_error(actual[name], tensor) < tolerance
            else:
                assert_same_bits(actual[name], tensor)


@FAMILIES
def test_ten_batches_recompile_twice_at_most(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Inference with `fullgraph=True`: a second length makes the length dynamic, one token is torch's special case."""
    model = packed(tiny_checkpoints[family], torch.bfloat16).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for seed, length in enumerate(LENGTHS):
            ids = token_ids(2, length, seed)
            actual, expected = (f(input_ids=ids, use_cache=False).logits for f in (compiled, model))
            assert_same_bits(actual, expected)
    assert recompilations() <= 2


@FAMILIES
def test_one_graph_for_training(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Norms, embeddings and routers are trained, through packed experts and linears.

    In float32: in bfloat16, a float model's compiled gradients are not eager's bits either.
    """
    model = packed(tiny_checkpoints[family]).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_trains_alike(compiled, model, *(token_ids(seed=seed) for seed in range(3)))
    assert recompilations() == 0


@FAMILIES
def test_one_graph_for_checkpointed_lora(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """LoRA on experts and attention as in QLoRA, with dropout, each layer recomputed in backward.

    transformers' hook on the embeddings, which only reentrant checkpointing needs, is what dynamo cannot trace.
    """
    model = prepare_model_for_kbit_training(
        packed(tiny_checkpoints[family]), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model.disable_input_require_grads()
    adapted = get_peft_model(model, lora_config(lora_dropout=0.1))
    randomize(adapted)
    adapted.train()
    assert adapted.get_base_model().is_gradient_checkpointing
    compiled = torch.compile(adapted, backend="aot_eager", fullgraph=True)
    assert_trains_alike(compiled, adapted, *(token_ids(seed=seed) for seed in range(3)))
    assert recompilations() == 0


@pytest.mark.slow
def test_lengths_that_vary_in_training(shallow_checkpoint: Path) -> None:
    """Expert LoRA without checkpointing: another length compiles once more, a third not again.

    Not bit for bit: at some lengths a float model's compiled gradients differ from eager's in the last bit, too.
    """
    adapted = get_peft_model(packed(shallow_checkpoint), lora_config())
    randomize(adapted)
    compiled = torch.compile(adapted.train(), backend="aot_eager", fullgraph=True)
    batches = (token_ids(2, length, length) for length in (12, 12, 7, 30, 3, 9))
    assert_trains_alike(compiled, adapted, *batches, tolerance=1e-5)
    assert recompilations() <= 1


@pytest.mark.slow
def test_the_usual_preparation_trains_alike_with_a_break(shallow_checkpoint: Path) -> None:
    """With that hook in place the graph breaks at the embeddings, and gradients are right all the same."""
    model = prepare_model_for_kbit_training(
        packed(shallow_checkpoint), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    adapted = get_peft_model(model, lora_config())
    randomize(adapted)
    compiled = torch.compile(adapted.train(), backend="aot_eager")
    assert_trains_alike(compiled, adapted, token_ids())
    assert counters["graph_break"]


def assert_generates_alike(model: PreTrainedModel, fullgraph: bool) -> None:
    """`generate` compiled for a static cache gives the tokens of eager decoding."""
    ids = token_ids(2, 7)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    arguments |= {"max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(ids, **arguments)
    config = CompileConfig(fullgraph=fullgraph, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # by itself transformers compiles on accelerators only

    actual = model.generate(ids, cache_implementation="static", compile_config=config, **arguments)

    assert torch.equal(actual, expected)
    assert actual.shape[1] == 19
    assert counters["stats"]["unique_graphs"] > 0


@FAMILIES
def test_generate_compiles_for_a_static_cache(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Decoding is one graph, with the tokens of eager decoding."""
    assert_generates_alike(packed(tiny_checkpoints[family]).eval(), fullgraph=True)
    assert recompilations() <= 1


def test_parametrized_experts_generate_alike(tiny_checkpoints: dict[str, Path]) -> None:
    """So does the form whose forward is the model's own, whatever of it can be compiled."""
    model = packed(tiny_checkpoints["olmoe"], form="parametrize").eval()
    assert_generates_alike(model, fullgraph=False)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="inductor needs a C++ compiler")
def test_inductor(shallow_checkpoint: Path) -> None:
    """torch's own compiler takes a packed model whole; what it fuses is rounded in another order."""
    model = packed(shallow_checkpoint).eval()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for seed in range(2):
            ids = token_ids(seed=seed)
            actual, expected = (f(input_ids=ids, use_cache=False).logits for f in (compiled, model))
            assert relative_error(actual, expected) < 1e-5
    assert recompilations() == 0
