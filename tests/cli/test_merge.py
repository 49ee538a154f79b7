"""The command line of a merge: what it prints, and how it fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_qmoe.cli import main
from hf_qmoe.lora import merge_checkpoint as module
from tests.support.checkpoints import digest, tensors_on_disk
from tests.support.merging import lora_config, save_adapter, save_base


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base checkpoint and an adapter of it."""
    folder = tmp_path_factory.mktemp("merge")
    base = save_base(folder / "base", "qwen3_moe", torch.bfloat16)
    return base, save_adapter(folder / "adapter", base, lora_config("qwen3_moe", layers_to_transform=[1]))


def test_says_what_it_did(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders
    out = tmp_path / "out"
    capsys.readouterr()

    assert main(["merge", str(base), str(adapter), str(out)]) == 0

    before, after = tensors_on_disk(base), tensors_on_disk(out)
    changed = sum(not torch.equal(after[name], tensor) for name, tensor in before.items())
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    output = capsys.readouterr()
    assert changed
    assert output.out == (
        f"merged {changed} of {len(before)} tensors (6 adapted parameters); wrote {size / 1024:.1f} KiB to {out}\n"
    )
    shards = sorted(file.name for file in base.glob("*.safetensors"))
    assert output.err.splitlines() == [f"[{i}/{len(shards)}] {name}" for i, name in enumerate(shards, 1)]


def test_quiet_and_overwrite(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["merge", *map(str, folders), str(tmp_path / "out"), "--quiet"]
    assert main(arguments) == 0
    expected = digest(tmp_path)
    capsys.readouterr()
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert (
        output.err == f"hf-qmoe merge: error: {tmp_path / 'out'} exists and is not empty (--overwrite replaces it)\n"
    )
    assert main([*arguments, "--overwrite"]) == 0
    assert capsys.readouterr().err == ""
    assert digest(tmp_path) == expected


def test_mistakes_are_one_line(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = shutil.copytree(folders[0], tmp_path / "base")
    (base / "model.safetensors.index.json").unlink()
    capsys.readouterr()
    for arguments in ([base, folders[1]], [base, base], [tmp_path / "none", folders[1]], [folders[1], base]):
        assert main(["merge", *map(str, arguments), str(tmp_path / "out")]) == 1
        output = capsys.readouterr()
        assert output.err.startswith("hf-qmoe merge: error: ")
        assert output.err.count("\n") == 1
        assert output.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_full_disk_is_one_line_and_a_bug_is_not(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise failure

    monkeypatch.setattr(module, "_write_shard", fail)
    arguments = ["merge", *map(str, folders), str(tmp_path / "out"), "--quiet"]
    failure: Exception = OSError(28, "No space left on device")
    capsys.readouterr()
    assert main(arguments) == 1
    assert capsys.readouterr().err == "hf-qmoe merge: error: [Errno 28] No space left on device\n"
    failure = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        main(arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["merge"], ["merge", "a", "b"], ["unmerge", "a", "b", "c"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hf-qmoe")


def test_help_of_the_module() -> None:
    command = [sys.executable, "-m", "hf_qmoe.cli", "merge", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: hf-qmoe merge [-h] [--overwrite] [--quiet] BASE ADAPTER OUT\n")
