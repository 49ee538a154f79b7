"""Merging adapters into packed experts in memory: what becomes of weights, model, and everything not merged."""

import copy
import io
import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

import hf_qmoe
from hf_qmoe import ExpertsNbit
from hf_qmoe.lora import hooks
from hf_qmoe.lora.packed import packed_modules, packed_parameter
from hf_qmoe.parametrize import parametrize_experts
from tests.support.checkpoints import tensors_on_disk
from tests.support.lora import (
    FORMS,
    TARGETS,
    logits,
    lora_config,
    lora_tensors,
    loss_and_gradients,
    randomize,
    relative_error,
)
from tests.support.merged import (
    CASES,
    LargestTensors,
    adapt,
    adapted_model,
    assert_state,
    exact_sums,
    experts_config,
    hook_counts,
    kinds,
    merge_adapter,
    merge_and_unload,
    packed_model,
    quietly,
    reload,
    state,
    wrappers,
)
from tests.support.models import token_ids
from tests.support.oracle import assert_same_bits


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
STORAGES = {
    "nf4": {},
    "nf4-double": {"experts_double_quant": True},
    "int8": {"experts_quant_type": "int8"},
    "bf16": {"experts_quant_type": "bf16"},
}
LAYER_0, LAYER_1 = (f"model.layers.{i}.mlp.experts" for i in range(2))
forms = pytest.mark.parametrize("form", FORMS)
cases = pytest.mark.parametrize("case", CASES)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
storages = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
all_storages_in_both_forms = pytest.mark.parametrize(
    ("form", "storage"), [pytest.param(f, s, id=f"{f}-{n}") for f in FORMS for n, s in STORAGES.items()]
)


def experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold stacks of experts' weights, packed or not, by name."""
    return {
        n: m for n, m in model.named_modules() if hasattr(m, "is_transposed") and not isinstance(m, BaseTunerLayer)
    }


# -- merge_and_unload -----------------------------------------------------------------------------------------------


@dtypes
@cases
@forms
def test_result_is_an_ordinary_model(form: str, case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits of the adapted model; modules, classes, parameters and checkpoint of a float one."""
    twin = CASES[case].build(dtype)
    model = packed_model(case, form, dtype)
    base = logits(model)
    adapted = adapt(model, case)
    expected = logits(adapted)
    merged = merge_and_unload(adapted)
    assert merged is model
    assert hook_counts(merged) == hook_counts(twin)
    actual = logits(merged)
    assert relative_error(actual, expected) < TOLERANCE[dtype]
    assert relative_error(actual, base) > 0.02
    assert kinds(merged) == kinds(twin)
    assert all(type(m) is type(twin.get_submodule(n)) for n, m in merged.named_modules())
    layout = {n: (p.shape, p.dtype, p.is_contiguous()) for n, p in merged.named_parameters()}
    assert layout == {n: (p.shape, p.dtype, p.is_contiguous()) for n, p in twin.named_parameters()}
    if form == "nbit":
        assert list(layout) == [n for n, _ in twin.named_parameters()]
    assert not hasattr(merged, "hf_quantizer")
    assert not hasattr(merged.config, "quantization_config")
    assert merged.num_parameters() == twin.num_parameters()

    nested = {}
    for name, plain in (("merged", merged), ("twin", twin)):
        plain.save_pretrained(tmp_path / name)
        again = get_peft_model(copy.deepcopy(plain), experts_config(case))
        nested[name] = [n for n, _ in again.named_modules()]
    assert nested["merged"] == nested["twin"]
    saved, wanted = (tensors_on_disk(tmp_path / name) for name in ("merged", "twin"))
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config == json.loads((tmp_path / "twin" / "config.json").read_text())
    reloaded = reload(tmp_path / "merged")
    assert torch.equal(logits(reloaded), actual)


@all_storages_in_both_forms
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_beside_quantized_linears(form: str, storage: dict[str, object], case: str, tmp_path: Path) -> None:
    """Attention stays 4-bit; the config names the experts that are float now, and the model saves and reloads."""
    adapted = adapted_model(case, form, torch.bfloat16, quantize_linears=True, **storage)
    expected = logits(adapted)
    merged = merge_and_unload(adapted)
    actual = logits(merged)
    assert relative_error(actual, expected) < 0.3  # of attention's update 4 bits keep little
    assert any(isinstance(m, Linear4bit) for m in merged.modules())
    assert not any(True for _ in packed_modules(merged))
    assert merged.config.quantization_config.modules_to_not_convert == [LAYER_0, LAYER_1]
    merged.save_pretrained(tmp_path)
    reloaded = reload(tmp_path)
    assert torch.equal(logits(reloaded), actual)
    assert kinds(reloaded) == kinds(merged)
    assert torch.equal(logits(reloaded.dequantize()), logits(merged.dequantize()))


@pytest.mark.parametrize("targets", [TARGETS["gate_up"], TARGETS["down"]], ids=["gate_up", "down"])
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_one_projection_adapted(form: str, case: str, targets: list[str], tmp_path: Path) -> None:
    """The module becomes float as a whole; the other projection keeps its values."""
    model = packed_model(case, form)
    other = "down_proj" if "gate_up" in targets[0] else "gate_up_proj"
    dequantized = getattr(copy.deepcopy(model).dequantize().get_submodule(LAYER_1), other)
    adapted = adapt(model, case, target_parameters=targets)
    expected = logits(adapted)
    merged = merge_and_unload(adapted)
    assert relative_error(logits(merged), expected) < 1e-5
    assert torch.equal(getattr(merged.get_submodule(LAYER_1), other), dequantized)
    twin = CASES[case].build(torch.float32)
    assert kinds(merged) == kinds(twin)
    assert not any(p.requires_grad for p in merged.get_submodule(LAYER_0).parameters() if p.ndim == 3)
    names = [n for n, _ in merged.get_submodule(LAYER_0).named_parameters() if not n.endswith("bias")]
    assert names == ["gate_up_proj", "down_proj"]
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(tmp_path)), logits(merged))


@pytest.mark.parametrize("linears", [True, False], ids=["linears", "experts-alone"])
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "mixtral"])
@forms
def test_one_layer_adapted(form: str, case: str, linears: bool, tmp_path: Path) -> None:
    """Other layers stay packed, byte for byte, and the model of both kinds saves and reloads, and merges again."""
    model = packed_model(case, form, quantize_linears=linears)
    before = {n: t for n, t in state(model).items() if n.startswith(LAYER_0)}
    targets = [f"{LAYER_1}.{name.rpartition('.')[2]}" for name in CASES[case].experts]
    adapted = adapt(model, case, target_parameters=targets, target_modules=[])
    expected = logits(adapted)
    merged = merge_and_unload(adapted)
    actual = logits(merged)
    assert relative_error(actual, expected) < 1e-5
    after = {n: t for n, t in state(merged).items() if n.startswith(LAYER_0)}
    assert list(after) == list(before)
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert merged.config.quantization_config.modules_to_not_convert == [LAYER_1]
    merged.save_pretrained(tmp_path / "once")
    reloaded = reload(tmp_path / "once")
    assert torch.equal(logits(reloaded), actual)
    assert_same_bits(logits(copy.deepcopy(reloaded).dequantize()), logits(copy.deepcopy(merged).dequantize()))

    for number, partly in enumerate((merged, reloaded)):
        again = adapt(partly, case, target_modules=[])
        expected = logits(again)
        finished = merge_and_unload(again)
        assert relative_error(logits(finished), expected) < 1e-5
        assert not any(True for _ in packed_modules(finished))
        assert hasattr(finished, "hf_quantizer") == linears
        finished.save_pretrained(tmp_path / str(number))
        assert torch.equal(logits(reload(tmp_path / str(number))), logits(finished))


@forms
def test_merged_checkpoint_has_the_original_layout(form: str, tmp_path: Path) -> None:
    """From a packed checkpoint on disk, adapted and merged: tensors per expert, under the names they came with."""
    CASES["mixtral"].build(torch.bfloat16).save_pretrained(tmp_path / "float")
    packed_model("mixtral", form, torch.bfloat16).save_pretrained(tmp_path / "packed")
    adapted = adapt(reload(tmp_path / "packed"), "mixtral")
    merged = merge_and_unload(adapted)
    merged.save_pretrained(tmp_path / "merged")
    original, saved = (tensors_on_disk(tmp_path / name) for name in ("float", "merged"))
    assert saved.keys() == original.keys()
    assert any(".experts.3.w2.weight" in name for name in saved)
    assert torch.equal(logits(reload(tmp_path / "merged")), logits(merged))


@forms
def test_unload_gives_the_base_back(form: str) -> None:
    """Without merging, or after unmerging: the packed model, bit for bit."""
    model = packed_model("gpt_oss", form)
    before, classes, expected = state(model), kinds(model), logits(model)
    adapted = adapt(model, "gpt_oss", target_modules=[])
    merge_adapter(adapted)
    adapted.unmerge_adapter()
    base = adapted.unload()
    assert base is model
    assert kinds(base) == classes
    assert torch.equal(logits(base), expected)
    assert_state(base, before)


@forms
def test_unload_of_a_merged_model_keeps_the_merge(form: str) -> None:
    """As stock PEFT: `unload` takes the wrappers off and leaves weights as they are."""
    adapted = adapted_model("qwen3_moe", form)
    merge_adapter(adapted)
    expected = logits(adapted)
    base = adapted.unload()
    assert torch.equal(logits(base), expected)
    assert not any(True for _ in packed_modules(base))
    assert not hasattr(base.config, "quantization_config")


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@all_storages_in_both_forms
def test_one_rounding(form: str, storage: dict[str, object], case: str) -> None:
    """Each merged weight is the sum in float32, rounded once, whichever projection comes first."""
    adapted = adapted_model(case, form, torch.bfloat16, **storage)
    sums = exact_sums(adapted)
    assert len(sums) == 4
    merged = merge_and_unload(adapted)
    for (path, name), total in sums.items():
        assert_same_bits(getattr(merged.get_submodule(path), name).detach(), total.to(torch.bfloat16))


@forms
def test_one_rounding_of_two_adapters_at_once(form: str) -> None:
    """Their updates are added in float32 before the sum is rounded."""
    adapted = adapted_model("qwen3_moe", form, torch.bfloat16)
    adapted.add_adapter("other", lora_config(r=2))
    randomize(adapted, seed=5)
    sums = exact_sums(adapted, ("default", "other"))
    merged = merge_and_unload(adapted, adapter_names=["default", "other"])
    for (path, name), total in sums.items():
        actual = getattr(merged.get_submodule(path), name).detach()
        differing = (actual != total.to(torch.bfloat16)).float().mean()  # the order of two float32 additions
        assert differing < 1e-3


MIXED = {"fp32-model": ("fp32", None), "fp16-products": ("bf16", "float16"), "prepared": ("bf16", None)}


@pytest.mark.parametrize("unload", [False, True], ids=["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize(("model_dtype", "compute_dtype"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_products_of_another_dtype_than_the_model(
    form: str, case: str, model_dtype: str, compute_dtype: str | None, unload: bool, request: pytest.FixtureRequest
) -> None:
    """Packed experts cast their input, float ones do not: they get the model's dtype, in one rounding."""
    model = packed_model(case, form, DTYPES[model_dtype], bnb_4bit_compute_dtype=compute_dtype or "bfloat16")
    if "prepared" in request.node.callspec.id:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapted = adapt(model, case, target_modules=[])
    before, expected, sums = state(adapted), logits(adapted), exact_sums(adapted)
    if not unload:
        merge_adapter(adapted)
        assert relative_error(logits(adapted), expected) < 0.1
        adapted.unmerge_adapter()
        assert_state(adapted, before)
        assert torch.equal(logits(adapted), expected)
        return
    merged = merge_and_unload(adapted)
    assert relative_error(logits(merged), expected) < 0.1
    for (path, name), total in sums.items():
        assert_same_bits(getattr(merged.get_submodule(path), name).detach(), total.to(model.dtype))


@pytest.mark.parametrize("targets", [TARGETS["gate_up"], TARGETS["down"]], ids=["gate_up", "down"])
@forms
def test_one_projection_in_a_model_of_another_dtype(form: str, targets: list[str]) -> None:
    """The projection that was not adapted gets the model's dtype too."""
    model = packed_model(form=form, bnb_4bit_compute_dtype="bfloat16")
    adapted = adapt(model, target_modules=[], target_parameters=targets)
    expected = logits(adapted)
    merged = merge_and_unload(adapted)
    assert relative_error(logits(merged), expected) < 0.1
    assert {p.dtype for p in merged.parameters()} == {torch.float32}


# -- merge_adapter and back -----------------------------------------------------------------------------------------


def restore_linears(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Puts the query projections back: PEFT adds and subtracts there, which is not exact, as it is for experts."""
    for name, tensor in model.state_dict().items():
        if name.endswith("q_proj.base_layer.weight"):
            torch.testing.assert_close(tensor, before[name], rtol=1e-2, atol=1e-2)
            tensor.copy_(before[name])


@dtypes
@cases
@forms
def test_there_and_back(form: str, case: str, dtype: torch.dtype) -> None:
    """Three times: merged logits are the adapted ones; unmerged, every tensor, class, logit and gradient is back."""
    adapted = adapted_model(case, form, dtype)
    before, classes, expected = state(adapted), kinds(adapted), logits(adapted)
    trainable = {n: p.requires_grad for n, p in adapted.named_parameters()}
    loss, gradients = loss_and_gradients(adapted)
    hook_numbers = hook_counts(adapted)
    for _ in range(3):
        merge_adapter(adapted)
        assert relative_error(logits(adapted), expected) < TOLERANCE[dtype]
        assert not any(True for _ in packed_modules(adapted))
        assert all(p.requires_grad == ("lora_" in n) for n, p in adapted.named_parameters())
        adapted.unmerge_adapter()
        assert kinds(adapted) == classes
        assert hook_counts(adapted) == hook_numbers
        assert {n: p.requires_grad for n, p in adapted.named_parameters()} == trainable
    restore_linears(adapted, before)
    assert_state(adapted, before)
    assert torch.equal(logits(adapted), expected)
    again, repeated = loss_and_gradients(adapted)
    assert torch.equal(again, loss)
    assert all(torch.equal(repeated[name], gradients[name]) for name in gradients)


@all_storages_in_both_forms
def test_there_and_back_of_every_storage(form: str, storage: dict[str, object]) -> None:
    """Scales, nested ones too, and metadata come back."""
    adapted = adapt(packed_model("gpt_oss", form, torch.bfloat16, **storage), "gpt_oss", target_modules=[])
    before, expected = state(adapted), logits(adapted)
    merge_adapter(adapted)
    assert relative_error(logits(adapted), expected) < 0.05
    adapted.unmerge_adapter()
    assert_state(adapted, before)
    assert torch.equal(logits(adapted), expected)


def experts_alone(form: str, case: str = "qwen3_moe", **options: object) -> PeftModel:
    """An adapted model whose attention is not, so that everything about it is exact."""
    return adapt(packed_model(case, form, **options), case, target_modules=[])


def gradients_of(model: PeftModel) -> dict[str, Tensor]:
    """Gradients of the factors that have one: those that are not merged."""
    ids = token_ids()
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {n: p.grad.clone() for n, p in lora_tensors(model).items() if p.grad is not None}
    assert len(found) == 2 * sum(not wrapper.merged for wrapper in wrappers(model))
    return found


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("first", [0, 1], ids=["outer-first", "inner-first"])
@forms
def test_one_of_two_wrappers(form: str, first: int, case: str) -> None:
    """Merged one after the other and unmerged in either order: logits stay, and the bytes come back at the end."""
    adapted = experts_alone(form, case)
    before, classes, expected = state(adapted), kinds(adapted), logits(adapted)
    loss, gradients = loss_and_gradients(adapted)
    pairs = list(zip(wrappers(adapted)[::2], wrappers(adapted)[1::2], strict=True))
    for merged_first in (0, 1):
        for pair in pairs:
            pair[merged_first].merge()
        assert relative_error(logits(adapted), expected) < 1e-5
        for pair in pairs:
            pair[1 - merged_first].merge()
        assert relative_error(logits(adapted), expected) < 1e-5
        for pair in pairs:
            pair[first].unmerge()
        assert relative_error(logits(adapted), expected) < 1e-5
        for name, gradient in gradients_of(adapted).items():
            assert relative_error(gradient, gradients[name]) < 1e-4
        for pair in pairs:
            pair[1 - first].unmerge()
        assert kinds(adapted) == classes
        assert_state(adapted, before)
        assert torch.equal(logits(adapted), expected)
    assert torch.equal(loss_and_gradients(adapted)[0], loss)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_adapters_merged_one_after_the_other(form: str, case: str) -> None:
    """A, then B on top: as both active; unmerging takes both away, and either can be merged alone then."""
    adapted = experts_alone(form, case)
    adapted.add_adapter("other", experts_config(case, r=2, target_modules=[]))
    randomize(adapted, seed=5)
    before = state(adapted)
    expected = {}
    for names in (["default"], ["other"], ["default", "other"]):
        adapted.base_model.set_adapter(names)
        expected[len(expected)] = logits(adapted)
    adapted.set_adapter("default")
    merge_adapter(adapted)
    assert relative_error(logits(adapted), expected[0]) < 1e-5
    with pytest.warns(UserWarning, match="You are now additionally merging other"):
        adapted.merge_adapter(["other"])
    assert relative_error(logits(adapted), expected[2]) < 1e-5
    adapted.unmerge_adapter()
    assert_state(adapted, before)
    assert torch.equal(logits(adapted), expected[0])
    merge_adapter(adapted, ["default"])
    assert relative_error(logits(adapted), expected[0]) < 1e-5
    adapted.unmerge_adapter()
    merge_adapter(adapted, adapter_names=["other", "default"])
    assert relative_error(logits(adapted), expected[2]) < 1e-5
    adapted.unmerge_adapter()
    assert_state(adapted, before)
    merged = merge_and_unload(adapted, adapter_names=["default"])
    assert relative_error(logits(merged), expected[0]) < 1e-5


@pytest.mark.parametrize("change", ["set_adapter", "add_adapter"])
@forms
def test_changing_adapters_unmerges(form: str, change: str) -> None:
    """PEFT unmerges, with a warning, before it sets or adds an adapter, and refuses to delete a merged one."""
    adapted = experts_alone(form)
    if change == "set_adapter":
        adapted.add_adapter("other", experts_config(target_modules=[]))
    before, expected = state(adapted), logits(adapted)
    merge_adapter(adapted)
    with pytest.raises(ValueError, match="while they are merged"):
        adapted.delete_adapter("default")
    changes = {
        "set_adapter": lambda: adapted.set_adapter("other"),
        "add_adapter": lambda: adapted.add_adapter("other", experts_config(target_modules=[])),
    }
    with pytest.warns(UserWarning, match="Unmerging the model first"):
        changes[change]()
    assert_state(adapted, before)
    adapted.set_adapter("default")
    assert torch.equal(logits(adapted), expected)


@forms
def test_merging_twice_changes_nothing(form: str) -> None:
    """PEFT's warning, and weights as they were; the same where there is nothing to unmerge."""
    adapted = experts_alone(form)
    with pytest.warns(UserWarning, match="Already unmerged"):
        adapted.unmerge_adapter()
    merge_adapter(adapted)
    merged, expected = state(adapted), logits(adapted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted.merge_adapter()
    assert {str(w.message) for w in caught} == {"All adapters are already merged, nothing to do."}
    assert_state(adapted, merged)
    assert torch.equal(logits(adapted), expected)


@forms
def test_disabling_adapters_unmerges(form: str) -> None:
    """As stock PEFT: within `disable_adapter` it is the base model, bit for bit, and after it nothing is merged."""
    model = packed_model("gpt_oss", form)
    base = logits(model)
    adapted = adapt(model, "gpt_oss", target_modules=[])
    before, expected = state(adapted), logits(adapted)
    merge_adapter(adapted)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), base)
    assert_state(adapted, before)
    assert torch.equal(logits(adapted), expected)


@forms
def test_dropout_beside_a_merged_projection(form: str) -> None:
    """Float experts cannot drop out the input of an adapter: an error in training, never silence; eval works."""
    adapted = adapt(packed_model(form=form), target_modules=[], lora_dropout=0.5)
    expected = logits(adapted)
    wrappers(adapted)[0].merge()
    assert relative_error(logits(adapted), expected) < 1e-5
    adapted.train()
    if form == "parametrize":  # the other projection is packed still
        assert relative_error(logits(adapted), logits(adapted)) > 1e-3
        return
    with pytest.raises(RuntimeError, match="unmerge_adapter"):
        logits(adapted)
    wrappers(adapted)[0].unmerge()
    assert relative_error(logits(adapted), logits(adapted)) > 1e-3


def clones(model: nn.Module, way: str) -> nn.Module:
    """A copy, by `copy.deepcopy`, pickle or `torch.save`."""
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_copies_of_a_merged_model(form: str, case: str, way: str) -> None:
    """A copy is merged too, can be unmerged to the bit, and leaves the original merged."""
    adapted = experts_alone(form, case, experts_double_quant=True)
    before, packed_logits, gradients = state(adapted), logits(adapted), gradients_of(adapted)
    merge_adapter(adapted)
    merged, merged_logits = state(adapted), logits(adapted)
    twin = clones(adapted, way)
    assert_state(twin, merged)
    assert torch.equal(logits(twin), merged_logits)
    twin.unmerge_adapter()
    assert_state(twin, before)
    assert torch.equal(logits(twin), packed_logits)
    assert all(torch.equal(g, gradients[n]) for n, g in gradients_of(twin).items())
    assert_state(adapted, merged)
    adapted.unmerge_adapter()
    assert_state(adapted, before)
    again = clones(adapted, way)
    merge_adapter(again)
    assert_state(again, merged)
    assert_state(adapted, before)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16)], ids=["half", "to-bf16"])
@forms
def test_casting_a_merged_model(form: str, cast: Callable[[nn.Module], nn.Module]) -> None:
    """Merged weights follow a cast; unmerged, packed bytes and scales are those of before, as if cast packed."""
    adapted, other = (experts_alone(form) for _ in range(2))
    packed = {n: t for n, t in state(adapted).items() if not t.is_floating_point()}
    merge_adapter(adapted)
    cast(adapted)
    assert torch.isfinite(logits(adapted)).all()
    adapted.unmerge_adapter()
    after = state(adapted)
    assert all(torch.equal(after[n], t) for n, t in packed.items())
    assert torch.equal(logits(adapted), logits(cast(other)))


def test_casting_a_weight_that_follows_casts() -> None:
    """A weight that was packed without a compute dtype has that of its module, whatever happened while merged."""
    from tests.support.parametrized import Experts

    model = nn.ModuleDict({"experts": Experts()})
    parametrize_experts(model["experts"], "weight")
    adapted = get_peft_model(model, lora_config(target_modules=[], target_parameters=["experts.weight"]))
    randomize(adapted)
    wrapper = adapted.base_model.model["experts"]
    wrapper.merge()
    adapted.half()
    assert wrapper.get_base_layer().weight.dtype == torch.float16
    wrapper.unmerge()
    assert wrapper.get_base_layer().weight.dtype == torch.float16
    assert wrapper(torch.ones(2, 64, dtype=torch.float16)).dtype == torch.float16


# -- safe_merge -----------------------------------------------------------------------------------------------------


BROKEN = {"inf": (float("inf"), torch.float32), "nan": (float("nan"), torch.float32), "fp16": (3e5, torch.float16)}


@pytest.mark.parametrize(("value", "dtype"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_safe_merge(form: str, case: str, value: float, dtype: torch.dtype) -> None:
    """A sum that is not finite in the weights' dtype: an error, and the whole model as it was."""
    adapted = adapt(packed_model(case, form, dtype), case)
    last = wrappers(adapted)[-1]
    last.lora_B["default"].weight.data[0, -1] = value
    last.lora_A["default"].weight.data.fill_(1)
    before, classes = state(adapted), kinds(adapted)
    for merge in (
        lambda: hf_qmoe.merge_adapter(adapted, safe_merge=True),
        lambda: adapted.merge_adapter(safe_merge=True),
        lambda: adapted.merge_and_unload(safe_merge=True),
        lambda: hf_qmoe.merge_adapter(adapted, safe_merge=True, requantize=True),
        lambda: last.merge(safe_merge=True),
    ):
        with quietly(), pytest.raises(ValueError, match=r"NaNs detected in the merged weights: \w+, expert 3"):
            merge()
        assert not any(m.merged for m in adapted.modules() if isinstance(m, BaseTunerLayer))
        assert kinds(adapted) == classes
        assert_state(adapted, before)


@forms
def test_unmerging_after_a_failed_merge(form: str) -> None:
    """Where a layer of PEFT's own fails, after experts were merged, `unmerge_adapter` brings those back."""
    adapted = adapted_model(form=form)
    before, expected = state(adapted), logits(adapted)
    linears = {n: m for n, m in adapted.named_modules() if isinstance(m, BaseTunerLayer) and n.endswith("q_proj")}
    broken = list(linears.values())[-1].lora_B["default"].weight
    kept = broken.detach().clone()
    broken.data.fill_(float("nan"))
    with quietly(), pytest.raises(ValueError, match="NaNs detected"):
        adapted.merge_adapter(safe_merge=True)
    assert sum(wrapper.merged for wrapper in wrappers(adapted)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that are not merged
        adapted.unmerge_adapter()
    broken.data.copy_(kept)
    restore_linears(adapted, before)
    assert_state(adapted, before)
    assert torch.equal(logits(adapted), expected)


def test_experts_without_a_float_class() -> None:
    """`ExpertsNbit` that was not made from a model's module has nothing to become: an error, nothing changed."""
    bare = ExpertsNbit.from_float(0.2 * torch.randn(4, 192, 64), 0.2 * torch.randn(4, 64, 96), quant_type="int8")
    model = nn.ModuleDict({"experts": bare})
    adapted = get_peft_model(model, lora_config(target_modules=[]))
    randomize(adapted)
    before = state(adapted)
    with quietly(), pytest.raises(TypeError, match="has a float class to return to"):
        adapted.merge_adapter()
    assert_state(adapted, before)
    assert not any(wrapper.merged for wrapper in wrappers(adapted))
    assert all(error < 0.2 for error in hf_qmoe.merge_adapter(adapted, requantize=True).values())
    adapted.unmerge_adapter()
    assert_state(adapted, before)


# -- requantize -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@all_storages_in_both_forms
def test_requantize(form: str, storage: dict[str, object], case: str, tmp_path: Path) -> None:
    """Errors are what the stacks before and after say; the format stays; saved, reloaded, and unmerged to the bit."""
    adapted = experts_alone(form, case, **storage)
    before, classes, expected = state(adapted), kinds(adapted), logits(adapted)
    stacks, sums = dequantized(adapted), exact_sums(adapted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = hf_qmoe.merge_adapter(adapted, requantize=True)
    assert set(errors) == {f"{path}.{name}" for path, name in sums}
    twin = CASES[case].build(torch.float32)
    assert all(twin.get_parameter(name) is not None for name in errors)
    for (path, name), weight in dequantized(adapted).items():
        wanted = sums[path, name].double() - stacks[path, name].double()
        error = relative_error(weight.double() - stacks[path, name].double(), wanted)
        assert errors[f"{path}.{name}"] == pytest.approx(error, rel=1e-3)
        assert error > 0.15 if "experts_quant_type" not in storage else error < 0.15
    assert kinds(adapted) == classes
    merged = state(adapted)
    assert {n: (t.shape, t.dtype) for n, t in merged.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    assert all(torch.equal(merged[n], t) for n, t in before.items() if n.endswith("quant_metadata"))
    assert not all(torch.equal(merged[n], t) for n, t in before.items())
    if "experts_quant_type" in storage:
        assert relative_error(logits(adapted), expected) < 0.15

    twin = copy.deepcopy(adapted)
    adapted.unmerge_adapter()
    assert_state(adapted, before)
    assert torch.equal(logits(adapted), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unloaded = twin.merge_and_unload()
    assert [n.removeprefix("base_model.model.").replace("base_layer.", "") for n in merged] == list(state(unloaded))
    assert unloaded.config.quantization_config.modules_to_not_convert is None
    unloaded.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(tmp_path)), logits(unloaded))


def test_four_bits_do_not_hold_small_updates() -> None:
    """At the size that training gives updates, 4 bits keep nothing of them; 16 bits keep most."""
    for quant_type, bounds in {"nf4": (0.9, 1.3), "bf16": (0.0, 0.2)}.items():
        adapted = experts_alone("nbit", experts_quant_type=quant_type)
        randomize(adapted, std=0.02)
        errors = hf_qmoe.merge_adapter(adapted, requantize=True)
        assert all(bounds[0] < error < bounds[1] for error in errors.values())


def dequantized(model: PeftModel) -> dict[tuple[str, str], Tensor]:
    """Values of the packed parameters in the model's layout, fp32."""
    found = {}
    for path, module, names in packed_modules(model.base_model.model):
        for name in names:
            weight = packed_parameter(module, name).stack.dequantize(torch.float32)
            weight = weight.transpose(1, 2) if module.is_transposed else weight
            found[path.replace(".base_layer", ""), name] = weight
    return found


@forms
def test_requantized_and_float_merges_together(form: str) -> None:
    """A second adapter un-quantizes on top of a requantized one; one wrapper each way; all of it comes back."""
    adapted = experts_alone(form, experts_quant_type="int8")
    adapted.add_adapter("other", experts_config(r=2, target_modules=[]))
    randomize(adapted, seed=5)
    before = state(adapted)
    adapted.base_model.set_adapter(["default", "other"])
    expected = logits(adapted)
    hf_qmoe.merge_adapter(adapted, ["default"], requantize=True)
    merge_adapter(adapted, ["other"])
    assert relative_error(logits(adapted), expected) < 0.05
    adapted.unmerge_adapter()
    assert_state(adapted, before)
    outer, inner = wrappers(adapted)[:2]
    for first, second in ((outer, inner), (inner, outer)):
        outer.merge(requantize=True)
        inner.merge()
        assert relative_error(logits(adapted), expected) < 0.05
        first.unmerge()
        assert relative_error(logits(adapted), expected) < 0.05
        second.unmerge()
        assert_state(adapted, before)
        assert torch.equal(logits(adapted), expected)


def test_nothing_to_requantize_beside_a_float_merge() -> None:
    """A projection that another one's merge has un-quantized cannot be requantized: said, and nothing changed."""
    adapted = experts_alone("nbit")
    outer, inner = wrappers(adapted)[:2]
    inner.merge()
    merged = state(adapted)
    with pytest.raises(ValueError, match="un-quantized by an earlier merge"):
        outer.merge(requantize=True)
    assert not outer.merged
    assert_state(adapted, merged)
    with pytest.raises(ValueError, match="default are merged already"):
        hf_qmoe.merge_adapter(adapted, requantize=True)
    assert_state(adapted, merged)


# -- the warning ----------------------------------------------------------------------------------------------------


COST = re.compile(r"they take ([\d.,]+) MiB instead of ([\d.,]+) MiB then")


@pytest.mark.parametrize("unload", [False, True], ids=["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_cost_is_told_before_it_arises(form: str, case: str, unload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning with the bytes of the experts before and after, while nothing is merged yet."""
    cost = hooks._cost  # in a model so small it would be 0.1 MiB
    monkeypatch.setattr(hooks, "_cost", lambda *args: {k: (a << 15, b << 15) for k, (a, b) in cost(*args).items()})
    adapted = adapted_model(case, form, torch.bfloat16)
    packed = [packed_parameter(m, n) for _, m, names in packed_modules(adapted) for n in names]
    sizes = [sum(2 * p.stack.numel for p in packed), sum(p.stack.nbytes for p in packed)]
    merge = adapted.merge_and_unload if unload else adapted.merge_adapter
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Merging LoRA into packed experts")
        with pytest.raises(UserWarning) as raised:
            merge()
    assert not any(m.merged for m in adapted.modules() if isinstance(m, BaseTunerLayer))
    assert len(list(packed_modules(adapted))) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merge()
    told = [str(w.message) for w in caught if "packed experts" in str(w.message)]
    assert told == [str(raised.value)]
    assert list(COST.search(told[0]).groups()) == [f"{size / 2**5:,.1f}" for size in sizes]


@pytest.mark.parametrize("targets", [TARGETS["gate_up"], TARGETS["down"]], ids=["gate_up", "down"])
@forms
def test_cost_of_one_projection(form: str, targets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that is unloaded is float as a whole, and so is what is told."""
    cost = hooks._cost
    monkeypatch.setattr(hooks, "_cost", lambda *args: {k: (a << 15, b << 15) for k, (a, b) in cost(*args).items()})
    adapted = adapt(packed_model(form=form), target_parameters=targets)
    with pytest.warns(UserWarning, match="packed experts") as told:
        merged = adapted.merge_and_unload()
    nbytes = sum(p.nbytes for m in experts(merged).values() for p in m.parameters())
    assert COST.search(str(told[0].message))[1] == f"{nbytes / 2**5:,.1f}"


@forms
def test_no_warning_where_nothing_is_packed(form: str) -> None:
    """Attention alone is adapted, experts are merged already, or the model is a float one."""
    attention = adapt(packed_model(form=form), target_parameters=None)
    merged = experts_alone(form)
    merge_adapter(merged)
    plain = adapt(packed_model(form=form).dequantize())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Merging LoRA into packed experts")
        for model in (attention, plain):
            model.merge_adapter()
            model.unmerge_adapter()
            model.merge_and_unload()
        merged.merge_and_unload()


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requantize", [False, True], ids=["float", "requantize"])
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@forms
def test_one_expert_at_a_time(form: str, case: str, requantize: bool) -> None:
    """In float32 no tensor is larger than one expert; in the weights' dtype none than the new stack."""
    adapted = experts_alone(form, case, dtype=torch.bfloat16)
    expert = max(packed_parameter(m, n).stack.numel for _, m, names in packed_modules(adapted) for n in names) // 4
    with quietly(), LargestTensors() as made:
        hf_qmoe.merge_adapter(adapted, safe_merge=True, requantize=requantize)
    assert made.numels[torch.float32] <= expert
    assert made.numels.get(torch.float64, 0) <= expert
    assert made.numels[torch.bfloat16] <= (1 if requantize else 4) * expert
    with LargestTensors() as made:
        adapted.unmerge_adapter()
    assert max(made.numels.values(), default=0) <= expert
