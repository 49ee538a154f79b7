"""`examples/quantize_checkpoint.py`, the arguments that both scripts share, and the files in `configs/`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig, PreTrainedConfig, Qwen3MoeConfig

from hf_qmoe import ExpertsNbit, QMoEConfig


ROOT = Path(__file__).parents[2]
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "configs"
sys.path.insert(0, str(EXAMPLES))

import arguments  # noqa: E402
import quantize_checkpoint  # noqa: E402
from tiny_model import create_tiny_model, make_tokenizer  # noqa: E402


TINY = CONFIGS / "qlora_tiny_cpu.yaml"
#: Argument classes of each script.
PARSERS = {"quantize_checkpoint": arguments.QUANTIZER_ARGUMENTS, "qlora_trainer": arguments.TRAINER_ARGUMENTS}
all_configs = pytest.mark.parametrize("path", sorted(CONFIGS.glob("qlora_*.yaml")), ids=lambda path: path.stem)
both_parsers = pytest.mark.parametrize("script", PARSERS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint; read only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    create_tiny_model(folder)
    return folder


def parse(script: str, *argv: object) -> dict[str, object]:
    """All arguments of `script`, by name."""
    values: dict[str, object] = {}
    for group in arguments.parse_arguments(PARSERS[script], [str(arg) for arg in argv]):
        values |= vars(group)
    return values


def write_yaml(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_runs_from_the_tiny_yaml(tmp_path: Path) -> None:
    """The command of the README: makes the model, packs, saves and reads back, and the result loads on its own."""
    paths = {"--model_name_or_path": tmp_path / "new" / "tiny", "--quantized_model_dir": tmp_path / "packed"}
    flags = [str(part) for pair in paths.items() for part in pair]
    result = subprocess.run(
        [sys.executable, EXAMPLES / "quantize_checkpoint.py", TINY, *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    summary, check = result.stdout.strip().splitlines()
    assert re.fullmatch(r"0\.48 MB -> 0\.2\d MB on disk \(\d\.\d\d x\) in \d+\.\d s", summary)
    assert check.startswith("reload check passed: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "packed"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    experts = [module for module in model.modules() if isinstance(module, ExpertsNbit)]
    assert len(experts) == 2
    assert all(module.gate_up_proj.dtype == torch.uint8 for module in experts)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "packed")) == model.config.vocab_size


def test_reload_check_finds_one_changed_bit(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that changes on the disk, in an expert, is found, and the tensor it belongs to is named."""
    name = "model.layers.1.mlp.experts.down_proj"
    checksums = quantize_checkpoint.checksums

    def damage_then_sum(model: torch.nn.Module) -> dict[str, int]:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[name][3, -1, -1] ^= 1
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        monkeypatch.setattr(quantize_checkpoint, "checksums", checksums)
        return checksums(model)

    monkeypatch.setattr(quantize_checkpoint, "checksums", damage_then_sum)
    flags = {"model_name_or_path": tiny, "quantized_model_dir": tmp_path, "device_map": "cpu"}
    with pytest.raises(RuntimeError, match=rf"reads back differently: (logits, )?{re.escape(name)}$"):
        quantize_checkpoint.main([str(part) for key, value in flags.items() for part in (f"--{key}", value)])


def test_check_can_be_left_out(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--no_check_reload`` saves and reports, and does not read back."""
    flags = ["--model_name_or_path", str(tiny), "--quantized_model_dir", str(tmp_path), "--device_map", "cpu"]
    quantize_checkpoint.main([*flags, "--no_check_reload"])
    assert "reload" not in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantized_model_dir": ""}, "quantized_model_dir must be"),
        ({"quantized_model_dir": "{tiny}"}, "quantized_model_dir must be"),
        ({"model_name_or_path": "no/such/folder"}, "model_name_or_path='no/such/folder' is neither"),
        ({"model_name_or_path": ""}, "model_name_or_path='' is neither"),
        ({"experts_quant_type": "nf3"}, "nf3"),
        ({"experts_blocksize": "63"}, "experts_blocksize"),
    ],
)
def test_bad_values_raise(tiny: Path, tmp_path: Path, changes: dict[str, str], message: str) -> None:
    """What cannot work is refused before anything is written, and the message has the value."""
    values = {"model_name_or_path": str(tiny), "quantized_model_dir": str(tmp_path / "packed"), "device_map": "cpu"}
    values |= {key: value.replace("{tiny}", str(tiny)) for key, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint.main([part for key, value in values.items() for part in (f"--{key}", value)])
    assert not (tmp_path / "packed").exists()


def test_quantization_defaults_are_those_of_the_config() -> None:
    """Without any key, the scripts ask for what `QMoEConfig()` is."""
    assert QMoEConfig(**vars(arguments.QuantizationArguments())).to_dict() == QMoEConfig().to_dict()


@both_parsers
def test_flags_win_over_the_yaml(script: str, tmp_path: Path) -> None:
    """A key that is both in the file and a flag has the flag's value; the others keep the file's."""
    path = write_yaml(tmp_path / "x.yaml", experts_quant_type="fp4", experts_blocksize=128, quantize_linears=False)
    values = parse(script, path, "--experts_blocksize", 256)
    assert values["experts_quant_type"] == "fp4"
    assert values["experts_blocksize"] == 256
    assert values["quantize_linears"] is False
    assert parse(script, path, "--quantize_linears", "true")["quantize_linears"] is True


@both_parsers
def test_structured_values_of_the_yaml(script: str, tmp_path: Path) -> None:
    """Lists and mappings of the file arrive as they are."""
    overrides = {"layers.0.mlp.experts": "int8"}
    path = write_yaml(tmp_path / "x.yaml", experts_overrides=overrides, modules_to_not_convert=["layers.1"])
    values = parse(script, path)
    assert values["experts_overrides"] == overrides
    assert values["modules_to_not_convert"] == ["layers.1"]


@both_parsers
def test_misspelt_yaml_key_is_named(script: str, tmp_path: Path) -> None:
    """A key of neither script is an error that names it and what it may have been."""
    path = write_yaml(tmp_path / "x.yaml", experts_quant_typ="nf4")
    with pytest.raises(ValueError, match=r"experts_quant_typ'\]; close to \['experts_quant_type'"):
        parse(script, path)


@both_parsers
def test_misspelt_flag_is_named(script: str) -> None:
    """Flags are not completed: an unknown one is an error, even where it begins a known one."""
    with pytest.raises(ValueError, match="--experts_quant_typ"):
        parse(script, TINY, "--experts_quant_typ", "nf4")


@both_parsers
@pytest.mark.parametrize(("key", "value"), [("experts_blocksize", 64.5), ("quantize_linears", "perhaps")])
def test_yaml_values_have_the_type_of_the_field(
    script: str, key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number or switch of the wrong type stops with its name, as it does when given as a flag."""
    with pytest.raises(SystemExit):
        parse(script, write_yaml(tmp_path / "x.yaml", **{key: value}))
    assert key in capsys.readouterr().err


@all_configs
@both_parsers
def test_config_parses_with_both_scripts(path: Path, script: str) -> None:
    """Each file is accepted by each script, and its values arrive."""
    # TrainingArguments refuses bf16 on a machine without a GPU unless it is told to use the CPU.
    flags = ["--use_cpu", "true"] if script == "qlora_trainer" else []
    parsed = parse(script, path, *flags)
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if key in parsed and key not in ("use_cpu", "report_to"):
            assert parsed[key] == value, key


@all_configs
def test_every_key_has_a_comment(path: Path) -> None:
    """Each key stands below a comment line of its own."""
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert len(keys) == len(yaml.safe_load(path.read_text(encoding="utf-8")))
    for i in keys:
        assert re.match(r"# \S", lines[i - 1]), f"{path.name}: {lines[i]}"
    assert max(map(len, lines)) <= 119


def test_configs_share_their_keys() -> None:
    """The files differ in values; only what counts steps and picks the device is in some of them."""
    keys = {path.stem: set(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in CONFIGS.glob("qlora_*.yaml")}
    assert set.union(*keys.values()) - set.intersection(*keys.values()) == {
        *("use_cpu", "max_steps", "num_train_epochs", "eval_steps"),
    }


def count_parameters(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Parameters of experts, of packed linear layers, and of all else, in billions."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    packed = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    counts = [0, 0, 0]
    for name, parameter in model.named_parameters():
        counts[0 if ".experts." in name else 1 if name in packed else 2] += parameter.numel()
    return tuple(counts)


@pytest.mark.parametrize(
    ("stem", "config"),
    [
        (
            "qlora_olmoe_1b_7b",
            OlmoeConfig(
                vocab_size=50304,
                hidden_size=2048,
                intermediate_size=1024,
                num_hidden_layers=16,
                num_attention_heads=16,
                num_key_value_heads=16,
                num_experts=64,
            ),
        ),
        (
            "qlora_qwen3_30b_a3b",
            Qwen3MoeConfig(
                vocab_size=151936,
                hidden_size=2048,
                moe_intermediate_size=768,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
                num_experts=128,
            ),
        ),
    ],
)
def test_memory_in_the_comments(stem: str, config: PreTrainedConfig) -> None:
    """The parameters and gigabytes in the comments follow from the model's shapes."""
    comment = (CONFIGS / f"{stem}.yaml").read_text(encoding="utf-8").split("## The model")[0]
    rows = re.findall(r"^# +(\S+) .*?([\d.]+) B x ([\d.]+) +([\d.]+) GB", comment, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["experts", "attention", "embeddings,"]
    counts = count_parameters(config)
    for count, (_, billions, bytes_per_weight, gigabytes) in zip(counts, rows, strict=True):
        assert billions == f"{count / 1e9:.3f}"
        assert gigabytes == f"{count * float(bytes_per_weight) / 1e9:.2f}"
    assert [row[2] for row in rows] == ["0.5625", "0.5625", "4"]
    total, bf16 = re.search(r"together +([\d.]+) GB +\(bf16: ([\d.]+) GB\)", comment).groups()
    assert total == f"{((counts[0] + counts[1]) * 0.5625 + counts[2] * 4) / 1e9:.2f}"
    assert bf16 == f"{sum(counts) * 2 / 1e9:.2f}"
    assert f"{sum(counts) / 1e9:.2f} B parameters" in comment


@pytest.mark.parametrize("name", ["quantize_checkpoint.py", "qlora_trainer.py"])
def test_scripts_are_short(name: str) -> None:
    """At most 120 lines."""
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 120


def test_tiny_model_is_made_once(tmp_path: Path) -> None:
    """The same seed gives the same bytes, an existing folder is left alone, and the random state is as before."""
    state = torch.get_rng_state()
    for name in ("a", "b"):
        create_tiny_model(tmp_path / name)
    assert torch.equal(torch.get_rng_state(), state)
    weights = tmp_path / "a" / "model.safetensors"
    assert weights.read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    create_tiny_model(tmp_path / "a", seed=1)
    assert weights.read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_tiny_tokenizer_encodes_anything() -> None:
    """Any text comes back from the tokens, none of which is outside of the vocabulary."""
    tokenizer = make_tokenizer()
    text = "def f(x):\n\treturn x  # naïve, 漢字, 🙂\r\n"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < len(tokenizer) == 512
