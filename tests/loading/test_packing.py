"""What packed experts hold and compute: bitsandbytes' bytes, and the logits of the float model they stand for."""

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeForCausalLM

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.checkpoints import (
    assert_same_tensors,
    expert_matrices,
    float_twin,
    load,
    logits,
    packed_modules,
    packed_state,
    reference_pack,
    reference_scales,
    reference_unpack,
    tensors_on_disk,
)
from tests.support.models import FAMILIES, PER_EXPERT_FAMILIES, VOCAB, save_tiny, tiny_config, tiny_model, token_ids


DTYPES = {"auto": torch.bfloat16, torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}
FORMATS = [("nf4", 64), ("nf4", 32), ("nf4", 128), ("fp4", 64), ("int8", 64), ("fp8", 128), ("bf16", 64), ("fp16", 64)]


def format_id(value: object) -> str | None:
    """Readable ids for formats and dtypes."""
    return str(value).removeprefix("torch.")


def assert_bytes_are_bitsandbytes_own(
    model: PreTrainedModel, checkpoint: Path, family: str, quant_type: str, dtype: torch.dtype
) -> None:
    """Each expert's bytes and scales are those of bitsandbytes for its matrix, cast to `dtype` first."""
    for layer in (0, 1):
        module = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        for name, matrices in expert_matrices(checkpoint, family, layer).items():
            stack = module.stack(name)
            assert stack.packed.shape[0] == len(matrices)
            for expert, matrix in enumerate(matrices):
                packed, absmax = reference_pack(matrix.to(dtype), quant_type, stack.blocksize or 64)
                assert torch.equal(stack.packed[expert], packed)
                if absmax is not None:
                    assert torch.equal(stack.absmax[expert].flatten(), absmax)


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quant_type", "blocksize"), FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes(family: str, quant_type: str, blocksize: int, tiny_checkpoints: dict[str, Path]) -> None:
    """Packed bytes and scales equal bitsandbytes' own for each expert, gate and up rows concatenated.

    The down projection has 96 input features: blocks of 64 and 128 cross its rows.
    """
    config = QMoEConfig(experts_quant_type=quant_type, experts_blocksize=blocksize)
    model = load(tiny_checkpoints[family], config)
    assert_bytes_are_bitsandbytes_own(model, tiny_checkpoints[family], family, quant_type, torch.bfloat16)
    if quant_type not in ("bf16", "fp16"):
        assert {stack.blocksize for m in packed_modules(model).values() for stack in m.stacks().values()} == {
            blocksize
        }


@pytest.mark.parametrize("dtype", DTYPES, ids=format_id)
@pytest.mark.parametrize("family", FAMILIES)
def test_dtype_of_the_model(family: str, dtype: str | torch.dtype, tiny_checkpoints: dict[str, Path]) -> None:
    """The dtype that is asked for is that of the unquantized parameters and of the products, and of what is packed."""
    model = load(tiny_checkpoints[family], QMoEConfig(), dtype=dtype)
    resolved = DTYPES[dtype]
    assert model.dtype is resolved
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {resolved}
    assert {m.compute_dtype for m in packed_modules(model).values()} == {resolved}
    assert {m.compute_dtype for m in model.modules() if isinstance(m, Linear4bit)} == {resolved}
    assert_bytes_are_bitsandbytes_own(model, tiny_checkpoints[family], family, "nf4", resolved)
    assert logits(model).dtype is resolved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=format_id)
def test_float32_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    """A float32 checkpoint is cast to the dtype asked for, then packed."""
    checkpoint = save_tiny(tmp_path, "qwen3_moe", dtype=torch.float32)
    model = load(checkpoint, QMoEConfig(), dtype=dtype)
    assert_bytes_are_bitsandbytes_own(model, checkpoint, "qwen3_moe", "nf4", dtype)


def test_fused_checkpoint(fused_checkpoint: Path, tiny_checkpoints: dict[str, Path]) -> None:
    """A checkpoint that is fused already is packed to the same bytes as the per-expert one."""
    fused, per_expert = load(fused_checkpoint, QMoEConfig()), load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    assert_same_tensors(fused.state_dict(), per_expert.state_dict())


def test_sharded_checkpoint(sharded_checkpoint: Path, tiny_checkpoints: dict[str, Path]) -> None:
    """Experts spread over many shards, in whatever order, are packed to the same bytes."""
    assert len(list(sharded_checkpoint.glob("*.safetensors"))) >= 10
    sharded, single = load(sharded_checkpoint, QMoEConfig()), load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    assert_same_tensors(sharded.state_dict(), single.state_dict())


def test_many_experts_keep_their_order(tmp_path: Path) -> None:
    """Expert 10 is not read before expert 2."""
    checkpoint = save_tiny(tmp_path, "qwen3_moe", num_experts=12, num_hidden_layers=1)
    model = load(checkpoint, QMoEConfig(quantize_linears=False))
    down = model.model.layers[0].mlp.experts.stack("down_proj")
    source = load(checkpoint).model.layers[0].mlp.experts.down_proj
    for expert in range(12):
        assert torch.equal(down.packed[expert], reference_pack(source[expert].detach(), "nf4", 64)[0])


@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_double_quant_keeps_the_codes(family: str, quant_type: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Double quantization changes the scales only, by less than a code of theirs."""
    single = load(tiny_checkpoints[family], QMoEConfig(experts_quant_type=quant_type))
    double = load(tiny_checkpoints[family], QMoEConfig(experts_quant_type=quant_type, experts_double_quant=True))
    for path, module in packed_modules(double).items():
        for name, stack in module.stacks().items():
            plain = single.get_submodule(path).stack(name)
            assert torch.equal(stack.packed, plain.packed)
            assert stack.absmax.dtype is torch.uint8
            assert stack.nbytes < plain.nbytes
            for expert in range(stack.num_experts):
                scales, exact = reference_scales(module, name, expert), plain.absmax[expert].flatten()
                assert (scales - exact).abs().max() <= 0.02 * (exact - exact.mean()).abs().max()


# -- values ---------------------------------------------------------------------------------------------------------


def relative_error(packed: Tensor, weight: Tensor) -> float:
    """Mean absolute error relative to the mean magnitude."""
    return float((packed - weight).abs().mean() / weight.abs().mean())


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "bound"),
    [("nf4", 32, 0.10), ("nf4", 64, 0.11), ("nf4", 128, 0.12), ("fp4", 64, 0.15), ("int8", 64, 0.025)],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dequantized_weights_are_close_to_the_checkpoint(
    family: str, quant_type: str, blocksize: int, bound: float, tiny_checkpoints: dict[str, Path]
) -> None:
    """What a packed stack unpacks to is the checkpoint's weight up to the error of the format, in rows of 64 and 96.

    The bounds are about 1.2 times the format's error on normally distributed weights.
    """
    config = QMoEConfig(experts_quant_type=quant_type, experts_blocksize=blocksize)
    model = load(tiny_checkpoints[family], config)
    for layer in (0, 1):
        module = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        for name, matrices in expert_matrices(tiny_checkpoints[family], family, layer).items():
            unpacked = module.stack(name).dequantize(torch.float32)
            for expert, matrix in enumerate(matrices):
                assert relative_error(unpacked[expert], matrix.float()) < bound


@pytest.mark.parametrize(("quant_type", "blocksize"), FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_unpacking_follows_the_documented_format(
    family: str, quant_type: str, blocksize: int, tiny_checkpoints: dict[str, Path]
) -> None:
    """A stack unpacks to codebook value times scale of its block, bit for bit in float32."""
    config = QMoEConfig(experts_quant_type=quant_type, experts_blocksize=blocksize)
    for module in packed_modules(load(tiny_checkpoints[family], config)).values():
        for name, stack in module.stacks().items():
            unpacked = stack.dequantize(torch.float32)
            for expert in range(stack.num_experts):
                scales = reference_scales(module, name, expert)
                expected = reference_unpack(stack.packed[expert], scales, quant_type)
                torch.testing.assert_close(unpacked[expert], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("linears", [True, False], ids=["linears", "experts_only"])
@pytest.mark.parametrize(
    ("quant_type", "blocksize"),
    [("nf4", 32), ("nf4", 64), ("fp4", 32), ("int8", 64), ("fp8", 64), ("bf16", 64), ("fp16", 64)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(
    family: str, quant_type: str, blocksize: int, linears: bool, tiny_checkpoints: dict[str, Path]
) -> None:
    """Logits equal those of the float model with the documented value of every packed weight put in."""
    config = QMoEConfig(experts_quant_type=quant_type, experts_blocksize=blocksize, quantize_linears=linears)
    model = load(tiny_checkpoints[family], config, dtype=torch.float32)
    expected = logits(float_twin(model, tiny_checkpoints[family]))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bit_formats_lose_nothing(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """bf16 experts of a bf16 checkpoint give the logits of the float model."""
    model = load(
        tiny_checkpoints[family], QMoEConfig(experts_quant_type="bf16", quantize_linears=False), dtype=torch.float32
    )
    expected = logits(load(tiny_checkpoints[family], dtype=torch.float32))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "intermediate", [32, 64, 128], ids=["gate_up_is_square", "down_is_square", "wider_than_hidden"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_square_and_other_shapes(family: str, intermediate: int, tmp_path: Path) -> None:
    """2I == H, I == H and I > H: no layout is guessed from a shape."""
    field = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    checkpoint = save_tiny(tmp_path, family, **{field: intermediate})
    config = QMoEConfig(experts_blocksize=32, quantize_linears=False)
    model = load(checkpoint, config, dtype=torch.float32)
    expected = logits(float_twin(model, checkpoint))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert_bytes_are_bitsandbytes_own(model, checkpoint, family, "nf4", torch.float32)


@pytest.mark.parametrize("intermediate", [18, 48, 80, 100])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_input_features_that_no_block_divides(family: str, intermediate: int, tmp_path: Path) -> None:
    """Blocks that cross rows of the down projection still give the float model's logits."""
    checkpoint = save_tiny(tmp_path, family, intermediate_size=intermediate)
    model = load(checkpoint, QMoEConfig(quantize_linears=False), dtype=torch.float32)
    assert_bytes_are_bitsandbytes_own(model, checkpoint, family, "nf4", torch.float32)
    expected = logits(float_twin(model, checkpoint))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])
def test_linears_whose_rows_no_block_divides(how: str, tmp_path: Path) -> None:
    """A linear of 96 input features computes with its weight up to nf4's error, like one of 64."""
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=4)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    model = load(tmp_path, QMoEConfig()) if how == "from_pretrained" else quantize_experts(load(tmp_path))
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        for linear, features in ((mlp.up_proj, 64), (mlp.down_proj, 96)):
            name = "up_proj" if features == 64 else "down_proj"
            weight = getattr(plain.model.layers[0].mlp, name).weight
            assert linear.in_features == features
            assert relative_error(linear(torch.eye(features)).t(), weight) < 0.11


# -- a model in memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"experts_double_quant": True, "bnb_4bit_use_double_quant": True},
        {"experts_quant_type": "int8", "experts_blocksize": 128},
        {"experts_quant_type": "bf16", "quantize_linears": False},
        {"bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
        {"experts_overrides": {"layers.0": "fp8"}, "modules_to_not_convert": ["layers.1.mlp.experts", "q_proj"]},
    ],
    ids=["defaults", "double_quant", "int8", "bf16_experts_only", "linear_options", "overrides_and_skips"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_experts_equals_from_pretrained(
    family: str, fields: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A model quantized in memory is in every tensor, logit and saved byte the one that is quantized while loading."""
    read = load(tiny_checkpoints[family], QMoEConfig(**fields))
    float_model = load(tiny_checkpoints[family])
    made = quantize_experts(float_model, QMoEConfig(**fields))
    assert made is float_model
    assert_same_tensors(made.state_dict(), read.state_dict())
    assert torch.equal(logits(made), logits(read))
    read.save_pretrained(tmp_path / "read")
    made.save_pretrained(tmp_path / "made")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "read" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()
    assert torch.equal(logits(load(tmp_path / "made")), logits(read))


@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_experts_leaves_the_same_parameters_trainable(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """The same parameters require gradients after either way of quantizing: all float ones, biases included."""
    for model in (load(tiny_checkpoints[family], QMoEConfig()), quantize_experts(load(tiny_checkpoints[family]))):
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trainable == {name for name, p in model.named_parameters() if p.is_floating_point()}


def test_quantize_experts_default_config(tiny_checkpoints: dict[str, Path]) -> None:
    """Without a config the defaults are used."""
    made = quantize_experts(load(tiny_checkpoints["olmoe"]))
    assert made.config.quantization_config.to_dict() == QMoEConfig().to_dict()
    assert_same_tensors(made.state_dict(), load(tiny_checkpoints["olmoe"], QMoEConfig()).state_dict())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_quantize_experts_keeps_the_mode(mode: str) -> None:
    """Training mode stays what it was, in every submodule."""
    model = tiny_model("qwen3_moe").train(mode == "train")
    quantize_experts(model)
    assert {module.training for module in model.modules()} == {mode == "train"}


# -- other ways in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_base_model(
    family: str, tiny_checkpoints: dict[str, Path], packed_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The model without its head loads from either checkpoint, saves, and loads into the one with a head."""
    full = load(packed_checkpoints[family])
    base = AutoModel.from_pretrained(tiny_checkpoints[family], quantization_config=QMoEConfig())
    base.save_pretrained(tmp_path)
    expected = full.model.state_dict()
    for loaded in (
        base,
        AutoModel.from_pretrained(packed_checkpoints[family]),
        AutoModel.from_pretrained(tmp_path),
        load(tmp_path).model,
    ):
        assert_same_tensors(loaded.state_dict(), expected)
    with torch.no_grad():
        hidden = [m(token_ids()).last_hidden_state for m in (base, full.model)]
    assert torch.equal(*hidden)


@pytest.mark.parametrize("device_map", ["cpu", "auto", "sequential", {"": "cpu"}], ids=str)
def test_device_map(device_map: object, tiny_checkpoints: dict[str, Path]) -> None:
    """However the one device is named, the same tensors are loaded."""
    model = load(tiny_checkpoints["gpt_oss"], QMoEConfig(), device_map=device_map)
    assert_same_tensors(model.state_dict(), load(tiny_checkpoints["gpt_oss"], QMoEConfig()).state_dict())


def test_state_dict_in_memory(tiny_checkpoints: dict[str, Path]) -> None:
    """A state dict that is passed in is packed like one on disk."""
    path = tiny_checkpoints["qwen3_moe"]
    model = Qwen3MoeForCausalLM.from_pretrained(
        None,
        config=tiny_config("qwen3_moe"),
        state_dict=tensors_on_disk(path),
        quantization_config=QMoEConfig(),
        dtype=torch.bfloat16,
    )
    assert_same_tensors(model.state_dict(), load(path, QMoEConfig()).state_dict())


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_pickled_checkpoint(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint in ``pytorch_model.bin`` is packed to the same bytes."""
    torch.save(tensors_on_disk(tiny_checkpoints[family]), tmp_path / "pytorch_model.bin")
    tiny_config(family).save_pretrained(tmp_path)
    model = load(tmp_path, QMoEConfig(), dtype=torch.bfloat16)
    assert_same_tensors(packed_state(model), packed_state(load(tiny_checkpoints[family], QMoEConfig())))


@pytest.mark.parametrize("quantize_linears", [True, False])
def test_uneven_linears_are_named(quantize_linears: bool, tmp_path: Path, warnings_logged: list[str]) -> None:
    """Linears that bitsandbytes would compute wrongly stay float, and a warning says which."""
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe", intermediate_size=96, mlp_only_layers=[0])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(tmp_path, QMoEConfig(quantize_linears=quantize_linears))
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    named = [message for message in warnings_logged if "layers.0.mlp.down_proj" in message]
    assert len(named) == quantize_linears
