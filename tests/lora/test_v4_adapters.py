"""Adapters saved by PEFT on transformers v4, where experts were linears: the same update on packed v5 experts."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qmoe.lora.wrapper import ParamWrapper
from tests.support.families import FAMILY_FORMS, family_pair
from tests.support.lora import logits, lora_tensors, loss_and_gradients, relative_error
from tests.support.models import NUM_EXPERTS


EVERY_FORM = pytest.mark.parametrize("form", FAMILY_FORMS)
V4_FAMILIES = ("qwen3_moe", "olmoe", "mixtral")
EVERY_FAMILY = pytest.mark.parametrize("family", V4_FAMILIES)
HIDDEN, INTERMEDIATE, LAYERS = 64, 96, 2
RANK, ALPHA = 3, 12
PREFIX = "base_model.model."


def v4_module(family: str, layer: int, expert: int, projection: str) -> str:
    """Name that an expert's linear had; `projection` is gate, up or down."""
    if family == "mixtral":
        name = {"gate": "w1", "up": "w3", "down": "w2"}[projection]
        return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"


def router(family: str, layer: int, v4: bool = True) -> str:
    """Name of the router, which was a linear too."""
    return f"model.layers.{layer}.{'block_sparse_moe' if v4 and family == 'mixtral' else 'mlp'}.gate"


class V4Adapter:
    """A random adapter: factors by the v4 names of linears, their updates, and its files."""

    def __init__(self, family: str, attention: bool = False, with_router: bool = False, **config: object) -> None:
        self.family, self.attention = family, ["q_proj", "o_proj"] if attention else []
        projections = ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
        self.targets = [*self.attention, *projections, *(["gate"] if with_router else [])]
        self.config = {"r": RANK, "lora_alpha": ALPHA} | config
        generator = torch.Generator().manual_seed(7)
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}

        def add(name: str, out: int, of: int) -> None:
            shapes = ((self.config["r"], of), (out, self.config["r"]))
            self.factors[name] = tuple(0.1 * torch.randn(s, generator=generator) for s in shapes)

        for layer in range(LAYERS):
            for name in self.attention:
                add(f"model.layers.{layer}.self_attn.{name}", HIDDEN, HIDDEN)
            for expert in range(NUM_EXPERTS):
                add(v4_module(family, layer, expert, "gate"), INTERMEDIATE, HIDDEN)
                add(v4_module(family, layer, expert, "up"), INTERMEDIATE, HIDDEN)
                add(v4_module(family, layer, expert, "down"), HIDDEN, INTERMEDIATE)
            if with_router:
                add(router(family, layer), NUM_EXPERTS, HIDDEN)

    def delta(self, name: str) -> Tensor:
        """Update ``[out, in]`` of one linear."""
        lora_A, lora_B = self.factors[name]
        return lora_B.double() @ lora_A.double() * (self.config["lora_alpha"] / self.config["r"])

    def save(self, path: Path) -> Path:
        """Writes what PEFT wrote then."""
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
        config |= {"base_model_name_or_path": "v4", "target_modules": self.targets, "lora_dropout": 0.05}
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(config | self.config))
        tensors = {
            f"{PREFIX}{name}.lora_{letter}.weight": tensor
            for name, factors in self.factors.items()
            for letter, tensor in zip("AB", factors, strict=True)
        }
        save_file(tensors, path / "adapter_model.safetensors")
        return path

    def add_to(self, model: PreTrainedModel) -> None:
        """Adds every update to the weights of a float v5 model."""
        left = set(self.factors)

        def taken(name: str) -> Tensor:
            left.remove(name)
            return self.delta(name)

        def add(weight: nn.Parameter, delta: Tensor) -> None:
            weight.data.copy_(weight.double() + delta)

        for i, layer in enumerate(model.model.layers):
            for name in self.attention:
                add(getattr(layer.self_attn, name).weight, taken(f"model.layers.{i}.self_attn.{name}"))
            experts = layer.mlp.experts
            names = {p: [v4_module(self.family, i, e, p) for e in range(NUM_EXPERTS)] for p in ("gate", "up", "down")}
            halves = [torch.stack([taken(name) for name in names[p]]) for p in ("gate", "up")]
            add(experts.gate_up_proj, torch.cat(halves, dim=1))
            add(experts.down_proj, torch.stack([taken(name) for name in names["down"]]))
            if "gate" in self.targets:
                add(layer.mlp.gate.weight, taken(router(self.family, i)))
        assert not left


def load(model: nn.Module, path: Path, **kwargs: object) -> PeftModel:
    """`PeftModel.from_pretrained` without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, path, **kwargs)


ADAPTERS: dict[str, dict[str, object]] = {
    "experts": {},
    "attention": {"attention": True},
    "router": {"attention": True, "with_router": True, "lora_dropout": 0.0},
    "rank-of-experts": {"r": NUM_EXPERTS, "lora_alpha": 5},
}


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
@EVERY_FORM
@EVERY_FAMILY
def test_same_update(family: str, form: str, kind: str, low_cpu_mem_usage: bool, tmp_path: Path) -> None:
    """Packed v5 = float v5 with stock PEFT = updates added expert by expert."""
    adapter = V4Adapter(family, **ADAPTERS[kind])
    path = adapter.save(tmp_path / "v4")
    packed, plain = family_pair(family, form)
    base = logits(packed)
    explicit = family_pair(family, form)[1]
    adapter.add_to(explicit)
    expected = logits(explicit)
    ours = load(packed, path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert sum(isinstance(module, ParamWrapper) for module in ours.modules()) == 2 * LAYERS
    assert relative_error(logits(ours), expected) < 1e-4
    assert relative_error(base, expected) > 1e-2  # the adapter matters
    # Stock PEFT takes no dropout on parameters, even for inference.
    path = V4Adapter(family, **(ADAPTERS[kind] | {"lora_dropout": 0.0})).save(tmp_path / "no-dropout")
    stock = load(plain, path)
    assert relative_error(logits(stock), expected) < 1e-4
    mine, theirs = lora_tensors(ours), lora_tensors(stock)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@EVERY_FORM
@EVERY_FAMILY
def test_rslora(family: str, form: str, tmp_path: Path) -> None:
    """``alpha / sqrt(r)`` of each expert's linears; PEFT's own conversion of gate and up is off by sqrt(2)."""
    path = V4Adapter(family, use_rslora=True, lora_dropout=0.0).save(tmp_path)
    ours = load(family_pair(family, form)[0], path)
    check_deltas(ours, family, factor=RANK**0.5)
    ours.save_pretrained(tmp_path / "saved")  # with the scaling that was put right: stock PEFT reads it
    stock = PeftModel.from_pretrained(family_pair(family, form)[1], tmp_path / "saved")
    assert relative_error(logits(stock), logits(ours)) < 1e-5


PATTERNS: dict[str, dict[str, object]] = {
    "alpha-of-gate-and-up": {"alpha_pattern": {"gate_proj": 14, "up_proj": 14, "w1": 14, "w3": 14}},
    "rank-of-up": {"rank_pattern": {"up_proj": 3, "w3": 3}},
    "one-expert": {"alpha_pattern": {r"experts\.0\.(down_proj|w2)": 14}},
}


@pytest.mark.parametrize("changes", PATTERNS.values(), ids=PATTERNS)
@EVERY_FORM
@EVERY_FAMILY
def test_patterns_for_names_that_are_gone(family: str, form: str, changes: dict[str, object], tmp_path: Path) -> None:
    """They match nothing any more, so the scaling or rank would be another: refused, the model as it was."""
    path = V4Adapter(family, lora_dropout=0.0, **changes).save(tmp_path)
    packed, _ = family_pair(family, form)
    names, expected = [n for n, _ in packed.named_parameters()], logits(packed)
    with pytest.raises(ValueError, match="match nothing adapted, while target_modules named"):
        load(packed, path)
    assert [n for n, _ in packed.named_parameters()] == names
    assert torch.equal(logits(packed), expected)


@EVERY_FORM
@EVERY_FAMILY
def test_router_with_dropout(family: str, form: str, tmp_path: Path) -> None:
    """The router is a float parameter, for which PEFT takes no dropout: its error, and the model as it was."""
    path = V4Adapter(family, with_router=True).save(tmp_path)
    packed, _ = family_pair(family, form)
    names, expected = [n for n, _ in packed.named_parameters()], logits(packed)
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        load(packed, path)
    assert [n for n, _ in packed.named_parameters()] == names
    assert torch.equal(logits(packed), expected)


@EVERY_FORM
@EVERY_FAMILY
def test_each_delta(family: str, form: str, tmp_path: Path) -> None:
    """`expert_delta` of every wrapper is the update of that expert's linears."""
    ours = load(family_pair(family, form)[0], V4Adapter(family).save(tmp_path))
    check_deltas(ours, family)


def check_deltas(ours: PeftModel, family: str, factor: float = 1.0) -> None:
    """Each expert's update is `factor` times that of a `V4Adapter` without rslora."""
    adapter = V4Adapter(family)
    for layer in range(LAYERS):
        outer = ours.base_model.model.model.layers[layer].mlp.experts
        wrappers = {wrapper.parameter_name: wrapper for wrapper in (outer, outer.base_layer)}
        for expert in range(NUM_EXPERTS):
            gate, up, down = (adapter.delta(v4_module(family, layer, expert, p)) for p in ("gate", "up", "down"))
            for name, expected in (("gate_up_proj", torch.cat((gate, up))), ("down_proj", down)):
                found = wrappers[name].expert_delta("default", expert, torch.float64)
                torch.testing.assert_close(found, factor * expected, rtol=1e-6, atol=1e-7)


@EVERY_FORM
@EVERY_FAMILY
def test_trained_on_and_saved(family: str, form: str, tmp_path: Path) -> None:
    """Training goes on from it as with stock PEFT; what is saved then is v5's, and loads on either model."""
    path = V4Adapter(family, attention=True, lora_dropout=0.0).save(tmp_path / "v4")
    ours, stock = (load(model, path, is_trainable=True) for model in family_pair(family, form))
    for step in range(2):
        results = [loss_and_gradients(model, seed=step) for model in (ours, stock)]
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=0)
        assert all(relative_error(results[0][1][name], grad) < 1e-4 for name, grad in results[1][1].items())
        for model in (ours, stock):
            torch.optim.SGD(lora_tensors(model).values(), lr=0.5).step()
    ours.save_pretrained(tmp_path / "v5")
    expected = logits(ours.eval())
    for base in family_pair(family, form):
        assert relative_error(logits(load(base, tmp_path / "v5")), expected) < 1e-5


@EVERY_FORM
def test_second_adapter_of_v4(form: str, tmp_path: Path) -> None:
    """`load_adapter` beside one made with v5's names, and the other way round."""
    path = V4Adapter("qwen3_moe", attention=True, lora_dropout=0.0).save(tmp_path / "v4")
    expected = logits(load(family_pair("qwen3_moe", form)[1], path))
    for order in (("v4", "again"), ("again", "v4")):
        packed, _ = family_pair("qwen3_moe", form)
        model = load(packed, path, adapter_name=order[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_adapter(path, order[1])
        for name in order:
            model.set_adapter(name)
            assert relative_error(logits(model), expected) < 1e-5


@EVERY_FORM
@EVERY_FAMILY
def test_through_transformers(family: str, form: str, tmp_path: Path) -> None:
    """The model's own ``load_adapter``, which converts by itself."""
    path = V4Adapter(family, attention=True, lora_dropout=0.0).save(tmp_path)
    packed, plain = family_pair(family, form)
    for model in (packed, plain):
        model.load_adapter(path)
    assert len(lora_tensors(packed)) == 8 * LAYERS
    assert relative_error(logits(packed), logits(plain)) < 1e-5


def edit(path: Path, change: object) -> None:
    """Changes the tensors of a saved adapter in place."""
    file = path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


MISSING = {
    "one-expert": lambda name: ".experts.3." in name,
    "one-expert-of-a-layer": lambda name: "layers.1." in name and ".experts.2." in name,
    "one-tensor": lambda name: "layers.0." in name and ".experts.0." in name and name.endswith("lora_B.weight"),
    "a-layer": lambda name: "layers.1." in name and ".experts." in name,
    "a-projection": lambda name: ".experts." in name and (".up_proj." in name or ".w3." in name),
    "all-experts": lambda name: ".experts." in name,
}


@pytest.mark.parametrize("case", MISSING)
@EVERY_FORM
@EVERY_FAMILY
def test_experts_that_are_missing(family: str, form: str, case: str, tmp_path: Path) -> None:
    """An adapter of some of the experts is refused, and the model is as it was."""
    path = V4Adapter(family, attention=True).save(tmp_path)
    edit(path, lambda tensors: {name: t for name, t in tensors.items() if not MISSING[case](name)})
    packed, _ = family_pair(family, form)
    names, expected = [n for n, _ in packed.named_parameters()], logits(packed)
    with pytest.raises(ValueError):  # noqa: PT011 - PEFT's or ours
        load(packed, path)
    assert [n for n, _ in packed.named_parameters()] == names
    assert torch.equal(logits(packed), expected)


@EVERY_FORM
def test_more_experts_than_the_model_has(form: str, tmp_path: Path) -> None:
    """Of a model with five experts, or three layers."""
    adapter = V4Adapter("qwen3_moe")
    path = adapter.save(tmp_path)
    for wrong, right in ((".experts.4.", ".experts.3."), ("layers.2.", "layers.1.")):
        adapter.save(path)
        edit(
            path, lambda tensors, w=wrong, r=right: tensors | {n.replace(r, w): t.clone() for n, t in tensors.items()}
        )
        packed, _ = family_pair("qwen3_moe", form)
        with pytest.raises(ValueError):  # noqa: PT011 - PEFT's or ours
            load(packed, path)


# -- shared experts -------------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Random factors for all projections of a float model as v4 had them: of MLPs, shared and routed experts."""
    generator = torch.Generator().manual_seed(0)
    sizes = {}
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj", "down_proj")):
            sizes[name] = (module.out_features, module.in_features)
        elif name.endswith(".experts"):
            for expert in range(module.num_experts):
                up = {f"{name}.{expert}.{p}_proj": (INTERMEDIATE, HIDDEN) for p in ("gate", "up")}
                sizes |= up | {f"{name}.{expert}.down_proj": (HIDDEN, INTERMEDIATE)}
    return {
        f"{PREFIX}{name}.lora_{letter}.weight": torch.randn(size, generator=generator)
        for name, (out, of) in sizes.items()
        for letter, size in (("A", (RANK, of)), ("B", (out, RANK)))
    }


@EVERY_FORM
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_5_moe"])
def test_v4_adapter_with_shared_experts(family: str, form: str, tmp_path: Path) -> None:
    """PEFT finds the routed experts or the others for ``gate_proj``, and drops the rest in silence: refused."""
    packed, plain = family_pair(family, form)
    tensors, names, expected = everything(plain), [n for n, _ in packed.named_parameters()], logits(packed)
    config = LoraConfig(r=RANK, target_modules=["gate_proj", "up_proj", "down_proj"], inference_mode=True)
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert len(lora_tensors(load(plain, tmp_path))) < len(tensors)
    with pytest.raises(ValueError, match=r"has no place for \d+ tensors"):
        load(packed, tmp_path)
    assert [n for n, _ in packed.named_parameters()] == names
    assert torch.equal(logits(packed), expected)
    if family == "deepseek_v3":  # the routed experts alone
        kept = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        save_file(kept, tmp_path / "adapter_model.safetensors")
        ours, stock = load(packed, tmp_path), load(family_pair(family, form)[1], tmp_path)
        assert relative_error(logits(ours), logits(stock)) < 1e-4
        assert relative_error(expected, logits(stock)) > 1e-2


@EVERY_FORM
def test_v4_shared_expert_targets_by_full_name(form: str, tmp_path: Path) -> None:
    """As ``target_parameters`` their v4 tensors load as they are, onto exactly those modules."""
    packed, plain = family_pair("deepseek_v3", form)
    names = [n for n, m in plain.named_modules() if "shared_experts." in n and isinstance(m, nn.Linear)]
    assert len(names) == 6
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in names:
        module = plain.get_submodule(name)
        lora_A = 0.1 * torch.randn(RANK, module.in_features, generator=generator)
        lora_B = 0.1 * torch.randn(module.out_features, RANK, generator=generator)
        tensors |= {f"{PREFIX}{name}.lora_A.weight": lora_A, f"{PREFIX}{name}.lora_B.weight": lora_B}
    parameters = [f"{name}.weight" for name in names]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=parameters, inference_mode=True)
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    ours, stock = load(packed, tmp_path), load(plain, tmp_path)
    found = {n.removeprefix(PREFIX).partition(".lora_")[0] for n in lora_tensors(ours)}
    assert found == set(names)
    explicit = family_pair("deepseek_v3", form)[1]
    for name in names:
        weight = explicit.get_submodule(name).weight
        factors = [tensors[f"{PREFIX}{name}.lora_{letter}.weight"] for letter in "BA"]
        weight.data += factors[0] @ factors[1] * (ALPHA / RANK)
    for model in (ours, stock):
        assert relative_error(logits(model), logits(explicit)) < 1e-5
