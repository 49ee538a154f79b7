"""Options of `LoraConfig` and operations on adapters, against stock PEFT on the float model."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn

from hf_qmoe.lora.wrapper import ParamWrapper
from tests.support.lora import (
    FORMS,
    adapted_pair,
    expert_lora_tensors,
    logits,
    lora_config,
    lora_tensors,
    loss_and_gradients,
    packed_and_float,
    randomize,
    relative_error,
)


GATE_UP = r".*\.gate_up_proj"
OPTIONS: dict[str, dict[str, object]] = {
    "rslora": {"use_rslora": True},
    "rank-pattern": {"rank_pattern": {GATE_UP: 5}},
    "alpha-pattern": {"alpha_pattern": {r"experts\.down_proj": 17}},
    "both-patterns": {
        "rank_pattern": {"layers.0.mlp.experts.down_proj": 2, GATE_UP: 7},
        "alpha_pattern": {GATE_UP: 1},
    },
    "random-B": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "experts-alone": {"target_modules": []},
    "modules-to-save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "all"},
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_options_mean_what_they_mean_in_peft(family: str, form: str, changes: dict[str, object]) -> None:
    """Same tensors, initial values, logits and gradients; no warning that PEFT's own patterns were ignored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, _ = packed_and_float(family, form)
        torch.manual_seed(0)
        ours = get_peft_model(ours, lora_config(**changes))
    assert not [w for w in caught if "pattern" in str(w.message)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where PEFT says that a pattern it follows is ignored
        stock = adapted_pair(family, form, config=lambda: lora_config(**changes), randomized=False)[1]
    mine, theirs = lora_tensors(ours), lora_tensors(stock)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    randomize(ours)
    randomize(stock)
    (loss, grads), (expected, wanted) = loss_and_gradients(ours), loss_and_gradients(stock)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert all(relative_error(grads[name], wanted[name]) < 1e-4 for name in grads)


@pytest.mark.parametrize("form", FORMS)
def test_a_target_that_matches_nothing_is_reported(form: str) -> None:
    """One misspelt name among others would leave half of the experts out in silence."""
    packed, _ = packed_and_float("qwen3_moe", form)
    targets = ["experts.gate_up_proj", "experts.dwn_proj"]
    with pytest.warns(RuntimeWarning, match=r"\['experts.dwn_proj'\] match no parameter and are ignored"):
        get_peft_model(packed, lora_config(target_parameters=targets))


@pytest.mark.parametrize("form", FORMS)
def test_a_pattern_that_matches_nothing_is_reported(form: str) -> None:
    """PEFT's warning stays, for the keys it is true of."""
    packed, _ = packed_and_float("qwen3_moe", form)
    patterns = {GATE_UP: 5, "experts.no_such_proj": 2}
    with pytest.warns(RuntimeWarning, match=r"rank_pattern keys match no adapted .*\['experts.no_such_proj'\]"):
        get_peft_model(packed, lora_config(rank_pattern=patterns))


@pytest.mark.parametrize("autocast", [True, False], ids=["fp32-adapter", "model-dtype-adapter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_adapter_dtype(form: str, dtype: torch.dtype, autocast: bool) -> None:
    """``autocast_adapter_dtype`` gives float32 adapters, without it they have the dtype of the products, as stock."""
    made = []
    for model in packed_and_float("qwen3_moe", form, dtype):
        torch.manual_seed(0)
        made.append(get_peft_model(model, lora_config(), autocast_adapter_dtype=autocast))
    mine, theirs = (expert_lora_tensors(model) for model in made)
    assert {t.dtype for t in mine.values()} == {torch.float32 if autocast else dtype}
    assert all(t.dtype == theirs[name].dtype and torch.equal(t, theirs[name]) for name, t in mine.items())
    loss, grads = loss_and_gradients(made[0])
    assert torch.isfinite(loss)
    assert all(grad.dtype == mine[name].dtype for name, grad in grads.items() if name in mine)


@pytest.mark.parametrize("form", FORMS)
def test_low_cpu_mem_usage(form: str, tmp_path: Path) -> None:
    """Loading an adapter through the meta device gives the same adapter."""
    ours, _ = adapted_pair("qwen3_moe", form)
    ours.save_pretrained(tmp_path)
    packed, _ = packed_and_float("qwen3_moe", form)
    loaded = PeftModel.from_pretrained(packed, tmp_path, low_cpu_mem_usage=True)
    assert not any(p.is_meta for p in loaded.parameters())
    assert torch.equal(logits(loaded), logits(ours))


# -- several adapters ---------------------------------------------------------------------------------------------


def two_adapters(model: PeftModel) -> PeftModel:
    """A second adapter with other numbers and another rank."""
    model.add_adapter("other", lora_config(r=2, lora_alpha=1))
    randomize(model, seed=5)
    return model


@pytest.fixture(params=FORMS)
def pair(request: pytest.FixtureRequest) -> tuple[PeftModel, PeftModel]:
    """Two models with two adapters each, packed and float."""
    ours, stock = adapted_pair("qwen3_moe", request.param)
    return two_adapters(ours), two_adapters(stock)


def both_equal(pair: tuple[PeftModel, PeftModel], change: Callable[[PeftModel], object] | None = None) -> Tensor:
    """Applies `change` to both; logits agree. Returns ours."""
    if change is not None:
        for model in pair:
            change(model)
    ours, stock = (logits(model) for model in pair)
    assert relative_error(ours, stock) < 1e-5
    return ours


def test_several_adapters(pair: tuple[PeftModel, PeftModel]) -> None:
    """One after the other, both at once, none, one deleted: always what stock PEFT gives, and each time different."""
    assert list(lora_tensors(pair[0])) == list(lora_tensors(pair[1]))
    seen = [
        both_equal(pair),
        both_equal(pair, lambda m: m.set_adapter("other")),
        both_equal(pair, lambda m: m.base_model.set_adapter(["default", "other"])),
    ]
    for model in pair:
        with model.disable_adapter():
            seen.append(logits(model))
    assert relative_error(seen[3], seen[4]) < 1e-5
    assert all(relative_error(a, b) > 1e-3 for i, a in enumerate(seen[:4]) for b in seen[:i])
    assert relative_error(both_equal(pair, lambda m: m.delete_adapter("other")), seen[0]) < 1e-6


@pytest.mark.parametrize("name", ["x", "experts", "lora", "base", "default2"])
def test_adapter_names_that_are_part_of_paths(name: str, tmp_path: Path) -> None:
    """A second adapter is loaded whatever its name; PEFT counts the first one's tensors as missing for some."""
    ours, _ = adapted_pair("qwen3_moe")
    ours.save_pretrained(tmp_path)
    expected = logits(ours)
    randomize(ours, seed=8)
    ours.load_adapter(tmp_path, name)
    ours.set_adapter(name)
    assert torch.equal(logits(ours), expected)


def test_hotswap(tmp_path: Path) -> None:
    """An adapter of the same rank takes the other's place; another rank, which PEFT would scramble, is refused."""
    ours, _ = adapted_pair("qwen3_moe")
    ours.save_pretrained(tmp_path / "same")
    expected = logits(ours)
    randomize(ours, seed=8)
    hotswap_adapter(ours, tmp_path / "same", "default", torch_device="cpu")
    assert torch.equal(logits(ours), expected)
    for name, changes in {"smaller": {"r": 2}, "pattern": {"rank_pattern": {GATE_UP: 2}}}.items():
        other, _ = adapted_pair("qwen3_moe", config=lambda changes=changes: lora_config(**changes))
        other.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="can be swapped for one of the same rank"):
            hotswap_adapter(ours, tmp_path / name, "default", torch_device="cpu")
    assert torch.equal(logits(ours), expected)


def test_gradients_of_two_active_adapters(pair: tuple[PeftModel, PeftModel]) -> None:
    """Both are trained at once."""
    for model in pair:
        model.base_model.set_adapter(["default", "other"])
    (loss, grads), (expected, wanted) = (loss_and_gradients(model) for model in pair)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert any(".other." in name for name in grads)
    assert all(relative_error(grads[name], wanted[name]) < 1e-4 for name in grads)


def test_an_inactive_adapter_gets_no_gradient(pair: tuple[PeftModel, PeftModel]) -> None:
    """As with stock PEFT."""
    for model in pair:
        ids = torch.tensor([[5, 6, 7, 8]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert all((p.grad is None) == (".other." in n) for n, p in lora_tensors(model).items())


def deltas(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The whole update of every adapted layer."""
    found = {n: m for n, m in model.named_modules() if hasattr(m, "get_delta_weight") and adapter in m.lora_A}
    return {name: module.get_delta_weight(adapter).detach() for name, module in found.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_delta_weight(family: str, form: str) -> None:
    """`get_delta_weight` is stock PEFT's: shape, dtype, values."""
    ours, stock = adapted_pair(family, form)
    mine, theirs = deltas(ours, "default"), deltas(stock, "default")
    assert mine.keys() == theirs.keys()
    for name, delta in mine.items():
        torch.testing.assert_close(delta, theirs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("combination", ["cat", "svd"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weighted_sum_is_exact(family: str, form: str, combination: str) -> None:
    """``cat``, and ``svd`` of enough rank, give the weighted sum of the experts' updates."""
    ours, _ = adapted_pair(family, form)
    ours.add_adapter("other", lora_config(r=2, lora_alpha=1))
    randomize(ours, seed=5)
    ours.add_weighted_adapter(["default", "other"], [0.7, -0.4], "sum", combination, svd_rank=5)
    first, second, total = (deltas(ours, name) for name in ("default", "other", "sum"))
    for name, module in ours.named_modules():
        if isinstance(module, ParamWrapper):
            expected = 0.7 * first[name] - 0.4 * second[name]
            assert relative_error(total[name], expected) < 1e-5
    assert all(config.target_parameters for config in ours.peft_config.values())


def test_truncated_svd_is_the_best_approximation() -> None:
    """Each expert's update at a smaller rank has the error that the dropped singular values make."""
    ours, _ = adapted_pair("qwen3_moe")
    two_adapters(ours)
    ours.add_weighted_adapter(["default", "other"], [1.0, 1.0], "sum", "svd", svd_rank=2)
    first, second, total = (deltas(ours, name) for name in ("default", "other", "sum"))
    name = next(n for n, m in ours.named_modules() if isinstance(m, ParamWrapper))
    for update, kept in zip(first[name] + second[name], total[name], strict=True):
        best = torch.linalg.svdvals(update.double())[2:].norm()
        torch.testing.assert_close((update - kept).double().norm(), best, rtol=1e-4, atol=0)


@pytest.mark.parametrize("combination", ["linear", "ties", "magnitude_prune"])
def test_elementwise_combinations(combination: str) -> None:
    """Combinations of factors entry by entry, of adapters of one rank: PEFT's formula on both matrices."""
    ours, _ = adapted_pair("qwen3_moe")
    ours.add_adapter("other", lora_config())
    randomize(ours, seed=5)
    density = None if combination == "linear" else 1.0
    ours.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mix", combination, density=density)
    for module in ours.modules():
        if isinstance(module, ParamWrapper) and combination == "linear":
            a, b, mix = (module.lora_A[name].weight for name in ("default", "other", "mix"))
            torch.testing.assert_close(mix, (0.5 * module.scaling["default"]) ** 0.5 * (a + b))
    ours.set_adapter("mix")
    assert torch.isfinite(logits(ours)).all()


@pytest.mark.parametrize("combination", ["ties_svd", "dare_linear_svd", "magnitude_prune_svd"])
def test_combinations_that_need_whole_updates_are_refused(combination: str) -> None:
    """Named, with what works instead; no adapter is added."""
    ours, _ = adapted_pair("qwen3_moe")
    ours.add_adapter("other", lora_config())
    with pytest.raises(ValueError, match="choose one of linear"):
        ours.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mix", combination, density=0.5)
    assert list(ours.peft_config) == ["default", "other"]


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "rslora": ({"use_rslora": True}, "cat", "scaling of rslora"),
    "rank-pattern": ({"rank_pattern": {GATE_UP: 5}}, "linear", "use 'cat' or 'svd'"),
}


@pytest.mark.parametrize(("changes", "combination", "message"), REFUSED.values(), ids=REFUSED)
def test_combinations_that_peft_gets_wrong_are_refused(
    changes: dict[str, object], combination: str, message: str
) -> None:
    """Where the new adapter would have another scaling, or ranks that its config does not say."""
    packed, _ = packed_and_float("qwen3_moe")
    ours = get_peft_model(packed, lora_config(**changes))
    ours.add_adapter("other", lora_config(**changes))
    with pytest.raises(ValueError, match=message):
        ours.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mix", combination)
    assert list(ours.peft_config) == ["default", "other"]


# -- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_dropout(form: str) -> None:
    """In training it changes the result from call to call, by seed, and is right on average; not in eval."""
    ours, stock = adapted_pair("qwen3_moe", form, config=lambda: lora_config(target_modules=[]))
    packed, _ = packed_and_float("qwen3_moe", form)
    dropping = get_peft_model(packed, lora_config(target_modules=[], lora_dropout=0.5))
    randomize(dropping)
    dropping.eval()
    assert torch.equal(logits(dropping), logits(ours.eval()))
    dropping.train()
    torch.manual_seed(1)
    first, second = logits(dropping), logits(dropping)
    assert relative_error(first, second) > 1e-3
    torch.manual_seed(1)
    assert torch.equal(logits(dropping), first)
    experts = next(m for m in dropping.modules() if isinstance(m, ParamWrapper))
    plain = next(m for m in stock.modules() if type(m).__name__ == "ParamWrapper")
    one_projection_on_average(experts, plain)


def one_projection_on_average(ours: nn.Module, stock: nn.Module) -> None:
    """The mean over many draws of the down projection's update is the update without dropout."""
    for wrapper in (ours.base_layer, stock.base_layer):
        wrapper.enable_adapters(False)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    index, weights = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]]), torch.full((4, 2), 0.5)
    base = ours.get_base_layer()(x, index, weights)
    with torch.no_grad():
        mean = torch.stack([ours(x, index, weights) for _ in range(4000)]).mean(dim=0)
        expected = stock(x, index, weights)
    assert relative_error(mean - base, expected - base) < 0.1


@pytest.mark.parametrize("form", FORMS)
def test_dropout_of_one_adapter_is_its_own(form: str) -> None:
    """A second adapter without dropout is not dropped."""
    packed, _ = packed_and_float("qwen3_moe", form)
    ours = get_peft_model(packed, lora_config(lora_dropout=0.5, target_modules=[]))
    ours.add_adapter("other", lora_config(target_modules=[]))
    randomize(ours, seed=2)
    ours.train()
    assert relative_error(logits(ours), logits(ours)) > 1e-3
    ours.set_adapter("other")
    assert torch.equal(logits(ours), logits(ours))


def test_a_copy_is_independent() -> None:
    """`copy.deepcopy` of an adapted model has factors of its own."""
    ours, _ = adapted_pair("qwen3_moe")
    twin = copy.deepcopy(ours)
    expected = logits(ours)
    assert torch.equal(logits(twin), expected)
    randomize(twin, seed=9)
    assert torch.equal(logits(ours), expected)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_trained_with_dropout_loads_with_stock_peft(form: str, tmp_path: Path) -> None:
    """Stock PEFT refuses ``lora_dropout`` on parameters, also for inference, so none is written."""
    packed, plain = packed_and_float("qwen3_moe", form)
    ours = get_peft_model(packed, lora_config(lora_dropout=0.05))
    randomize(ours)
    ours.save_pretrained(tmp_path)
    assert ours.peft_config["default"].lora_dropout == 0.05
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    assert relative_error(logits(loaded), logits(ours.eval())) < 1e-5
    again, _ = packed_and_float("qwen3_moe", form)
    trained = PeftModel.from_pretrained(again, tmp_path, config=lora_config(lora_dropout=0.05), is_trainable=True)
    trained.train()
    assert relative_error(logits(trained), logits(trained)) > 1e-4
