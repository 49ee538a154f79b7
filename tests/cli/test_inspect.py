"""The command line of an inspection: what it prints, and how it fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_qmoe import QMoEConfig
from hf_qmoe.cli import main
from hf_qmoe.inspection import inspect_checkpoint
from hf_qmoe.memory import storage_bytes
from hf_qmoe.report import parse_size, size_text
from tests.support.checkpoints import load


@pytest.fixture
def folder(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    return shutil.copytree(tiny_checkpoints["qwen3_moe"], tmp_path / "qwen3_moe")


def edit_config(folder: Path, **changes: object) -> None:
    """Changes fields of a config; `None` removes one."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(["inspect", *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("hf-qmoe inspect: error: ")
    assert output.err.count("\n") == 1
    return output.err.removeprefix("hf-qmoe inspect: error: ").strip()


def test_prints_tables(tiny_checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_checkpoints["qwen3_moe"]
    assert main(["inspect", str(path), "--memory", "250KiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    size = storage_bytes(load(path, QMoEConfig()))
    assert lines[0].startswith("Qwen3MoeForCausalLM (qwen3_moe), ")
    assert lines[1].startswith("safetensors files: 1, tensors: ")
    parts = [line.split("  ")[0] for line in lines[4:9]]
    assert parts == ["routed experts", "router", "linears, shared experts", "embeddings, head", "norms, others"]
    (row,) = [line.split() for line in lines if line.startswith("qmoe nf4  ")]
    assert row[2] == f"{size:,}"
    assert " ".join(row[-4:]) == f"fits, {size_text(250 * 1024 - size)} left"
    (stock,) = [line for line in lines if line.startswith("bitsandbytes  ")]
    assert "does not fit, " in stock
    assert "bitsandbytes leaves 288.0 KiB of routed experts in bfloat16" in lines[-2]
    assert lines[-1].startswith("Weights only: activations, KV cache, LoRA adapters")


def test_prints_json(tiny_checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_checkpoints["mixtral"]
    options = ["--experts-quant-type", "int8", "--experts-blocksize", "128", "--experts-double-quant"]
    assert main(["inspect", str(path), "--json", "--memory", "1MB", *options]) == 0
    config = QMoEConfig(experts_quant_type="int8", experts_blocksize=128, experts_double_quant=True)
    found = json.loads(capsys.readouterr().out)
    assert found == inspect_checkpoint(path, config, memory=1_000_000).to_dict()
    assert found["packed"]["nbytes"] == storage_bytes(load(path, config))
    assert found["packed"]["name"] == "qmoe int8 block 128 double quant"


def test_a_packed_folder(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tiny_checkpoints["olmoe"], QMoEConfig(experts_quant_type="fp8")).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "packed by hf_qmoe already" in output
    (row,) = [line.split() for line in output.splitlines() if line.startswith("qmoe ")]
    assert row[:3] == ["qmoe", "fp8", f"{storage_bytes(load(tmp_path)):,}"]
    assert "qmoe nf4" not in output


def test_a_dense_model_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(**sizes, vocab_size=128, num_key_value_heads=2, dtype="bfloat16").save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "The model has no routed experts." in output
    assert "no safetensors files: only config.json was read" in output
    assert [line.split()[0] for line in output.splitlines() if "KiB" in line][-3:] == [
        "bfloat16",
        "bitsandbytes",
        "qmoe",
    ]


def test_a_mixture_without_mixture_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config that declares experts and has none cannot be loaded with `QMoEConfig`; the rest is shown."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    edit_config(folder, decoder_sparse_step=100)
    assert main(["inspect", str(folder)]) == 0
    assert "Impossible as qmoe: Qwen3MoeForCausalLM declares experts" in capsys.readouterr().out


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(folder)
    assert error_of([str(tmp_path / "none")], capsys) == f"there is no folder {tmp_path / 'none'}"
    assert "If it is a model of the Hub, download it first" in error_of(["some-org/Some-Model.1"], capsys)
    assert "is a file" in error_of([str(folder / "config.json")], capsys)
    assert "unknown quant_type 'nf5'" in error_of([where, "--experts-quant-type", "nf5"], capsys)
    assert "experts_blocksize=48 is not supported" in error_of([where, "--experts-blocksize", "48"], capsys)

    shard = folder / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert f"{shard} is truncated" in error_of([where], capsys)
    shard.write_bytes(b"\xff" * 100)
    assert f"{shard} is truncated" in error_of([where], capsys)
    shard.unlink()

    edit_config(folder, num_experts="many")
    assert error_of([where], capsys).startswith(f"no model can be built from the config of {folder}: ")
    edit_config(folder, num_experts=4, model_type="unheard_of")
    assert "does not know the model_type 'unheard_of'" in error_of([where], capsys)
    edit_config(folder, auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    assert "needs Python code of its own" in error_of([where], capsys)
    edit_config(
        folder, model_type="qwen3_moe", quantization_config={"quant_method": "qmoe", "experts_quant_type": "x"}
    )
    assert "quantization_config of" in error_of([where], capsys)
    (folder / "config.json").write_text("[1]")
    assert "does not hold a JSON object" in error_of([where], capsys)
    (folder / "config.json").write_text("{")
    assert "is not valid JSON" in error_of([where], capsys)
    (folder / "config.json").unlink()
    assert error_of([where], capsys) == f"{folder} has no config.json"


@pytest.mark.parametrize("memory", ["24 apples", "-1", "GiB", "1.2.3GB", "24G", ""])
def test_wrong_sizes_are_wrong_usage(memory: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(folder), f"--memory={memory}"])
    assert stop.value.code == 2
    assert "is not a size; write bytes, or a unit as in 24GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8000", 8000),
        ("0", 0),
        ("8000MB", 8_000_000_000),
        ("24GB", 24_000_000_000),
        ("24GiB", 24 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("10 kb", 10_000),
        ("0.1GB", 100_000_000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


def test_help_of_the_module() -> None:
    command = [sys.executable, "-m", "hf_qmoe.cli", "inspect", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: hf-qmoe inspect [-h] [--memory SIZE] [--json]")
