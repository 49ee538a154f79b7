"""`inspect_checkpoint` knows without weights, to the byte, what really loaded models hold."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, Qwen3MoeConfig

from hf_qmoe import QMoEConfig, report
from hf_qmoe.inspection import Inspection, InspectionError, inspect_checkpoint
from hf_qmoe.memory import storage_bytes
from tests.lora.families import build
from tests.support.checkpoints import edited, load, tensors_on_disk
from tests.support.models import FAMILIES, save_tiny


FORMATS: dict[str, dict[str, object]] = {
    "nf4": {},
    "fp8": {"experts_quant_type": "fp8"},
    "bf16": {"experts_quant_type": "bf16"},
    "nf4_32": {"experts_blocksize": 32},
    "fp4_128": {"experts_quant_type": "fp4", "experts_blocksize": 128},
    "nf4_double": {"experts_double_quant": True, "bnb_4bit_use_double_quant": True},
    "int8_4096_double": {"experts_quant_type": "int8", "experts_blocksize": 4096, "experts_double_quant": True},
    "parametrized": {"experts_module": "parametrize", "experts_double_quant": True},
    "experts_alone": {"quantize_linears": False},
    "bf16_storage": {"bnb_4bit_quant_storage": "bfloat16"},
    "skipped": {"modules_to_not_convert": ["layers.0.mlp.experts", "v_proj"]},
    "overrides": {"experts_overrides": {"layers.1.mlp.experts": "fp16"}},
}
#: Shared experts, router biases kept in float32, latent attention, Mamba, linears of odd sizes, other experts modules.
MORE_FAMILIES = ("deepseek_v3", "qwen2_moe", "qwen3_next", "nemotron_h", "gemma4", "llama4", "afmoe", "qwen3_vl_moe")
STOCK = BitsAndBytesConfig(load_in_4bit=True)


def check(inspection: Inspection, model: PreTrainedModel) -> None:
    """`inspection` says of its config what `model`, loaded with it, holds."""
    assert inspection.packed.nbytes == storage_bytes(model) == model.get_memory_footprint()
    assert inspection.report == report(model)
    assert inspection.parameters == model.num_parameters()
    assert sum(part.packed for part in inspection.parts) == inspection.packed.nbytes
    assert sum(part.bitsandbytes for part in inspection.parts) == inspection.bitsandbytes.nbytes
    assert sum(part.nbytes for part in inspection.parts) == inspection.unquantized.nbytes


@pytest.mark.parametrize("fields", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bytes_are_exact(family: str, fields: dict[str, object], tiny_checkpoints: dict[str, Path]) -> None:
    inspection = inspect_checkpoint(tiny_checkpoints[family], QMoEConfig(**fields))
    check(inspection, load(tiny_checkpoints[family], QMoEConfig(**fields)))
    same = [size for size in inspection.formats if size.name == inspection.packed.name]
    assert same == [inspection.packed]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_format_is_exact(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """The rows of the table, of which a user reads all but loads one."""
    sizes = inspect_checkpoint(tiny_checkpoints[family]).formats
    assert [(size.quant_type, size.double_quant) for size in sizes] == [
        *(("nf4", False), ("nf4", True), ("fp4", False), ("int8", False)),
        *(("fp8", False), ("bf16", False), ("fp16", False)),
    ]
    for size in sizes:
        config = QMoEConfig(experts_quant_type=size.quant_type, experts_double_quant=size.double_quant)
        assert size.nbytes == storage_bytes(load(tiny_checkpoints[family], config))
        assert size.blocksize == (None if size.quant_type in ("bf16", "fp16") else 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_float_and_stock_bitsandbytes_are_exact(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    inspection = inspect_checkpoint(tiny_checkpoints[family])
    assert inspection.unquantized.nbytes == storage_bytes(load(tiny_checkpoints[family]))
    stock = load(tiny_checkpoints[family], STOCK)
    assert inspection.bitsandbytes.nbytes == storage_bytes(stock)
    # transformers' own figure knows nothing of scales and codebooks.
    states = [m.weight.quant_state for m in stock.modules() if isinstance(m, Linear4bit)]
    scales = sum(state.absmax.nbytes + state.code.nbytes for state in states)
    assert inspection.bitsandbytes.nbytes == stock.get_memory_footprint() + scales
    experts = sum(p.nbytes for name, p in stock.named_parameters() if ".experts." in name)
    assert inspection.bitsandbytes.experts == inspection.bitsandbytes.experts_float == experts
    assert inspection.unquantized.experts_float == experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_other_families_and_dtypes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(family).to(dtype)
    model.save_pretrained(tmp_path)
    model_class = type(model)
    inspection = inspect_checkpoint(tmp_path)
    check(inspection, model_class.from_pretrained(tmp_path, quantization_config=QMoEConfig()))
    assert inspection.unquantized.nbytes == storage_bytes(model_class.from_pretrained(tmp_path))
    stock = model_class.from_pretrained(tmp_path, quantization_config=STOCK)
    assert inspection.bitsandbytes.nbytes == storage_bytes(stock)
    on_disk = tensors_on_disk(tmp_path)
    assert sum(part.stored for part in inspection.parts) == sum(t.nbytes for t in on_disk.values())
    experts, router = (next(p for p in inspection.parts if p.name == name) for name in ("routed experts", "router"))
    names = {
        "experts": r".experts.",
        "router": (".gate.", ".router.", "shared_expert_gate", "e_score_correction_bias"),
    }
    assert experts.stored == sum(t.nbytes for n, t in on_disk.items() if names["experts"] in n and "shared" not in n)
    assert 0 < router.stored <= sum(t.nbytes for n, t in on_disk.items() if any(r in n for r in names["router"]))


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    inspection = inspect_checkpoint(tmp_path)
    check(inspection, load(tmp_path, QMoEConfig()))
    assert inspection.unquantized.nbytes == storage_bytes(load(tmp_path))
    (embeddings,) = [part for part in inspection.parts if part.name == "embeddings, head"]
    assert (embeddings.parameters, embeddings.stored) == (128 * 64, 2 * 128 * 64)


def test_parts_are_stored_where_the_files_say(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Tensors on disk, which have other names than parameters, are counted with the part they become."""

    def add_a_layer(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(5, 3, dtype=torch.float64)

    for family in FAMILIES:
        buffers = sum(buffer.nbytes for buffer in load(tiny_checkpoints[family]).buffers())  # on no disk
        for part in inspect_checkpoint(tiny_checkpoints[family]).parts:
            assert part.nbytes == part.stored + (buffers if part.name == "norms, others" else 0)
    parts = inspect_checkpoint(edited(tiny_checkpoints["qwen3_moe"], tmp_path / "more", add_a_layer)).parts
    unused = parts[-1]
    assert (unused.name, unused.stored, unused.parameters, unused.nbytes) == ("not in the model", 120, 0, 0)


@pytest.mark.parametrize("fields", [FORMATS[n] for n in ("nf4_double", "parametrized", "skipped", "overrides")])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_packed_folder_is_what_it_was_saved_as(
    family: str, fields: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    load(tiny_checkpoints[family], QMoEConfig(**fields)).save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path, QMoEConfig(experts_quant_type="int8"))
    check(inspection, load(tmp_path))
    assert inspection.quantized_by == "qmoe"
    assert inspection.packed.quant_type == "nf4"
    assert inspection.formats == []
    experts = inspection.parts[0]
    assert experts.name == "routed experts"
    # Experts lie on disk as they lie in memory.
    assert experts.stored == experts.packed == inspection.packed.experts
    assert "packed by hf_qmoe already" in str(inspection)


def test_no_weights_are_read(sharded_checkpoint: Path, tmp_path: Path) -> None:
    """Files of which only the headers are left, at their full length, give the same answer."""
    hollow = shutil.copytree(sharded_checkpoint, tmp_path / "hollow")
    shards = sorted(hollow.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        size = shard.stat().st_size
        with shard.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
        os.truncate(shard, 8 + header_bytes)
        os.truncate(shard, size)
    expected, found = (inspect_checkpoint(path).to_dict() for path in (sharded_checkpoint, hollow))
    assert {**found, "path": ""} == {**expected, "path": ""}
    on_disk = tensors_on_disk(sharded_checkpoint)
    assert found["stored"] == {
        "files": [shard.name for shard in shards],
        "missing": [],
        "tensors": len(on_disk),
        "nbytes": sum(t.nbytes for t in on_disk.values()),
        "dtypes": {"BF16": sum(t.nbytes for t in on_disk.values())},
    }


@pytest.mark.parametrize("missing", ["one", "all"])
def test_missing_shards_are_named(sharded_checkpoint: Path, tmp_path: Path, missing: str) -> None:
    """What is known without them is said all the same."""
    folder = shutil.copytree(sharded_checkpoint, tmp_path / "part")
    shards = sorted(folder.glob("*.safetensors"))
    gone = shards[1:2] if missing == "one" else shards
    for shard in gone:
        shard.unlink()
    inspection = inspect_checkpoint(folder)
    assert inspection.stored.missing == [shard.name for shard in gone]
    assert inspection.stored.files == [shard.name for shard in shards if shard not in gone]
    assert inspection.packed == inspect_checkpoint(sharded_checkpoint).packed
    assert f"MISSING files: {len(gone)} ({gone[0].name}" in str(inspection)


def test_damaged_files(sharded_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded_checkpoint, tmp_path / "damaged")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(InspectionError, match=f"{second.name} is truncated"):
        inspect_checkpoint(folder)
    shutil.copy(first, second)  # whole, but with another's tensors
    with pytest.raises(InspectionError, match=f"{second.name} is damaged: it lacks model"):
        inspect_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InspectionError, match=r"index\.json is damaged"):
        inspect_checkpoint(folder)


def test_a_30b_model_from_its_config_alone(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 768 x 2048 twice and 2048 x 768."""
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.stored is None
    weights = 48 * 128 * 3 * 768 * 2048
    experts = inspection.parts[0]
    assert (experts.name, experts.parameters, experts.nbytes) == ("routed experts", weights, 2 * weights)

    def metadata(double_quant: str) -> int:
        text = (
            f'{{"double_quant":{double_quant},"format_version":1,"quant_type":"nf4","stacks":{{"down_proj":'
            '{"blocksize":64,"in_features":768,"out_features":2048},"gate_up_proj":'
            '{"blocksize":64,"in_features":2048,"out_features":1536}}}'
        )
        return 48 * (len(text) + -len(text) % 16)

    assert inspection.packed.experts == experts.packed == weights // 2 + weights // 64 * 4 + metadata("false")
    double = next(size for size in inspection.formats if size.double_quant)
    # A byte for each scale, four for each 256 of them, and an offset for each of two stacks.
    scales = weights // 64 + weights // 64 // 256 * 4 + 48 * 128 * 2 * 4
    assert double.experts == weights // 2 + scales + metadata("true")
    attention = 48 * (2048 * 4096 * 2 + 2048 * 512 * 2)
    (linears,) = [part for part in inspection.parts if part.name == "linears, shared experts"]
    assert linears.parameters == attention
    assert linears.packed == linears.bitsandbytes == attention // 2 + attention // 64 * 4 + 48 * 4 * 16 * 4
    (head,) = [part for part in inspection.parts if part.name == "embeddings, head"]
    assert head.packed == head.nbytes == 2 * 151936 * 2048 * 2
    assert inspection.parameters == 30_532_122_624


def test_a_model_without_experts(dense_checkpoint: Path) -> None:
    inspection = inspect_checkpoint(dense_checkpoint)
    check(inspection, load(dense_checkpoint, QMoEConfig()))
    assert inspection.bitsandbytes.nbytes == storage_bytes(load(dense_checkpoint, STOCK))
    assert not inspection.has_experts
    assert [size.name for size in inspection.sizes] == ["bfloat16", "bitsandbytes", "qmoe"]
    assert all(part.name != "routed experts" for part in inspection.parts)
    assert "The model has no routed experts." in str(inspection)


def test_formats_that_do_not_suit_say_why(odd_checkpoint: Path) -> None:
    """Rows of 33 weights are not packed in 4 bit; in 8 bit they are."""
    inspection = inspect_checkpoint(odd_checkpoint)
    sizes = {size.name: size for size in inspection.sizes}
    assert "in_features=33 is odd" in sizes["qmoe nf4"].problem
    assert sizes["qmoe nf4"].nbytes is None
    assert inspection.packed == sizes["qmoe nf4"]
    assert inspection.report is None
    config = QMoEConfig(experts_quant_type="int8")
    assert sizes["qmoe int8"].nbytes == storage_bytes(load(odd_checkpoint, config))
    assert "Impossible as qmoe nf4, qmoe nf4 double quant" in str(inspection)
    assert all("packed" not in part or part["packed"] is None for part in inspection.to_dict()["parts"])
    narrow = inspect_checkpoint(odd_checkpoint, QMoEConfig(experts_blocksize=32))
    assert "blocksize=32 is not supported for int8" in {s.name: s for s in narrow.sizes}["qmoe int8 block 32"].problem


def test_experts_that_no_block_size_divides(
    indivisible_checkpoints: dict[str, Path], warnings_logged: list[str]
) -> None:
    """They stay in full precision, which the table says; the warning is given once, not for each format."""
    path = indivisible_checkpoints["qwen3_moe"]
    inspection = inspect_checkpoint(path)
    check(inspection, load(path, QMoEConfig()))
    assert inspection.packed.experts_float == inspection.packed.experts == inspection.parts[0].nbytes
    bf16 = next(size for size in inspection.formats if size.quant_type == "bf16")
    assert bf16.experts_float == 0
    warnings_logged.clear()
    inspect_checkpoint(path)
    assert sum("stays unquantized" in message for message in warnings_logged) == 2


@pytest.mark.parametrize(
    ("saved", "method"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"load_in_4bit": True}, "bitsandbytes 4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes 8bit"),
    ],
)
def test_foreign_methods_are_named(
    saved: dict[str, object], method: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoints["gpt_oss"], tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": saved}))
    inspection = inspect_checkpoint(folder)
    assert inspection.quantized_by == method
    assert f"quantized already: {method}" in str(inspection)
    plain = inspect_checkpoint(tiny_checkpoints["gpt_oss"])
    if method == "bitsandbytes 8bit":  # no load reads it
        assert "cannot be read here" in inspection.packed.problem
        assert inspection.formats == []
        return
    assert inspection.packed == plain.packed
    if method == "bitsandbytes 4bit":  # its bytes are kept
        assert [(size.quant_type, size.double_quant) for size in inspection.formats] == [("fp4", False)]
    else:
        assert inspection.formats == plain.formats


def test_bytes_that_nothing_explains(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Matrices in 8 bit under a config without `quantization_config`, whose other fields lack the dtype."""

    def to_bytes(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    folder = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "bytes", to_bytes)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    inspection = inspect_checkpoint(folder)
    assert inspection.quantized_by == "unknown method, matrices in 8 bit"
    assert inspection.dtype == "bfloat16"
    assert inspection.stored.dtypes["F8_E4M3"] == 128 * 64


def test_class_of_the_model(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The one that the config names; else that of `AutoModelForCausalLM`."""
    folder = shutil.copytree(tiny_checkpoints["olmoe"], tmp_path / "classes")
    config = json.loads((folder / "config.json").read_text())
    for named, found in (
        (["OlmoeModel"], "OlmoeModel"),
        (["NoSuchClass"], "OlmoeForCausalLM"),
        (None, "OlmoeForCausalLM"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": named}))
        inspection = inspect_checkpoint(folder)
        assert inspection.model_class == found
        model_class = getattr(transformers, found)
        check(inspection, model_class.from_pretrained(folder, quantization_config=QMoEConfig()))


def test_one_dtype_for_all_parts(tmp_path: Path) -> None:
    """That of the config itself, whatever the configs inside it say, as in `from_pretrained`."""
    model = build("qwen3_vl_moe").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.unquantized.nbytes == storage_bytes(type(model).from_pretrained(tmp_path))
    check(inspection, type(model).from_pretrained(tmp_path, quantization_config=QMoEConfig()))


def test_memory(tiny_checkpoints: dict[str, Path]) -> None:
    limit = inspect_checkpoint(tiny_checkpoints["mixtral"]).packed.nbytes
    for memory in (limit, limit - 1):
        inspection = inspect_checkpoint(tiny_checkpoints["mixtral"], memory=memory)
        entries = {entry["name"]: entry for entry in inspection.to_dict()["sizes"]}
        assert entries["qmoe nf4"]["left"] == memory - limit == inspection.packed.left(memory)
        assert entries["qmoe nf4"]["fits"] is (memory == limit)
        assert entries["qmoe nf4 double quant"]["fits"] is True
        assert entries["bitsandbytes"]["fits"] is False
    assert "does not fit, 1 bytes too much" in str(inspection)
    assert "fits" not in inspect_checkpoint(tiny_checkpoints["mixtral"]).to_dict()["sizes"][0]


def test_json_round_trip(tiny_checkpoints: dict[str, Path]) -> None:
    for memory in (None, 10**6):
        inspection = inspect_checkpoint(str(tiny_checkpoints["qwen3_moe"]), memory=memory)
        assert json.loads(inspection.to_json()) == inspection.to_dict()


def test_the_callers_config_is_untouched(tiny_checkpoints: dict[str, Path]) -> None:
    config = QMoEConfig(experts_overrides={"layers.0.mlp.experts": "bf16"}, modules_to_not_convert=["v_proj"])
    before = config.to_dict()
    inspect_checkpoint(tiny_checkpoints["qwen3_moe"], config)
    assert config.to_dict() == before


def test_auto_class_agrees(tiny_checkpoints: dict[str, Path]) -> None:
    """The class named by the config is the one that users load."""
    for family in FAMILIES:
        config = transformers.AutoConfig.from_pretrained(tiny_checkpoints[family])
        with torch.device("meta"):
            expected = type(AutoModelForCausalLM.from_config(config)).__name__
        assert inspect_checkpoint(tiny_checkpoints[family]).model_class == expected
