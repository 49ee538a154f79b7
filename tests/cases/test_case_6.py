"""Case 6 over all families: what a skip list names and what a model declares float32 stay as they are.

Patterns of each kind, warnings and both skip lists on one family: tests/loading/test_selection.py.
"""

import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_qmoe import QMoEConfig
from tests.cases.helpers import tensors_of
from tests.lora.families import CASES
from tests.sweep.overrides import LEFT_FLOAT, REFUSED
from tests.sweep.registry import every
from tests.sweep.test_sweep import CLASSES
from tests.sweep.tiny import build, find_models


#: Of a router, or of the gate in front of a shared expert: whatever lies below a module of such a name.
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)\.")

#: Some that declare float32 parameters: routers, their corrections, norms, what goes into a recurrence.
DECLARING = ("DeepseekV3Experts", "Ernie4_5_MoeExperts", "BeamExperts", "FlintExperts", "DeepseekV4Experts")
DECLARING += ("AfmoeExperts", "BailingHybridExperts")


def read(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    **kwargs: object,
) -> PreTrainedModel:
    """Loads a model from weights in memory."""
    return cls.from_pretrained(None, config=config, state_dict=dict(state), dtype=dtype, **kwargs)


@pytest.fixture(scope="module")
def checked() -> set[type[PreTrainedModel]]:
    """Models that hold several classes of experts are looked at once."""
    return set()


@pytest.mark.parametrize("name", CLASSES)
def test_routers_and_float32_stay_what_the_model_declares(name: str, checked: set[type[PreTrainedModel]]) -> None:
    """The same dtypes as a stock load has, and no bit of a router is lost.

    In fp16 transformers honours both lists of what to keep in float32, in bf16 the strict one alone.
    """
    for cls, config in find_models(every()[name]).items():
        if cls in checked:
            continue
        state = build(cls, config).state_dict()
        skip = [LEFT_FLOAT[cls.__name__]] if cls.__name__ in REFUSED else None
        stock = read(cls, config, state, torch.float16)
        dtypes = (torch.float16, torch.bfloat16) if stock._keep_in_fp32_modules else (torch.float16,)
        for dtype in dtypes:
            plain = tensors_of(stock if dtype == torch.float16 else read(cls, config, state, dtype))
            quantization = QMoEConfig(modules_to_not_convert=skip)
            loaded = tensors_of(read(cls, config, state, dtype, quantization_config=quantization))
            packed = {n for n, tensor in loaded.items() if tensor.dtype == torch.uint8}
            assert packed & plain.keys()
            routers = {n for n, tensor in plain.items() if ROUTER.search(n) and tensor.is_floating_point()}
            assert routers
            assert not packed & routers
            assert not {n for n in packed & plain.keys() if plain[n].dtype == torch.float32}
            for n, tensor in plain.items():
                if n not in packed:
                    assert loaded[n].dtype == tensor.dtype, n
                    assert torch.equal(loaded[n], tensor), n
        checked.add(cls)


@pytest.mark.parametrize("name", DECLARING)
def test_float32_after_a_reload(name: str, tmp_path: Path) -> None:
    """Saved and read without arguments: every tensor has the dtype and the bits that it had."""
    ((cls, config),) = list(find_models(every()[name]).items())[:1]
    dtype = torch.float16 if name == "AfmoeExperts" else torch.bfloat16
    model = read(cls, config, build(cls, config).state_dict(), dtype, quantization_config=QMoEConfig())
    model.save_pretrained(tmp_path)
    loaded, again = tensors_of(model), tensors_of(cls.from_pretrained(tmp_path))
    assert any(ROUTER.search(n) or "norm" in n for n, tensor in loaded.items() if tensor.dtype == torch.float32)
    assert again.keys() == loaded.keys()
    for n, tensor in loaded.items():
        assert again[n].dtype == tensor.dtype, n
        assert torch.equal(again[n], tensor), n


# -- skip lists -----------------------------------------------------------------------------------------------------

#: Families with two experts modules at least, and the fields that make them so.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "qwen3_5_moe": {},
    "gemma4": {},
    "deepseek_v3": {},
    "qwen3_vl_moe": {},
    "afmoe": {"num_dense_layers": 0},
    "llama4": {"num_hidden_layers": 4, "layer_types": None, "no_rope_layers": None, "moe_layers": None},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
}


def _checkpoint(family: str, path: Path) -> type[PreTrainedModel]:
    """Saves a bf16 model in its original layout; returns its class."""
    from transformers import AutoModelForCausalLM, Qwen3VLMoeForConditionalGeneration

    config = CASES[family].config()
    config = type(config).from_dict(config.to_dict() | FAMILIES[family])
    make = AutoModelForCausalLM.from_config
    if family == "qwen3_vl_moe":
        make = Qwen3VLMoeForConditionalGeneration._from_config
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(path)
    return type(model)


def _patterns(name: str) -> dict[str, str]:
    """One of each kind for the module called `name`, ``...layers.<i>...experts``."""
    index, rest = re.fullmatch(r".*layers\.(\d+)\.(.*)", name).groups()
    return {
        "exact name": name,
        "suffix": f"layers.{index}.{rest}",
        "regex": rf"layers\.({index}|77)\.{rest.replace('.', '[.]')}",
        "layer index": f"layers.{index}",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_stack(family: str, tmp_path: Path) -> None:
    """By any kind of pattern just that module stays bf16, bit for bit; saved config and reload say the same."""
    cls = _checkpoint(family, tmp_path / "float")
    plain = cls.from_pretrained(tmp_path / "float")
    modules = [n for n, m in plain.named_modules() if any(p.ndim == 3 for p in m.parameters(recurse=False))]
    modules = [n for n in modules if n.endswith("experts")]
    assert len(modules) >= 2
    skipped, of_stock = modules[0], tensors_of(plain)
    all_packed = None
    for kind, pattern in {"none": None, **_patterns(skipped)}.items():
        config = QMoEConfig(modules_to_not_convert=None if pattern is None else [pattern])
        model = cls.from_pretrained(tmp_path / "float", quantization_config=config)
        loaded = tensors_of(model)
        packed = {n for n, tensor in loaded.items() if tensor.dtype == torch.uint8 and n in of_stock}
        if pattern is None:
            all_packed = packed
            continue
        below = re.match(r".*layers\.\d+\.", skipped)[0] if kind == "layer index" else f"{skipped}."
        assert packed == {n for n in all_packed if not n.startswith(below)}, kind
        for name in (n for n in of_stock if n.startswith(f"{skipped}.")):
            assert loaded[name].dtype == of_stock[name].dtype
            assert torch.equal(loaded[name], of_stock[name])
        model.save_pretrained(tmp_path / kind)
        again = cls.from_pretrained(tmp_path / kind)
        assert again.config.quantization_config.modules_to_not_convert == [pattern]
        reloaded = tensors_of(again)
        assert reloaded.keys() == loaded.keys()
        for name, tensor in loaded.items():
            assert reloaded[name].dtype == tensor.dtype
            assert torch.equal(reloaded[name], tensor), name
        linears = [{n for n, m in x.named_modules() if isinstance(m, Linear4bit)} for x in (model, again)]
        assert linears[0] == linears[1]
