"""What cannot be done raises one clear error before the model is changed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_qmoe import merge_adapter
from tests.support.lora import EXPERTS, FORMS, adapted_pair, logits, lora_config, packed_and_float, randomize
from tests.support.models import token_ids


@pytest.fixture(params=[(family, form) for family in ("qwen3_moe", "gpt_oss") for form in FORMS], ids="-".join)
def packed(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    """A packed model that is the same after the test: modules, training flags, logits."""
    model, _ = packed_and_float(*request.param)
    names, expected = [n for n, _ in model.named_modules()], logits(model)
    flags = [p.requires_grad for p in model.parameters()]
    yield model
    assert [n for n, _ in model.named_modules()] == names
    assert not any(isinstance(m, BaseTunerLayer) for m in model.modules())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(logits(model), expected)
    assert get_peft_model(model, lora_config(target_modules=["k_proj"])).unload() is model  # nothing is left behind


UNSUPPORTED: dict[str, tuple[dict[str, object], str]] = {
    "negative-dropout": ({"lora_dropout": -0.1}, "lora_dropout must be a probability"),
    "dropout-above-one": ({"lora_dropout": 1.5}, "lora_dropout must be a probability"),
    "dora": ({"use_dora": True}, "does not work with use_dora"),
    "lora-bias": ({"lora_bias": True, "init_lora_weights": True}, "does not work with lora_bias"),
    "fan-in-fan-out": ({"fan_in_fan_out": True}, "does not work with fan_in_fan_out"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' needs weights in full precision"),
    "pissa-niter": ({"init_lora_weights": "pissa_niter_4"}, "needs weights in full precision"),
    "olora": ({"init_lora_weights": "olora"}, "needs weights in full precision"),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, "needs weights in full precision"),
    "eva": ({"init_lora_weights": "eva"}, "needs weights in full precision"),
    "no-such-parameter": ({"target_parameters": ["experts.gate_up"]}, "match no parameter of the model"),
    "misspelt-path": ({"target_parameters": ["mlps.experts.gate_up_proj"]}, "match no parameter .*gate_up_proj"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_options(packed: PreTrainedModel, changes: dict[str, object], message: str) -> None:
    """Refused by `get_peft_model`, with the option and what to do; attention is not adapted alone in silence."""
    config = lora_config(**changes)
    with pytest.raises(ValueError, match=message):
        get_peft_model(packed, config)


def test_by_every_way_in(packed: PreTrainedModel) -> None:
    """PEFT's other entrances meet the same check."""
    for enter in (
        lambda c: inject_adapter_in_model(c, packed),
        lambda c: LoraModel(packed, c, "default"),
    ):
        with pytest.raises(ValueError, match="use_dora"):
            enter(lora_config(use_dora=True))
    packed.__dict__.pop("peft_config", None)


def test_variants_of_linears_alone_are_left_to_peft() -> None:
    """An option that experts cannot have is no business of ours while they are not adapted."""
    packed, _ = packed_and_float("qwen3_moe")
    model = get_peft_model(packed, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    assert torch.isfinite(logits(model)).all()


def test_second_adapter_that_is_refused_leaves_the_first() -> None:
    """`add_adapter` with an unsupported option: the first adapter works on."""
    ours, _ = adapted_pair("qwen3_moe")
    expected = logits(ours)
    with pytest.raises(ValueError, match="use_dora"):
        ours.add_adapter("other", lora_config(use_dora=True))
    assert list(ours.peft_config) == ["default"]
    assert torch.equal(logits(ours), expected)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A saved adapter of packed qwen3_moe experts."""
    ours, _ = adapted_pair("qwen3_moe")
    ours.save_pretrained(tmp_path)
    return tmp_path


def edit(adapter: Path, **changes: object) -> None:
    """Changes fields of an adapter's config."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_adapter_of_peft_0_18(adapter: Path) -> None:
    """Before 0.19 PEFT had the axes of untransposed experts swapped."""
    edit(adapter, peft_version="0.18.1")
    packed, _ = packed_and_float("qwen3_moe")
    before = [n for n, _ in packed.named_modules()]
    with pytest.raises(ValueError, match=r"PEFT 0\.18\.1.*wrong way round"):
        PeftModel.from_pretrained(packed, adapter)
    assert [n for n, _ in packed.named_modules()] == before


def test_adapter_of_peft_0_18_for_transposed_experts(tmp_path: Path) -> None:
    """Those were right."""
    ours, _ = adapted_pair("gpt_oss")
    ours.save_pretrained(tmp_path)
    edit(tmp_path, peft_version="0.18.1")
    loaded = PeftModel.from_pretrained(packed_and_float("gpt_oss")[0], tmp_path)
    assert torch.equal(logits(loaded), logits(ours))


MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "rank": ({"r": 5}, "size mismatch for .*lora_A"),
    "targets": ({"target_modules": ["q_proj", "v_proj"]}, r"it lacks 4 tensors \(.*v_proj"),
    "fewer-targets": ({"target_parameters": list(EXPERTS[:1])}, "does not fit this model"),
}


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS)
def test_adapter_whose_tensors_do_not_fit(
    packed: PreTrainedModel, adapter: Path, changes: dict[str, object], message: str
) -> None:
    """Another rank or other targets than its config says, of the same or another architecture."""
    edit(adapter, **changes)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(packed, adapter)


def drop_one(adapter: Path) -> None:
    """Takes a tensor out of the file."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[next(key for key in tensors if ".experts." in key)]
    save_file(tensors, file)


def cut_short(adapter: Path) -> None:
    """Leaves half of the file."""
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


BROKEN = {
    "missing-tensor": drop_one,
    "truncated": cut_short,
    "no-file": lambda a: (a / "adapter_model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("changes", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=["head", "biases"])
@pytest.mark.parametrize("form", FORMS)
def test_broken_adapter_that_trains_more_than_factors(
    form: str, changes: dict[str, object], damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """Heads and biases of an adapter that is refused are not left in the model, new, first or second."""
    source, _ = adapted_pair("gpt_oss", form, config=lambda: lora_config(**changes))
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.3)
    source.save_pretrained(tmp_path)
    damage(tmp_path)
    packed, _ = packed_and_float("gpt_oss", form)
    names, expected = [n for n, _ in packed.named_modules()], logits(packed)
    for _ in range(2):
        with pytest.raises((ValueError, OSError, SafetensorError)):
            PeftModel.from_pretrained(packed, tmp_path)
        assert [n for n, _ in packed.named_modules()] == names
        assert torch.equal(logits(packed), expected)
    ours = get_peft_model(packed, lora_config(**changes))
    randomize(ours)
    expected = logits(ours)
    for name in ("default", "other"):
        with pytest.raises((ValueError, OSError, SafetensorError)):
            ours.load_adapter(tmp_path, name)
        assert list(ours.peft_config) == ["default"]
        assert torch.equal(logits(ours), expected)


FAILS_HALF_WAY: dict[str, dict[str, object]] = {
    "dropout-on-a-float-parameter": {"lora_dropout": 0.1, "target_parameters": [*EXPERTS, "lm_head.weight"]},
    "rank-0-by-pattern": {"rank_pattern": {"down_proj": 0}},
    "dropout-is-text": {"lora_dropout": "0.1"},
}


@pytest.mark.parametrize("changes", FAILS_HALF_WAY.values(), ids=FAILS_HALF_WAY)
def test_an_error_of_peft_half_way(packed: PreTrainedModel, changes: dict[str, object]) -> None:
    """What PEFT itself finds out when modules are wrapped already leaves none of them wrapped."""
    with pytest.raises(ValueError, match=r"lora_dropout|positive integer"):
        get_peft_model(packed, lora_config(**changes))


def test_adapter_of_peft_0_18_over_one_that_is_there(adapter: Path) -> None:
    """PEFT does not look at the file's config then; its axes are looked at all the same."""
    ours, _ = adapted_pair("qwen3_moe")
    expected = logits(ours)
    edit(adapter, peft_version="0.18.1")
    with pytest.raises(ValueError, match="wrong way round"):
        ours.load_adapter(adapter, "default")
    assert torch.equal(logits(ours), expected)


def test_adapter_of_a_deeper_model(packed: PreTrainedModel, tmp_path: Path) -> None:
    """Tensors of layers that the model does not have are not dropped in silence."""
    ours, _ = adapted_pair("qwen3_moe", num_hidden_layers=3)
    ours.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no place for 6 tensors \(.*layers\.2"):
        PeftModel.from_pretrained(packed, tmp_path)


@pytest.mark.parametrize("changes", [{"r": 5}, {"target_modules": ["q_proj", "v_proj"]}], ids=["rank", "targets"])
def test_second_adapter_that_does_not_fit(adapter: Path, changes: dict[str, object]) -> None:
    """`load_adapter` removes it again, and the first works on; loading over the first keeps that one's tensors."""
    ours, _ = adapted_pair("qwen3_moe")
    expected = logits(ours)
    edit(adapter, **changes)
    with pytest.raises(ValueError, match="does not fit this model"):
        ours.load_adapter(adapter, "other")
    assert list(ours.peft_config) == ["default"]
    assert not any(".other." in name for name, _ in ours.named_parameters())
    wrong, _ = adapted_pair("qwen3_moe", config=lambda: lora_config(r=5))
    wrong.save_pretrained(adapter / "wrong")
    with pytest.raises(ValueError, match="does not fit this model"):
        ours.load_adapter(adapter / "wrong", "default")
    assert torch.equal(logits(ours), expected)


# -- forward and merge ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_mixed_batches(form: str) -> None:
    """Rows that are routed by expert cannot have an adapter each."""
    ours, _ = adapted_pair("qwen3_moe", form)
    ours.eval()
    with pytest.raises(ValueError, match="mixed adapter batches"), torch.no_grad():
        ours(input_ids=token_ids(), adapter_names=["default", "__base__"])


def test_merging_what_is_not_packed_or_merged_already() -> None:
    """`hf_qmoe.merge_adapter` says so."""
    ours, stock = adapted_pair("qwen3_moe")
    with pytest.raises(ValueError, match="no adapters on packed experts"):
        merge_adapter(stock, requantize=True)
    merge_adapter(ours, requantize=True)
    expected = logits(ours)
    with pytest.raises(ValueError, match="default are merged already"):
        merge_adapter(ours, requantize=True)
    assert torch.equal(logits(ours), expected)


def test_a_merge_that_is_not_finite_changes_nothing() -> None:
    """``safe_merge`` looks before it writes."""
    ours, _ = adapted_pair("qwen3_moe")
    broken = next(p for n, p in ours.named_parameters() if ".experts.lora_B" in n)
    kept: Tensor = broken.detach().clone()
    expected = logits(ours)
    broken.data[0, 0] = float("inf")
    for merge in (
        lambda: ours.base_model.model.model.layers[0].mlp.experts.merge(safe_merge=True),
        lambda: ours.base_model.model.model.layers[0].mlp.experts.merge(requantize=True),
    ):
        with pytest.raises(ValueError, match="NaNs detected in the merged weights: down_proj, expert 0"):
            merge()
    broken.data.copy_(kept)
    assert torch.equal(logits(ours), expected)


# -- where the weights are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_offloaded_experts_are_not_adapted(form: str) -> None:
    """PEFT would leave factors without values; the model works on."""
    packed, _ = packed_and_float("qwen3_moe", form)
    expected = logits(packed)
    cpu_offload(packed, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="is offloaded"):
        get_peft_model(packed, lora_config(target_modules=[]))
    assert torch.equal(logits(packed), expected)


@pytest.mark.parametrize("form", FORMS)
def test_offloaded_adapter(form: str) -> None:
    """A whole adapted model that is offloaded answers as before, also after an error; training it is refused."""
    ours, _ = adapted_pair("qwen3_moe", form)
    expected = logits(ours)
    cpu_offload(ours, execution_device=torch.device("cpu"))
    assert torch.equal(logits(ours), expected)
    assert all(parameter.is_meta for name, parameter in ours.named_parameters() if "lora_" in name)
    with pytest.raises(RuntimeError, match="serve inference only"):
        ours(input_ids=token_ids())
    assert torch.equal(logits(ours), expected)
