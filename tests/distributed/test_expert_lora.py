"""LoRA on packed experts over two CPU processes, and on parameters partitioned as DeepSpeed ZeRO-3 does."""

import copy
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.lora import FORMS, logits, lora_config, lora_tensors, packed_and_float, randomize
from tests.support.models import NUM_EXPERTS, token_ids
from tests.support.oracle import assert_same_bits
from tests.support.processes import RANKS, run_ranks


FAMILIES = ("qwen3_moe", "gpt_oss")


def adapted(family: str, form: str, dtype: torch.dtype = torch.float32) -> PeftModel:
    """The same adapted model in each process."""
    model = get_peft_model(packed_and_float(family, form, dtype)[0], lora_config())
    randomize(model)
    return model.train()


def step(model: nn.Module, seed: int) -> Tensor:
    """Loss of a batch of that seed, after backward. Few tokens, so that some experts are hit by none."""
    ids = token_ids(1, 3, seed)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor that may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the adapters in float32, by name; none is missing."""
    found = {}
    for name, parameter in lora_tensors(model).items():
        assert parameter.grad is not None, name
        found[name.removeprefix("module.")] = whole(parameter.grad).float()
    return found


def mean_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The mean of the gradients of all processes' batches, in one process."""
    parts = []
    for rank in range(RANKS):
        model.zero_grad()
        step(model, rank)
        parts.append(gradients(model))
        per_expert = [t.view(NUM_EXPERTS, -1).any(dim=1) for n, t in parts[-1].items() if "experts" in n and "_A" in n]
        assert not torch.stack(per_expert).all()  # some expert was hit by no token
    mean = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    assert all(gradient.any() for gradient in mean.values())
    return mean


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of packed bytes and scales, whole ones."""
    return {n: whole(p) for n, p in model.named_parameters() if not p.is_floating_point()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert expected
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def check_ddp(rank: int, family: str, form: str) -> None:
    """DDP against the mean of two batches in one process, over two steps: bookkeeping shows in the second."""
    model = adapted(family, form)
    reference, before = copy.deepcopy(model), packed_state(model)
    parallel = DistributedDataParallel(model)
    for _ in range(2):
        parallel.zero_grad()
        step(parallel, rank)
        assert_same(gradients(parallel), mean_gradients(reference))
    assert_same(packed_state(model), before)


def check_fsdp2(rank: int, family: str, form: str, checkpointing: bool) -> None:
    """FSDP2 under a bf16 policy against the mean of two batches through one bf16 model."""
    model = adapted(family, form)
    reference, before = copy.deepcopy(model), packed_state(model)
    for parameter in reference.parameters():  # not buffers: a policy leaves rotary frequencies as they are
        if parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert parameter.to_local().numel() * RANKS == parameter.numel(), name
    assert any(p.dtype == torch.uint8 for p in model.parameters())
    for _ in range(2):
        model.zero_grad()
        loss = step(model, rank)
        assert_same_bits(loss, step(reference, rank))
        assert_same(gradients(model), mean_gradients(reference))
    assert_same(packed_state(model), before)


CASES: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {
    f"ddp-{family}-{form}": (check_ddp, (family, form)) for family in FAMILIES for form in FORMS
} | {
    f"fsdp2-{family}-{form}{'-checkpointed' if c else ''}": (check_fsdp2, (family, form, c))
    for family in FAMILIES
    for form in FORMS
    for c in (False, True)
}


def _worker(rank: int, directory: str) -> None:
    for name, (check, args) in CASES.items():
        try:
            check(rank, *args)
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        Path(directory, f"{name}-{rank}").write_text(outcome)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file per case and process with what went wrong. One pair of processes: starting them takes the longest."""
    path = tmp_path_factory.mktemp("outcomes")
    run_ranks(_worker, path / "rendezvous", str(path))
    return path


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str, outcomes: Path) -> None:
    """Adapters get the gradients of the run in one process, bit for bit; packed bytes are sharded and unchanged.

    DDP runs without ``find_unused_parameters``: experts that no token chose have zero gradients, not none.
    """
    for rank in range(RANKS):
        assert (outcomes / f"{name}-{rank}").read_text() == ""


# -- ZeRO-3 -----------------------------------------------------------------------------------------------------------


class NoData(TorchDispatchMode):
    """Raises where an operation has a packed operand other than to alias it."""

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        operands = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        if any(a.dtype == torch.uint8 and a.numel() == 0 for a in operands):
            name = str(func)
            assert name in ("aten.detach.default", "aten.alias.default", "aten.view.dtype"), name
        return func(*args, **(kwargs or {}))


def partition(model: nn.Module) -> None:
    """Leaves every parameter empty, with the attributes that DeepSpeed gives it."""
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_tensor = parameter.data.flatten()[: -(-parameter.numel() // RANKS)].clone()
        parameter.data = torch.empty(0, dtype=parameter.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_partitioned_parameters(family: str, form: str) -> None:
    """Attaching adapters reads no data; their shapes and initial values are what they always are."""
    config = lora_config(target_modules=[])
    model = packed_and_float(family, form)[0]
    twin, values = copy.deepcopy(model), [(p, p.data) for p in model.parameters()]
    partition(model)
    adapters = []
    for each in (twin, model):
        torch.manual_seed(0)
        with NoData() if each is model else nullcontext():
            adapters.append(get_peft_model(each, config))
            adapters[-1].add_adapter("other", lora_config(target_modules=[], r=2))
    expected, actual = adapters
    assert_same(lora_tensors(actual), lora_tensors(expected))
    assert len(lora_tensors(actual)) == 16
    assert all(p.numel() for p in lora_tensors(actual).values())
    for parameter, data in values:  # DeepSpeed gathers them around each forward
        parameter.data = data
    for each in adapters:
        randomize(each)
    assert_same_bits(logits(actual), logits(expected))


def test_the_measure_sees_a_read() -> None:
    """The control: a copy of a partitioned tensor is noticed."""
    with NoData(), pytest.raises(AssertionError, match="clone"):
        torch.empty(0, dtype=torch.uint8).clone()
