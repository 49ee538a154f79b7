"""`examples/qlora_trainer.py`: end to end, under accelerate, resumed, and on text of one's own."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import arguments  # noqa: E402
import qlora_trainer  # noqa: E402
import quantize_checkpoint  # noqa: E402
from tiny_model import create_tiny_model  # noqa: E402


TINY = ROOT / "configs" / "qlora_tiny_cpu.yaml"
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint; read only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    create_tiny_model(folder)
    return folder


def flags(**values: object) -> list[str]:
    """``--key value`` for each."""
    return [str(part) for key, value in values.items() for part in (f"--{key}", value)]


def run_script(launcher: list[str], cwd: Path, **values: object) -> str:
    """Standard output of the script, run from the tiny YAML file and `values` as flags."""
    result = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / "qlora_trainer.py", TINY, *flags(**values)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(tiny: Path, output_dir: Path, **values: object) -> dict[str, float]:
    """Runs the script in this process for a few steps; what it reports."""
    values = {"model_name_or_path": tiny, "max_steps": 3, "disable_tqdm": "true", **values}
    qlora_trainer.main([str(TINY), *flags(**values, output_dir=output_dir)])
    return json.loads((output_dir / "held_out_results.json").read_text(encoding="utf-8"))


def data_arguments(**values: object) -> arguments.DataArguments:
    return arguments.DataArguments(**values)


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        pytest.param(ACCELERATE, 1, id="accelerate"),
        pytest.param(TORCHRUN, 2, id="two-processes", marks=pytest.mark.slow),
    ],
)
def test_trains_from_the_tiny_yaml(launcher: list[str], processes: int, tmp_path: Path) -> None:
    """Makes the model, trains, lowers the held-out loss, and saves an adapter that gives this loss again."""
    base, output = tmp_path / "new" / "tiny", tmp_path / "out"
    printed = run_script(launcher, tmp_path, model_name_or_path=base, output_dir=output, max_steps=20, save_steps=20)
    results = json.loads((output / "held_out_results.json").read_text(encoding="utf-8"))
    assert results["step"] == 20
    assert results["loss_after"] < results["loss_before"] - 0.05
    line = f"step 20: held-out loss {results['loss_before']:.4f} before, {results['loss_after']:.4f} after training"
    assert printed.count(line) == 1  # by one process only
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]

    _, packing_args, *_ = arguments.parse_arguments(arguments.TRAINER_ARGUMENTS, [str(TINY)])
    model = arguments.ModelArguments(str(base), dtype="bfloat16", device_map="cpu").load(packing_args)
    model = PeftModel.from_pretrained(model, output).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    training, held_out = qlora_trainer.make_blocks(data_arguments(block_size=64, max_eval_samples=32), tokenizer)
    state = json.loads((output / "checkpoint-20" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["epoch"] == pytest.approx(20 / math.ceil(len(training) / (8 * processes)))
    tokens = torch.tensor([sample["input_ids"] for sample in held_out])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    # 0.01: the trained model has float32 norms and head, this one bfloat16.
    assert float(loss) == pytest.approx(results["loss_after"], abs=0.01)


def test_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """From the checkpoint of step 3, steps 4 to 6 run, and the adapter is the same to the last bit."""
    values = {"model_name_or_path": tmp_path / "tiny", "output_dir": tmp_path / "out", "lora_dropout": 0.1}
    values |= {"max_steps": 6, "save_steps": 3, "logging_steps": 1}
    run_script([], tmp_path, **values)
    adapter, last = tmp_path / "out" / "adapter_model.safetensors", tmp_path / "out" / "checkpoint-6"
    expected, history = load_file(adapter), json.loads((last / "trainer_state.json").read_text())["log_history"]
    adapter.unlink()
    shutil.rmtree(last)

    printed = run_script([], tmp_path, **values, resume_from_checkpoint="last")
    assert printed.count("'grad_norm':") == 3
    state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 6
    assert [(row["step"], row["loss"]) for row in state["log_history"] if "loss" in row] == [
        (row["step"], row["loss"]) for row in history if "loss" in row
    ]
    found = load_file(adapter)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_resume_without_a_checkpoint_raises(tiny: Path, tmp_path: Path) -> None:
    """``last`` does not start from scratch in silence."""
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        train(tiny, tmp_path, resume_from_checkpoint="last")


def test_checkpointing_modes_agree(tiny: Path, tmp_path: Path) -> None:
    """Without checkpointing, and with either value of `use_reentrant`, the adapter is the same to the last bit."""
    modes = {
        "off": {"activation_checkpointing": "false"},
        "new": {"activation_checkpointing_kwargs": '{"use_reentrant": false}'},
        "reentrant": {"activation_checkpointing_kwargs": '{"use_reentrant": true}'},
    }
    adapters = {}
    for name, values in modes.items():
        train(tiny, tmp_path / name, **values)
        adapters[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for key, tensor in adapters["off"].items() if "lora_B" in key)
    for name in ("new", "reentrant"):
        for key, tensor in adapters["off"].items():
            assert torch.equal(adapters[name][key], tensor), f"{name}: {key}"


def test_trains_what_quantize_checkpoint_wrote(tiny: Path, tmp_path: Path) -> None:
    """A packed folder and the float checkpoint it came from train alike."""
    packed = tmp_path / "packed"
    quantize_checkpoint.main([str(TINY), *flags(model_name_or_path=tiny, quantized_model_dir=packed)])
    assert train(packed, tmp_path / "a") == train(tiny, tmp_path / "b")


def test_experts_and_embeddings_stay_as_they_are(tiny: Path, tmp_path: Path) -> None:
    """Only adapters are saved, on the modules asked for, with the rank asked for."""
    train(tiny, tmp_path, lora_r=3, lora_target_modules="v_proj", lora_target_parameters="experts.down_proj")
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    names = {key.partition(".layers.")[2].partition(".")[2].removesuffix(".weight") for key in adapter}
    wrapped = ("self_attn.v_proj", "mlp.experts")
    assert names == {f"{path}.{factor}" for path in wrapped for factor in ("lora_A", "lora_B")}
    experts = AutoConfig.from_pretrained(tiny).num_experts
    for key, tensor in adapter.items():
        assert (3 * experts if ".experts." in key else 3) in tensor.shape
        assert tensor.any()
    config = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(tiny)
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path)
    assert stock(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_own_text(suffix: str, tiny: Path, tmp_path: Path) -> None:
    """A text file is one document; a JSON line is one, read from the field that is named."""
    documents = [f"line {i} of a text, with a separator \u2028 inside\n" for i in range(40)]
    path = tmp_path / f"text{suffix}"
    lines = [json.dumps({"body": document}, ensure_ascii=False) + "\n" for document in documents]
    path.write_text("".join(documents if suffix == ".txt" else lines), encoding="utf-8")
    data_args = data_arguments(train_file=str(path), text_field="body", block_size=16, validation_split_percentage=10)
    assert qlora_trainer.read_documents(data_args) == (["".join(documents)] if suffix == ".txt" else documents)

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    training, held_out = qlora_trainer.make_blocks(data_args, tokenizer)
    assert len(held_out) == round(0.1 * (len(training) + len(held_out)))
    assert {len(sample["input_ids"]) for sample in training + held_out} == {16}
    assert all(sample["labels"] == sample["input_ids"] for sample in training)
    tokens = [token for sample in training + held_out for token in sample["input_ids"]]
    text = tokenizer.decode(tokens)
    joined = "".join(documents) if suffix == ".txt" else tokenizer.eos_token.join(documents)
    assert joined.startswith(text[: len(text) - 8])  # a character may be cut in two at the end
    assert train(tiny, tmp_path / "out", train_file=path, text_field="body", block_size=16)["step"] == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.csv", "a,b", r"text\.csv': the name must end in \.txt or \.jsonl"),
        ("text.jsonl", '{"body": "x"}\n', "without the field 'text'"),
        ("text.txt", "short", "tokens make 0 blocks of block_size=64"),
    ],
)
def test_unusable_text_raises(name: str, content: str, message: str, tiny: Path, tmp_path: Path) -> None:
    """The file, and what is wrong with it, are in the message."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        train(tiny, tmp_path / "out", train_file=path)
